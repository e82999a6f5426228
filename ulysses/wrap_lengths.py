"""How long every rank's part of each sequence is, told once a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ulysses.attention import UlyssesAttention


class Lengths:
    """Every rank's local length of each sequence in a forward, found by this rank's own.

    Without `known` ones the first attention asks the other ranks, one small collective. Raises
    ValueError, on all ranks, for sequences that some rank could not tell apart.
    """

    def __init__(self, attention: UlyssesAttention, known: Sequence[Sequence[int]] = ()) -> None:
        self._attention = attention
        self._known = list(dict.fromkeys(tuple(lens) for lens in known))
        for rank in range(attention.num_ranks):
            own = [lens[rank] for lens in self._known]
            if len(set(own)) < len(own):
                raise ValueError(
                    f"inputs of lengths {self._known} (one a rank) are alike on rank {rank}, which "
                    "could not tell them apart: shard one of them in other lengths"
                )

    @property
    def main(self) -> int | None:
        """This rank's length of the first sequence, where it is known."""
        return self._known[0][self._attention.rank] if self._known else None

    def of(self, tensor: Tensor, dim: int, site: str) -> tuple[int, ...]:
        """All ranks' lengths of the sequence in `tensor`."""
        length = tensor.shape[dim]
        if not self._known:
            told = tell([length], self._attention.group, tensor.device)
            self._known = [tuple(lens[0] for lens in told)]
        for lens in self._known:
            if lens[self._attention.rank] == length:
                return lens
        held = " or ".join(str(lens[self._attention.rank]) for lens in self._known)
        raise ValueError(
            f"{site} attends over {length} rows, but the inputs have {held} on this rank. If it "
            "does not attend along the sharded sequence, name it in local=[...]; if its keys are "
            "whole on every rank, in replicated=[...]; if the sequence lies in another dim of the "
            "inputs, give seq_dim; if tokens are added inside, shard behind that, with "
            "ulysses.parallelize(model, mesh, region=...)"
        )


def lengths_of_inputs(attention: UlyssesAttention, inputs: Any, seq_dim: int) -> Lengths:
    """The lengths in `seq_dim` of all inputs that hold tokens; one small collective.

    These are floating tensors of three dims or more, and integer ones of two, but for masks.
    """
    held = list(_with_tokens(inputs))
    if not held:
        return Lengths(attention)
    told = tell([tensor.shape[seq_dim] for tensor in held], attention.group, held[0].device)
    return Lengths(attention, list(zip(*told, strict=True)))


def _with_tokens(inputs: Any) -> Iterator[Tensor]:
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if not isinstance(leaf, Tensor) or "mask" in keystr(path):
            continue
        if holds_tokens(leaf):
            yield leaf


def holds_tokens(tensor: Tensor) -> bool:
    """By its looks: [batch, seq, dim] or more of states, or [batch, seq] of ids."""
    return tensor.ndim >= 3 if tensor.is_floating_point() else tensor.ndim == 2


def tell(
    values: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """Every rank's numbers, by rank: one small collective, and one wait for the device."""
    if group is None:
        return [list(values)]
    num_ranks = dist.get_world_size(group)
    own = torch.tensor(list(values), dtype=torch.int64, device=device).repeat(num_ranks)
    every = torch.empty_like(own)
    dist.all_to_all_single(every, own, group=group)
    told: list[list[int]] = every.view(num_ranks, len(values)).tolist()
    return told
