"""Gradients over ranks: averaging them by hand, their norm, and clipping.

A norm counts every element of a gradient once: what all ranks hold alike once, and what is spread
over ranks summed over them. DTensors (FSDP2, tensor parallelism) say themselves which it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.group import process_group
from ulysses.loaded import is_dtensor, local_part
from ulysses.sequence import Group

# Plain tensors that each hold a part of one whole, such as the weights of a tp rank: whose parts
# lie on the ranks of the group.
Sharded = Sequence[tuple[Iterable[Tensor], Group]]

_Groups = tuple[dist.ProcessGroup, ...]


def average_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Average plain gradients over the ranks, as DDP does, for a loop without DDP or FSDP2.

    Collective over `group`, dp x sp. Of a tensor-parallel weight each rank averages its part, which
    the ranks of `group` must have in common. A rank without a gradient takes part with zeros, so
    that all ranks make the same calls.
    """
    found = process_group(group)
    if found is None:
        return
    sums = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        part = local_part(parameter.grad)  # of tensor parallelism
        sums.append((part, dist.all_reduce(part, group=found, async_op=True)))
    for part, work in sums:  # all on their way: a small one waits for no answer to another
        work.wait()
        part /= dist.get_world_size(found)


def grad_norm(
    parameters: Iterable[Tensor], *, sharded: Sharded = (), norm_type: float = 2.0
) -> Tensor:
    """The norm of all gradients together, a float32 or float64 scalar equal on all ranks.

    Gradients must have been averaged: call it after the backward pass of DDP or FSDP2, or after
    `average_gradients`. Plain tensors count as alike on all ranks, except those that `sharded`
    names with their group; these may be among `parameters`, or not.

    Collective over the groups that hold parts; none where nothing is sharded. Raises ValueError for
    a gradient that is still to be summed (a DTensor with a Partial placement).
    """
    total: Tensor | None = None
    for groups, members in _by_groups(parameters, sharded).items():
        part = _local_power(members, norm_type)
        for group in groups:
            dist.all_reduce(part, _reduction(norm_type), group=group)
        total = part if total is None else _joined(total, part, norm_type)
    if total is None:
        return torch.zeros(())
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    sharded: Sharded = (),
    norm_type: float = 2.0,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the old norm.

    As torch.nn.utils.clip_grad_norm_, with every element counted once over the ranks; arguments
    and errors are those of `grad_norm`. Every rank scales by the same factor.
    """
    members = list(parameters)
    sharded = [(list(some), group) for some, group in sharded]
    norm = grad_norm(members, sharded=sharded, norm_type=norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for some in _by_groups(members, sharded).values():
        for gradient in _local_gradients(some):
            gradient.mul_(factor.to(gradient.device))
    return norm


def _by_groups(parameters: Iterable[Tensor], sharded: Sharded) -> dict[_Groups, list[Tensor]]:
    """Parameters by the groups over whose ranks they are spread, in the same order on all ranks.

    Parameters without a gradient stay in: another rank may have one.
    """
    found: dict[_Groups, dict[int, Tensor]] = {}
    named: set[int] = set()
    for some, group in sharded:
        process = process_group(group)
        for parameter in some:
            named.add(id(parameter))
            key = () if process is None else (process,)
            found.setdefault(key, {})[id(parameter)] = parameter
    for parameter in parameters:
        if id(parameter) not in named:
            found.setdefault(_groups_of(parameter), {})[id(parameter)] = parameter
    return {groups: list(members.values()) for groups, members in found.items()}


def _groups_of(parameter: Tensor) -> _Groups:
    """The groups along which a DTensor is cut; none for a plain tensor."""
    if not is_dtensor(parameter):
        return ()
    gradient: Any = parameter.grad if is_dtensor(parameter.grad) else parameter
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} has placements {gradient.placements}: "
            "its parts are still to be summed; redistribute it to Replicate or Shard first"
        )
    mesh = gradient.device_mesh
    cut = [axis for axis, placement in enumerate(gradient.placements) if placement.is_shard()]
    return tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1)


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of the gradients."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _local_power(parameters: list[Tensor], norm_type: float) -> Tensor:
    """Sum of |g|^norm_type, or the largest |g|, of this rank's elements."""
    device = parameters[0].device
    wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
    norms = [
        torch.linalg.vector_norm(gradient, norm_type, dtype=wide).to(device)
        for gradient in _local_gradients(parameters)
        if gradient.numel()
    ]
    if not norms:
        return torch.zeros((), device=device, dtype=wide)
    together = torch.stack(norms)
    return together.max() if math.isinf(norm_type) else (together**norm_type).sum()


def _reduction(norm_type: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def _joined(one: Tensor, other: Tensor, norm_type: float) -> Tensor:
    other = other.to(one.device)
    return torch.maximum(one, other) if math.isinf(norm_type) else one + other
