"""Exchange-only time of the layer beside a hand-written one, side by side in one process group.

The hand-written layer is what one writes first: four all_to_all_single calls with einops around
them. In both, the local kernel is replaced by a clone, so that only packing, sending and unpacking
is timed. Rounds are interleaved and the ratio is taken round by round, since timings here drift.
Each workload has processes of its own: malloc keeps or returns pages by the largest block that it
has freed so far, so that a workload's figures would depend on the ones before it.

    python benchmarks/exchange.py --ranks 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from einops import rearrange
from torch import Tensor

from ulysses import UlyssesAttention
from ulysses.backends.base import Problem


class Workload(NamedTuple):
    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    dim: int
    backward: bool


WORKLOADS = [
    Workload("W1", 1, 2048, 20, 20, 128, False),
    Workload("W2", 1, 2048, 16, 4, 64, True),
    Workload("W3", 1, 256, 8, 8, 64, False),
    Workload("W4", 4, 512, 12, 12, 64, True),
]


class _Clone(torch.autograd.Function):
    """Stands for a kernel: each result is a fresh row-major tensor, as kernels leave it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shapes = key.shape, value.shape
        return _as_kernels_leave_it(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key_heads, value_heads = ctx.shapes[0][2], ctx.shapes[1][2]
        return (
            _as_kernels_leave_it(grad),
            _as_kernels_leave_it(grad[:, :, :key_heads]),
            _as_kernels_leave_it(grad[:, :, :value_heads]),
        )


def _as_kernels_leave_it(tensor: Tensor) -> Tensor:
    """A copy in the memory order of SDPA's results: that of the query for [S, B, H, D] memory."""
    if tensor.stride(0) == tensor.shape[2] * tensor.stride(2):
        return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    return tensor.clone(memory_format=torch.contiguous_format)


class CloneKernel:
    """A local kernel that costs one copy."""

    name = "clone"
    contiguous = False

    def unsupported(self, problem: Problem) -> None:
        return None

    def materialises(self, problem: Problem) -> bool:
        return False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        out: Tensor = _Clone.apply(query, key, value)
        return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, to_tile: bool) -> Tensor:
        ctx.group, ctx.to_tile = group, to_tile
        ranks = dist.get_world_size(group)
        pattern = "b s (p h) d -> p b s h d" if to_tile else "b (p s) h d -> p b s h d"
        sent = rearrange(tensor, pattern, p=ranks).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        back = "p b s h d -> b (p s) h d" if to_tile else "p b s h d -> b s (p h) d"
        return rearrange(received, back).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _AllToAll.apply(grad, ctx.group, not ctx.to_tile), None, None


def hand_written(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Four collectives, two copies each."""
    tiles = [_AllToAll.apply(tensor, group, True) for tensor in (query, key, value)]
    out: Tensor = _AllToAll.apply(_Clone.apply(*tiles), group, False)
    return out


def measure(rank: int, num_ranks: int, folder: str, rounds: int, work: Workload) -> None:
    """Run a workload on this rank; rank 0 prints a row of the table."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    group = dist.group.WORLD
    assert group is not None
    attention = UlyssesAttention(group, backend=CloneKernel(), grid=(num_ranks, 1))
    tensors = inputs(work, num_ranks)
    ours, theirs = [], []
    for repeat in range(rounds + 3):
        pair = (
            timed(attention, *tensors),
            timed(lambda q, k, v: hand_written(q, k, v, group), *tensors),
        )
        if repeat >= 3:  # after warming up
            ours.append(pair[0])
            theirs.append(pair[1])
    if rank == 0:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"| {work.name} | {num_ranks} | {1e3 * statistics.median(theirs):.2f} "
            f"| {1e3 * statistics.median(ours):.2f} | {ratio:.2f} |",
            flush=True,
        )
    dist.destroy_process_group()


def inputs(work: Workload, num_ranks: int) -> list[Tensor]:
    """A shard of query, key and value, and of the output's gradient if there is one."""
    shape = (work.batch, work.seq // num_ranks)
    tensors = [
        torch.randn(*shape, heads, work.dim, requires_grad=work.backward)
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    ]
    if work.backward:
        tensors.append(torch.randn(*shape, work.heads, work.dim))
    return tensors


def timed(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor | None = None,
) -> float:
    """Seconds of one pass, the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    out = attention(query, key, value)
    if upstream is not None:
        torch.autograd.grad(out, (query, key, value), upstream)
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| workload | P | hand-written, ms | layer, ms | ratio |\n|---|---|---|---|---|")
    for num_ranks in options.ranks:
        for work in WORKLOADS:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (num_ranks, folder, options.rounds, work), nprocs=num_ranks)


if __name__ == "__main__":
    main()
