"""Counts what a stretch of code sends and copies."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Counts:
    """Collectives by name, bytes sent to other ranks, and bytes written by copies."""

    collectives: list[str] = field(default_factory=list)
    sent: int = 0
    copied: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count all_to_all_single calls and copies in the block, in backward passes too."""
    counts = Counts()
    exchange = dist.all_to_all_single

    def counting(output: Any, input: Any, receive: Any, send: Any, group: Any, **rest: Any) -> Any:
        num_ranks = dist.get_world_size(group)
        kept = input.numel() // num_ranks if send is None else send[dist.get_rank(group)]
        counts.sent += (input.numel() - kept) * input.element_size()
        return exchange(output, input, receive, send, group=group, **rest)

    with mock.patch.object(dist, "all_to_all_single", counting), _Copies(counts):
        yield counts


class _Copies(TorchDispatchMode):
    """Sees every operator, in autograd's threads too."""

    COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::add_")

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self.COPIES:
            self.counts.copied += result.numel() * result.element_size()
        elif func._schema.name.startswith("c10d::"):
            self.counts.collectives.append(func._schema.name)
        return result
