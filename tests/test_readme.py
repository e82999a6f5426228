"""What README says is true: its program, its configuration, its error and its file names."""

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.pool import WorkerPool
from ulysses.attention import UlyssesAttention
from ulysses.config import Config
from ulysses.degrees import Degrees

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str) -> list[str]:
    """README's code blocks in a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def _printed(rank: int, num_ranks: int, script: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def test_the_ten_lines_run_on_two_ranks(pool: Callable[[int], WorkerPool]) -> None:
    script = ROOT / "examples/ten_lines.py"
    assert script.read_text() in blocks("python")
    for printed in pool(2).run(_printed, script):
        (difference,) = re.findall(r"^largest difference from one process: (.+)$", printed, re.M)
        assert float(difference) < 1e-5


def test_the_configuration_is_accepted_with_the_processes_that_the_text_says() -> None:
    (text,) = blocks("yaml")
    config = Config.from_mapping(yaml.safe_load(text))
    assert config.resolve(4 * 2 * 1) == Degrees(dp=1, sp=4, tp=2)


def test_the_error_is_the_real_one() -> None:
    query, key = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError) as caught:
        UlyssesAttention(None)(query, key, key)
    assert f"{caught.value}\n" in blocks("text")


def test_the_files_that_it_names_exist() -> None:
    named = set(
        re.findall(r"\b(?:configs|examples|launch)/\w[\w.]*\.\w+", (ROOT / "README.md").read_text())
    )
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).is_file()] == []
