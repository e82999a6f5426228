"""Random calls of the layer against one process: shapes, grids, masks and dtypes drawn together.

`python -m tests.differential --count 5000` tries many calls, and `python -m tests.differential
1234` repeats the one that a failure named.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tests import dense, random_calls, reference
from tests.pool import WorkerError, WorkerPool
from tests.random_calls import Drawn, draw, ranks_of
from ulysses import UlyssesAttention
from ulysses.backends.base import Dropout

# In units of the largest value. A rounding is 2^-9 in bfloat16; a gradient adds up a few of them.
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
CHUNK = 25  # calls in a row before the ranks are heard


def differences(rank: int, num_ranks: int, drawn: Drawn) -> dict[str, float]:
    """This rank's largest difference from one process, by name, in units of what it may be."""
    torch.default_generator.manual_seed(drawn.number)
    whole = random_calls.tensors(drawn)
    own = {name: random_calls.own(drawn, name, tensor, rank) for name, tensor in whole.items()}
    for name in drawn.learned & own.keys():
        if own[name].is_floating_point():
            own[name].requires_grad_()
    layer = UlyssesAttention(dist.group.WORLD, grid=drawn.grid or "auto", check=drawn.check)
    call = partial(layer.with_lse, **random_calls.arguments(drawn, own))
    results = call() if drawn.with_lse else (layer(**random_calls.arguments(drawn, own)),)
    torch.default_generator.manual_seed(drawn.number)
    seed = int(torch.randint(2**63 - 1, ()))

    exact = {n: t.double() if t.is_floating_point() else t for n, t in whole.items()}
    for name, tensor in own.items():
        exact[name].requires_grad_(tensor.requires_grad)
    expected = dense.attention(
        **exact,
        shape=drawn.shape,
        scale=drawn.scale,
        dropout=Dropout(p=drawn.dropout_p, seed=seed) if drawn.dropout_p else None,
    )[: len(results)]
    pairs = [
        (f"result {i}", got, reference.shard(want, drawn.query_lens, rank))
        for i, (got, want) in enumerate(zip(results, expected, strict=True))
    ]
    if any(tensor.requires_grad for tensor in own.values()):
        pairs += _gradients(drawn, (own, exact), (results, expected), rank)
    return {
        name: _difference(got, want) / max(BOUNDS[drawn.dtype], BOUNDS[got.dtype])
        for name, got, want in pairs
    }


def _gradients(
    drawn: Drawn,
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
    results: tuple[Sequence[Tensor], Sequence[Tensor]],
    rank: int,
) -> list[tuple[str, Tensor, Tensor]]:
    """(name, this rank's gradient or the sum of all ranks', what it should be)."""
    own, exact = tensors
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert got.requires_grad == want.requires_grad
        if want.requires_grad:
            upstream = reference.draw(*want.shape, seed=drawn.number + 40 + i)
            ours = random_calls.in_memory(
                reference.shard(upstream, drawn.query_lens, rank), drawn.order
            )
            got.backward(ours.to(got.dtype), retain_graph=True)
            want.backward(upstream, retain_graph=True)
    pairs = []
    for name in sorted(own):
        if not own[name].requires_grad:
            continue
        got, want = (_gradient(tensors[name]) for tensors in (own, exact))
        lens = random_calls.lens_of(drawn, name)
        if lens is None:
            dist.all_reduce(got)
        elif name == "mask":
            want = reference.shard(want.transpose(1, 2), lens, rank).transpose(1, 2)
        else:
            want = reference.shard(want, lens, rank)
        pairs.append((name, got, want))
    return pairs


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = got.detach().double(), want.detach()
    apart = torch.where(got == want, 0.0, (got - want).abs())  # infinities are equal
    size = want.abs().masked_fill(want.isinf(), 0.0)
    return float(apart.max() / size.max().clamp(min=1)) if got.numel() else 0.0


def run(rank: int, num_ranks: int, numbers: Sequence[int]) -> list[str]:
    """One line for each of these calls that is not what one process computes, on this rank."""
    wrong = []
    for number in numbers:
        drawn = draw(number)
        found = differences(rank, num_ranks, drawn)
        if far := {name: value for name, value in found.items() if not value < 1}:
            wrong.append(line(f"rank {rank} {far}", drawn))
    return wrong


def line(told: str, drawn: Drawn) -> str:
    """How to repeat a call, and what was wrong with it."""
    return f"python -m tests.differential {drawn.number}  # {told}: {drawn}"


def failures(pool: Callable[[int], WorkerPool], numbers: Iterable[int]) -> list[str]:
    """One line for each call that fails: how to repeat it, and what was wrong."""
    by_ranks: dict[int, list[int]] = {}
    for number in numbers:
        by_ranks.setdefault(ranks_of(number), []).append(number)
    lines = []
    for num_ranks, same in sorted(by_ranks.items()):
        for start in range(0, len(same), CHUNK):
            lines += _failures(pool(num_ranks), same[start : start + CHUNK])
    return lines


def _failures(pool: WorkerPool, numbers: list[int]) -> list[str]:
    try:
        return [line for lines in pool.run(run, numbers) for line in lines]
    except WorkerError as error:
        if len(numbers) > 1:  # one by one, to find which
            return [line for number in numbers for line in _failures(pool, [number])]
        return [line(str(error.errors), draw(numbers[0]))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--count", type=int, default=0, help="the first so many numbers")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    pools: dict[int, WorkerPool] = {}

    def pool(num_ranks: int) -> WorkerPool:
        return pools.setdefault(num_ranks, WorkerPool(num_ranks))

    numbers = [*options.numbers, *range(options.first, options.first + options.count)]
    try:
        lines = failures(pool, numbers)
    finally:
        for each in pools.values():
            each.close()
    print(*lines, f"{len(numbers)} calls, {len(lines)} wrong", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
