"""The ranks that share a sequence, as the caller names them, and how much of it each one holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group itself; None for a single process.

    Raises TypeError or ValueError for what names no group, or several, or hides one.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} axes, {names}: a sequence is shared along "
                'one, pass mesh["sp"]'
            )
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is not None:
        raise TypeError(
            f"group is a {type(group).__name__}: pass a ProcessGroup, a 1-D DeviceMesh, or None "
            "for a single process"
        )
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not alone or (dist.is_torchelastic_launched() and not dist.is_initialized()):
        raise ValueError(
            "group=None means a single process, but this process is one of several and would see "
            'its own shard only; pass the sequence-parallel group, such as mesh["sp"] of '
            "ulysses.init_mesh(sp=...)"
        )
    return None


def rank_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and the number of ranks."""
    if group is None:
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def checked_lens(
    given: Sequence[int] | None, length: int, rank: int, num_ranks: int, name: str = "seq_lens"
) -> tuple[int, ...]:
    """Every rank's length, by default all equal to this one's; `name` is the argument's.

    Raises ValueError if they are not one length for each rank, or not what this rank holds.
    """
    if given is None:
        return (length,) * num_ranks
    lens = tuple(int(n) for n in given)
    if len(lens) != num_ranks or min(lens) < 0:
        raise ValueError(
            f"{name}={lens} over {num_ranks} ranks: pass one length >= 0 for each rank"
        )
    if lens[rank] != length:
        raise ValueError(
            f"{name}={lens} but rank {rank} holds {length} rows: {name}[{rank}] must be the "
            "length of the tensors passed on that rank"
        )
    return lens
