"""docs/cases.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_in_the_table_exists():
    lines = (ROOT / "docs" / "cases.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "::" in line]
    assert len(rows) > 50
    names = [name for row in rows for name in re.findall(r"`(tests/\S+)`", row)]
    assert [name for name in names if not _exists(*name.split("::"))] == []


def _exists(path: str, name: str) -> bool:
    file = ROOT / path
    defined = ast.parse(file.read_text()).body if file.is_file() else []
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in defined)
