"""One process of `ulysses verify`.

    python -m ulysses.launch.worker -m ulysses.launch.verify_rank FOLDER

FOLDER holds the request, and in the end the report.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ulysses
from ulysses.launch.verify import REPORT, REQUEST, Input, Request
from ulysses.verify_report import Report


def main() -> None:
    """Leaves the report, if this is rank 0."""
    folder = Path(sys.argv[1])
    request: Request = pickle.loads((folder / REQUEST).read_bytes())
    mesh = ulysses.init_mesh(sp=request.sp, device_type=request.device_type)
    report = report_of(request, mesh)
    if dist.get_rank() == 0:
        (folder / REPORT).write_bytes(pickle.dumps(report))
    dist.destroy_process_group()


def report_of(request: Request, mesh: Any) -> Report:
    """Makes the module and its inputs alike on all ranks, and compares."""
    torch.manual_seed(request.seed)
    factory = load(request.factory)
    distribute: Any = ulysses.parallelize if request.parallelize else ulysses.wrap
    return ulysses.verify(
        factory,
        {item.name: draw(item) for item in request.inputs},
        mesh,
        dims={item.name: item.dim for item in request.inputs if item.dim is not None},
        distribute=partial(distribute, **request.options),
        shard_inputs=not request.parallelize,
        token=request.token,
        dtype=getattr(torch, request.dtype),
        tolerance=request.tolerance,
    )


def load(path: str) -> Callable[[], nn.Module]:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{path} is a {type(found).__name__}: give a function that makes a module")
    return found if not isinstance(found, nn.Module) else lambda: found


def draw(item: Input) -> Tensor:
    """The whole tensor of an input."""
    if item.kind == "normal":
        return torch.randn(item.shape)
    if item.kind != "positions":
        return torch.randint(int(item.kind), item.shape)
    assert item.dim is not None, "the command has looked"
    along = [1] * len(item.shape)
    along[item.dim] = item.shape[item.dim]
    return torch.arange(item.shape[item.dim]).view(along).expand(item.shape).clone()


if __name__ == "__main__":
    main()
