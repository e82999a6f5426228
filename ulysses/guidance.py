"""The branches of a guided diffusion step, each on a group of ranks of its own.

    mesh = ulysses.init_mesh(cfg=2, sp=2)
    transformer = ulysses.parallelize(transformer, mesh)
    both = ulysses.run_branches(predict, [{"text": text}, {"text": no_text}], mesh)
    noise = both[1] + scale * (both[0] - both[1])

A step without guidance has one branch, which every group runs. Which steps these are is the same on
all ranks, or an error: the groups tell each other before they start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.sequence import gather_sequence_slice_grads
from ulysses.wrap_lengths import tell


def run_branches(
    function: Callable[..., Tensor], branches: Sequence[Mapping[str, Any]], mesh: DeviceMesh
) -> list[Tensor]:
    """`function(**branch)` of each branch, on every rank.

    With an axis "cfg" of two ranks in `mesh`, two branches run at the same time: that of this
    rank's place on the axis here, and the results, tensors of one shape, are gathered. A single
    branch, as in steps without guidance, runs everywhere. Without the axis all run here in turn.
    `function` must be deterministic. Its parameters' gradients are those of the branch that ran
    here: their sum over the axis is that of one process.

    Collective over the mesh. Raises ValueError, on all ranks, if the groups were given different
    numbers of branches, or more than there are groups.
    """
    if "cfg" not in (mesh.mesh_dim_names or ()) or mesh["cfg"].size() == 1:
        return [function(**branch) for branch in branches]
    axis, device = mesh["cfg"], torch.device(mesh.device_type)
    told = [number for (number,) in tell([len(branches)], axis.get_group(), device)]
    if set(told) not in ({1}, {axis.size()}):
        raise ValueError(
            f"numbers of branches {told} (a rank of the axis cfg each): all must be 1, for a step "
            f"without guidance, or all {axis.size()}; cfg=1 runs any number in turn"
        )
    if len(branches) == 1:
        return [function(**branches[0])]
    own = function(**branches[axis.get_local_rank()])
    lens = (own.shape[0],) * axis.size()
    return list(gather_sequence_slice_grads(own, axis, dim=0, seq_lens=lens).split(lens))
