"""Losses and metrics of tokens that are spread over ranks and micro-batches.

The one rule, under DDP, FSDP2 and gradient accumulation alike: gradients are averaged over the
ranks, so each rank's loss is made such that *the mean over the ranks is the whole loss*. Reason and
proof: docs/gradients.md.

    group = ulysses.gradient_mesh(mesh)  # dp x sp: for DDP, FSDP2 and the loss
    count = ulysses.count_targets([part["targets"] for part in micro_batches], group)
    for part in micro_batches:
        logits = model(part["input_ids"]).logits
        ulysses.token_loss(logits, part["targets"], count, group).backward()

A group is a ProcessGroup, a 1-D DeviceMesh, or None for a single process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from ulysses.group import process_group, rank_in
from ulysses.sequence import Group

IGNORE_INDEX = -100  # torch's and transformers' mark of a token that has no target


def gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh dp x sp: the ranks that hold the same parameters and average their gradients.

    For `DistributedDataParallel(process_group=gradient_mesh(mesh).get_group())`, for
    `fully_shard(mesh=gradient_mesh(mesh))` and for this module's functions. A data-parallel group
    of the dp ranks alone would leave each sp rank with its own shard's gradient, silently.
    Collective at the first call, since it makes a group.
    """
    both: DeviceMesh = mesh["dp", "sp"]._flatten("dp_sp")
    return both


def count_targets(
    targets: Tensor | Sequence[Tensor], group: Group, *, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """How many tokens have a target, int64 scalar, over all ranks and all micro-batches.

    `targets` are this rank's shards, of every micro-batch that goes into one optimizer step. One
    small collective, and no waiting for the device.
    """
    parts = [targets] if isinstance(targets, Tensor) else targets
    count = torch.stack([(part != ignore_index).sum() for part in parts]).sum()
    if (found := process_group(group)) is not None:
        dist.all_reduce(count, group=found)
    return count


def share_of_mean(local_sum: Tensor, count: Tensor | int, group: Group) -> Tensor:
    """This rank's share of (sum over all ranks) / count: the mean of the shares is that mean.

    `local_sum` is the sum of what this rank holds: token losses, squared errors, anything that adds
    up. `count` is that of all ranks and micro-batches. A count of 0 gives 0.
    """
    _, num_ranks = rank_in(process_group(group))
    whole = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
    return local_sum * num_ranks / whole


def token_loss(
    logits: Tensor,
    targets: Tensor,
    count: Tensor | int,
    group: Group,
    *,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """This rank's share of the mean cross entropy over `count` tokens; backward goes from here.

    logits [.., l, V] of any floating dtype, computed on in float32 at least; targets int64 [.., l]
    are already shifted (`shift_labels`, before sharding), ignore_index where there is none. `count`
    is `count_targets` of the whole accumulated batch. A shard without any target, or without any
    token, gives 0 and zero gradients.

    Raises ValueError if the shapes don't match.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}: logits must be the "
            "targets' shape and the vocabulary; shard both alike"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    local_sum = cross_entropy(
        wide.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    return share_of_mean(local_sum, count, group)


def mean_over_ranks(share: Tensor, group: Group) -> Tensor:
    """The whole loss, detached and equal on all ranks, from every rank's share.

    For a step of several micro-batches pass the sum of the shares.
    """
    found = process_group(group)
    whole = share.detach().clone()
    if found is not None:
        dist.all_reduce(whole, group=found)
        whole /= dist.get_world_size(found)
    return whole


class Averages:
    """Means over all tokens of all ranks and steps: each token counts once, wherever it was.

    A mean of means would weigh a shard's only token as much as another's thousand, and would not be
    a number if a shard had none.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[list[Any], list[Any]]] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | int) -> None:
        """Adds this rank's sum over `count` tokens of its own. No waiting, no communication."""
        totals, counts = self._sums.setdefault(name, ([], []))
        totals.append(total.detach() if isinstance(total, Tensor) else total)
        counts.append(count)

    def result(self, group: Group) -> dict[str, float]:
        """The means since the last call, equal on all ranks; nan for what no token had.

        Collective. A rank may have added nothing, or to other names.
        """
        held = {
            name: (math.fsum(map(float, totals)), sum(map(int, counts)))
            for name, (totals, counts) in self._sums.items()
        }
        self._sums = {}
        views: list[Any] = [held]
        if (found := process_group(group)) is not None:
            views = [None] * dist.get_world_size(found)
            dist.all_gather_object(views, held, group=found)
        return {name: _mean([view[name] for view in views if name in view]) for name in _all(views)}


def _all(views: list[dict[str, Any]]) -> list[str]:
    return sorted({name for view in views for name in view})


def _mean(parts: list[tuple[float, int]]) -> float:
    count = sum(number for _, number in parts)
    return math.fsum(total for total, _ in parts) / count if count else math.nan
