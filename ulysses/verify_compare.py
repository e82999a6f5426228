"""Two runs of a module, in one process and over ranks, compared on all ranks alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.loss import mean_over_ranks
from ulysses.sequence import shard_sequence
from ulysses.verify_report import Row, Sight

# A gradient that is zero but for rounding is measured against the largest of all.
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs and gradients by name, and the loss: over ranks, this rank's share of it."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]


def cut_dim(name: str, output: Tensor, whole: Tensor) -> int | None:
    """The dim in which an output is this rank's part of the whole; None if it is the whole."""
    if output.shape == whole.shape:
        return None
    pairs = enumerate(zip(output.shape, whole.shape, strict=False))
    cut = [dim for dim, (own, all_) in pairs if own != all_]
    if output.ndim != whole.ndim or len(cut) != 1:
        raise ValueError(
            f"{name} is {tuple(output.shape)} over ranks and {tuple(whole.shape)} in one process: "
            "they must be of one shape, or differ in the sequence's dim alone"
        )
    return cut[0]


def compared(expected: Run, found: Run, group: DeviceMesh, rate: float) -> tuple[Row, ...]:
    """Everything in both runs, each with the worst difference of any rank."""
    pairs = {name: (whole, found.outputs[name]) for name, whole in expected.outputs.items()}
    pairs["loss"] = (expected.loss, mean_over_ranks(found.loss, group))
    gradients = {
        name: _zeros_for_none(whole, found.gradients[name])
        for name, whole in expected.gradients.items()
    }
    floor = _FLOOR * max((_largest(whole) for whole, _ in gradients.values()), default=0.0)
    own = {name: _difference(name, *pair, group) for name, pair in {**pairs, **gradients}.items()}
    views: list[Any] = [None] * group.size()
    dist.all_gather_object(views, own, group=group.get_group())
    rows = []
    for name, (whole, _) in {**pairs, **gradients}.items():
        told = [view[name] for view in views]
        worst = max(range(len(told)), key=lambda rank: _nan_last(told[rank]))
        scale = max(_largest(whole), floor if name in gradients else 0.0)
        row = Row(
            what=name,
            largest=_largest(whole),
            difference=told[worst],
            allowed=rate * scale,
            rank=worst,
        )
        rows.append(row)
    return tuple(rows)


def _zeros_for_none(whole: Tensor | None, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """No gradient is a gradient of zeros."""
    zeros = torch.zeros(()) if whole is None else torch.zeros_like(whole)
    if whole is None and own is not None:
        zeros = torch.zeros_like(own)
    return zeros if whole is None else whole, zeros if own is None else own


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _difference(name: str, whole: Tensor, own: Tensor, group: DeviceMesh) -> float:
    dim = cut_dim(name, own, whole)
    return _largest(own - (whole if dim is None else shard_sequence(whole, group, dim=dim)))


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number


def sights(
    alone: tuple[dict[str, Tensor], dict[str, Tensor]],
    ranks: tuple[dict[str, Tensor], dict[str, Tensor]],
    lens: tuple[int, ...],
    group: DeviceMesh,
    rate: float,
) -> tuple[Sight, ...]:
    """For each output with a row for each token: the rows that the changed token reaches."""
    found = []
    for name, whole in alone[0].items():
        with_tokens = [dim for dim, size in enumerate(whole.shape) if size == sum(lens)]
        dim = cut_dim(name, ranks[0][name], whole)
        if dim is None and not with_tokens:
            continue
        along = with_tokens[min(1, len(with_tokens) - 1)] if dim is None else dim
        least = rate * float((alone[1][name] - whole).abs().max())
        told: list[Any] = [None] * group.size()
        own = _touched(ranks[0][name], ranks[1][name], along, least)
        dist.all_gather_object(told, own, group=group.get_group())
        starts = [0 if dim is None else sum(lens[:rank]) for rank in range(len(lens))]
        reached = {row + start for rows, start in zip(told, starts, strict=True) for row in rows}
        seen = _touched(whole, alone[1][name], along, least)
        found.append(Sight(what=name, alone=tuple(seen), ranks=tuple(sorted(reached))))
    return tuple(found)


def _touched(before: Tensor, after: Tensor, dim: int, least: float) -> list[int]:
    """The rows along `dim` that differ by more than `least`."""
    moved = (after - before).abs().movedim(dim, 0).flatten(1)
    return [row for row, change in enumerate(moved) if float(change.max()) > least]
