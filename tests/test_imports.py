"""Imports point down, load no optional package, and need no process group."""

import ast
import functools
import graphlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ulysses"

# Who may import whom, one row a room: a module of ulysses/, or a package below it. A room may also
# import what its imports may. A new module gets a row here.
ARROWS: dict[str, set[str]] = {
    "route": set(),
    "tiling": {"route"},
    "degrees": set(),
    "strict_yaml": set(),
    "agreement": set(),
    "eager": set(),
    "loaded": set(),
    "group": set(),
    "backends": set(),
    "config": {"degrees", "strict_yaml", "tiling"},
    "mesh": {"degrees"},
    "layout": {"route"},
    "workspace": set(),
    "exchange": {"layout", "workspace"},
    "structure": {"backends"},
    "call": {"tiling", "structure"},
    "grid": {"call"},
    "ends": set(),
    "arguments": {"ends", "loaded"},
    "argument_checks": {"arguments"},
    "inputs": {"argument_checks", "call", "group"},
    "joint": {"ends", "exchange", "tiling"},
    "autocast": {"arguments"},
    "tile_kernel": {"structure", "tiling"},
    "tile_inputs": {"arguments", "call", "joint", "tile_kernel"},
    "attention": {
        "autocast",
        "eager",
        "grid",
        "inputs",
        "tile_inputs",
        "agreement",
    },
    "sequence": {"exchange", "group", "tiling"},
    "cache_rows": set(),
    "cache_step": {"inputs", "sequence", "tile_kernel"},
    "cache": {"agreement", "cache_rows", "cache_step"},
    "loss": {"sequence"},
    "gradients": {"loaded", "sequence"},
    "draws": {"sequence"},
    "guidance": {"wrap_lengths", "sequence"},
    "data": {"draws"},
    "conformance_added": {"backends"},
    "conformance": {"conformance_added"},
    "conformance_checks": {"conformance"},
    "conformance_dropout": {"conformance_checks"},
    "conformance_pieces": {"conformance_checks"},
    "testing": {"conformance_dropout", "conformance_pieces"},
    "plan": {"config"},
    "wrap_policy": set(),
    "wrap_code": set(),
    "wrap_mixers": set(),
    "wrap_table": set(),
    "wrap_probe": set(),
    "wrap_lengths": {"attention"},
    "wrap_scope": {"cache", "wrap_lengths", "wrap_policy"},
    "wrap_open": {"wrap_scope"},
    "wrap_sites": {"wrap_code", "wrap_mixers", "wrap_scope"},
    "wrap_multihead": {"wrap_scope", "sequence"},
    "wrap_callable": {"wrap_open"},
    "integrations": {"cache", "sharding_plan", "wrap_code", "wrap_open", "wrap_sites", "sequence"},
    "sharding_plan": set(),
    "wrap_families": {"integrations"},
    "wrapping": {
        "wrap_families",
        "wrap_callable",
        "wrap_multihead",
        "wrap_probe",
        "wrap_sites",
        "wrap_table",
    },
    "parallel_inputs": {"wrapping", "loss"},
    "parallel_region": {"wrapping"},
    "parallel_plan": {"wrapping"},
    "parallel": {"parallel_inputs", "parallel_plan", "parallel_region"},
    "verify_report": set(),
    "verify_compare": {"loss", "verify_report"},
    "verification": {"data", "gradients", "verify_compare", "wrapping"},
    "__init__": {
        "attention",
        "cache",
        "inputs",
        "config",
        "data",
        "gradients",
        "guidance",
        "loss",
        "mesh",
        "parallel",
        "plan",
        "testing",
        "verification",
    },
    "launch": {"__init__"},
}
PLAIN = {"route", "tiling", "degrees", "strict_yaml", "config"}  # Python only: no torch
GROUPLESS = PLAIN | {"backends"}  # nothing of torch.distributed

OPTIONAL = ["diffusers", "gguf", "matplotlib", "torch_npu", "transformers"]
# Loaded on request only, where a user who lacks the package is told so.
NEEDS_OPTIONAL = ("ulysses.integrations.",)
# Torch's own that take as long to import as the rest of it, in each process of a launch.
SLOW = ["sympy", "torch._dynamo", "torch.distributed.tensor"]

PROBE = """
import importlib, json, pkgutil, sys
import ulysses
loaded = [name for name in sys.argv[1].split() if name in sys.modules]
for name in sys.argv[1].split():
    sys.modules[name] = None  # importing it now raises
names = [found.name for found in pkgutil.walk_packages(ulysses.__path__, "ulysses.")]
for name in names:
    if not name.startswith(tuple(sys.argv[2].split())) and not name.endswith(".__main__"):
        importlib.import_module(name)
slow = [name for name in sys.argv[3].split() if name in sys.modules]
import torch.distributed
print(json.dumps([loaded, names, slow, torch.distributed.is_initialized()]))
"""


def room_of(module: str) -> str:
    """`ulysses.backends.base` stands in `backends`, `ulysses` itself in `__init__`."""
    return [*module.split("."), "__init__"][1]


def modules() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            path = Path(folder) / name
            if path.suffix == ".py":
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The dotted names that a file imports, at any depth; `from a import b` counts as `a.b`."""

    def names() -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import, line {node.lineno}"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    return frozenset(names())


def reachable() -> dict[str, set[str]]:
    """Every room with all rooms below it; a cycle among the rows raises CycleError."""
    below: dict[str, set[str]] = {}
    for room in graphlib.TopologicalSorter(ARROWS).static_order():
        below[room] = ARROWS[room].union(*(below[other] for other in ARROWS[room]))
    return below


def test_every_module_stands_in_a_room_of_the_table() -> None:
    assert {room_of(module) for module in modules()} <= set(ARROWS)


@pytest.mark.parametrize("room", ARROWS)
def test_imports_point_down(room: str) -> None:
    allowed = reachable()[room] | {room}
    for module, path in modules().items():
        if room_of(module) == room:
            ours = {name for name in imports(path) if name.split(".")[0] == "ulysses"}
            upward = {name for name in ours if room_of(name) not in allowed}
            assert not upward, f"{module} imports {upward}, but {room} may use {sorted(allowed)}"


def test_the_base_of_the_backends_imports_no_other_backend() -> None:
    assert not {name for name in imports(PACKAGE / "backends/base.py") if "ulysses" in name}


@pytest.mark.parametrize(("rooms", "banned"), [(PLAIN, "torch"), (GROUPLESS, "torch.distributed")])
def test_the_lower_rooms_know_nothing_of(rooms: set[str], banned: str) -> None:
    for module, path in modules().items():
        if room_of(module) in rooms:
            for name in imports(path):
                assert not f"{name}.".startswith(f"{banned}."), f"{module} imports {name}"


def test_the_environment_is_read_in_launch_only() -> None:
    for module, path in modules().items():
        if room_of(module) != "launch":
            read = {
                node.lineno
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            }
            assert not read, f"{module} reads the environment, lines {sorted(read)}"


@pytest.mark.usefixtures("launching")
def test_a_bare_install_imports_everything_without_a_process_group(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PROBE]
    command += [" ".join(OPTIONAL), " ".join(NEEDS_OPTIONAL), " ".join(SLOW)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded_by_ulysses, names, slow, has_group = json.loads(done.stdout)
    assert loaded_by_ulysses == []
    assert set(names) == set(modules()) - {"ulysses"}
    assert slow == []
    assert has_group is False
