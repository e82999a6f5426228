"""All-to-all among all processes, checked by value and timed, and the layer on top of it.

Some stacks report success and deliver zeros among more than two ranks, so every element that is
sent tells where it comes from, where it goes and its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import ulysses
from ulysses.backends.base import Band
from ulysses.conformance import reference_attention
from ulysses.launch.doctor_check import ExchangeCheck
from ulysses.launch.doctor_compare import BOUNDS
from ulysses.tiling import shard_lengths

_SIZES = {"4 KiB": 1 << 12, "16 MiB": 1 << 24}  # that a rank sends, what it keeps included
_LAYER = "UlyssesAttention"
_REPETITIONS = 3


def exchange_checks(
    device: torch.device, group: dist.ProcessGroup
) -> dict[str, Callable[[], ExchangeCheck]]:
    """What to run by name, the same on every rank and in this order.

    Even splits and uneven ones with empty messages, small and large; then UlyssesAttention.
    """
    num_ranks = dist.get_world_size(group)
    checks: dict[str, Callable[[], ExchangeCheck]] = {}
    for size, num_bytes in _SIZES.items():
        unit = num_bytes // 4 // num_ranks
        even = [[unit] * num_ranks for _ in range(num_ranks)]
        uneven = [[unit * ((i + 2 * j) % 3) for j in range(num_ranks)] for i in range(num_ranks)]
        for kind, counts in (("even", even), ("uneven", uneven)):
            name = f"all-to-all, {kind}, {size}"
            checks[name] = partial(_all_to_all, name, counts, device, group)
    checks[_LAYER] = partial(_attention, device, group)
    return checks


def _all_to_all(
    name: str, counts: list[list[int]], device: torch.device, group: dist.ProcessGroup
) -> ExchangeCheck:
    """`counts[i][j]` elements go from rank i to rank j; equal ones are sent without a list."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    to_send, to_receive = counts[rank], [counts[i][rank] for i in ranks]
    sent = torch.cat([_block(rank, j, counts[rank][j]) for j in ranks]).to(device)
    is_even = len({count for row in counts for count in row}) == 1
    durations = []
    for _ in range(_REPETITIONS):
        received = torch.full([sum(to_receive)], -1.0, device=device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # so that all start together
        _finish(device)
        start = time.perf_counter()
        if is_even:
            dist.all_to_all_single(received, sent, group=group)
        else:
            dist.all_to_all_single(received, sent, to_receive, to_send, group=group)
        _finish(device)
        durations.append(time.perf_counter() - start)
    blocks = received.cpu().split(to_receive)
    wrong = [i for i in ranks if not torch.equal(blocks[i], _block(i, rank, counts[i][rank]))]
    return ExchangeCheck(
        name=name,
        num_bytes=4 * (sum(to_send) - to_send[rank]),
        seconds=min(durations),
        fault=_told(rank, wrong, received) if wrong else None,
    )


def _block(source: int, target: int, size: int) -> Tensor:
    """Elements that no other pair of ranks sends, and none of them 0; exact in float32."""
    place = torch.arange(size) % 251 + 1
    return (place + 256 * (256 * source + target)).float()


def _told(rank: int, wrong: list[int], received: Tensor) -> str:
    what = "zeros" if not received.any() else "other values than were sent"
    return f"rank {rank} received {what} from rank {', '.join(map(str, wrong))}"


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _attention(device: torch.device, group: dist.ProcessGroup) -> ExchangeCheck:
    """Heads and rows that the number of ranks does not divide, beside one process."""
    num_ranks = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, 32 * num_ranks + 1, 2 * num_ranks + 1, 64)
    whole = torch.randn(shape, generator=generator).bfloat16()
    shards = [ulysses.shard_sequence(tensor, group).to(device) for tensor in whole]
    attention = ulysses.UlyssesAttention(group)
    start = time.perf_counter()
    seq_lens = shard_lengths(shape[2], num_ranks)
    out = attention(*shards, is_causal=True, seq_lens=seq_lens).cpu()
    seconds = time.perf_counter() - start
    expected, _ = reference_attention(*whole, band=Band(None, 0), scale=shape[4] ** -0.5)
    error = (out - ulysses.shard_sequence(expected, group)).abs().max().item()
    bound = BOUNDS[whole.dtype] * expected.abs().max()
    fault = None if error <= bound else f"output is off by {error:.2g}"
    return ExchangeCheck(name=_LAYER, seconds=seconds, fault=fault)
