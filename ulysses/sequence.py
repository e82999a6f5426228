"""A sequence's shards: cut it, put it together again, and keep what goes with each token.

Every rank holds a consecutive part, in rank order. `seq_lens` are the lengths of all ranks, any of
which may be 0; `ulysses.tiling.shard_lengths` gives the usual ones, which differ by at most one.
Nothing is padded. All of it moves values and never rounds them.

A group is a ProcessGroup, a 1-D DeviceMesh such as `mesh["sp"]`, or None for a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.exchange import shard_to_tile
from ulysses.group import checked_lens, process_group, rank_in
from ulysses.route import gathering
from ulysses.tiling import shard_lengths

Group = dist.ProcessGroup | DeviceMesh | None


def shard_sequence(
    tensor: Tensor, group: Group, *, dim: int = 1, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of a whole sequence, `tensor`, along `dim`; lengths from `shard_lengths`.

    The part is contiguous and has memory of its own, so that the whole can be freed; a single rank
    gets `tensor` itself. Its gradient reaches this rank's rows of the whole only. No communication.

    Raises ValueError if `seq_lens` don't add up to the whole.
    """
    rank, num_ranks = rank_in(process_group(group))
    lens = _lens_of_whole(tensor, dim, seq_lens, num_ranks)
    return tensor if num_ranks == 1 else _own_rows(tensor, dim, lens, rank)


def shard_batch(
    batch: Mapping[str, Tensor | None],
    group: Group,
    *,
    dim: int | Mapping[str, int] = 1,
    seq_lens: Sequence[int] | None = None,
) -> dict[str, Tensor | None]:
    """`shard_sequence` of everything that goes with the tokens of one sequence.

    `dim` is the sequence's dim in all tensors, or in each by name (1 where left out): -1 suits
    [batch, s] ids and [3, batch, s] positions alike. None stays None, and no name is added, dropped
    or looked at.

    Raises ValueError naming the tensors and their lengths if these differ.
    """
    dims = {name: dim.get(name, 1) if isinstance(dim, Mapping) else dim for name in batch}
    held = {name: tensor for name, tensor in batch.items() if tensor is not None}
    lengths = {name: tensor.shape[dims[name]] for name, tensor in held.items()}
    if len(set(lengths.values())) > 1:
        listing = ", ".join(
            f"{name} {length} (dim {dims[name]})" for name, length in lengths.items()
        )
        raise ValueError(
            f"lengths differ: {listing}; what goes with the tokens of one sequence is sharded "
            "together, each tensor whole"
        )
    return {
        name: None
        if tensor is None
        else shard_sequence(tensor, group, dim=dims[name], seq_lens=seq_lens)
        for name, tensor in batch.items()
    }


def gather_sequence_sum_grads(
    tensor: Tensor, group: Group, *, dim: int = 1, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """The whole sequence on every rank; backward sums all ranks' gradients of it.

    Right where each rank goes on to compute something of its own from the whole, and the loss is
    the sum of all ranks' losses. If every rank computes the same loss, it counts num_ranks times:
    see `gather_sequence_slice_grads`.

    Without `seq_lens` the ranks first tell each other their lengths, one small collective. Give
    them where they are known. Raises ValueError if they are not what this rank holds.
    """
    found, lens = lens_of_parts(tensor, group, dim, seq_lens)
    return tensor if found is None else _gathered(tensor, found, dim, lens)


def gather_sequence_slice_grads(
    tensor: Tensor, group: Group, *, dim: int = 1, seq_lens: Sequence[int] | None = None
) -> Tensor:
    """The whole sequence on every rank; backward keeps this rank's rows of its own gradient.

    Right where every rank goes on to compute the same loss from the whole, which then counts once.
    If losses differ, gradients of other ranks are lost: see `gather_sequence_sum_grads`, whose
    `seq_lens` and errors are the same.
    """
    found, lens = lens_of_parts(tensor, group, dim, seq_lens)
    if found is None:
        return tensor
    return _apply(_GatherAlike, tensor, found, dim, lens)


def position_ids(
    seq_lens: Sequence[int], rank: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Global positions of a rank's tokens, int64 [l]: what a model must not count by itself.

    Positions that are more than the token's place, such as [3, batch, s] for text, height and
    width, are made for the whole and sharded with dim=-1.
    """
    start = sum(seq_lens[:rank])
    return torch.arange(start, start + seq_lens[rank], device=device)


def documents_of(positions: Tensor) -> tuple[int, ...]:
    """The borders (0, ..., s) of packed documents, from the whole sequence's positions.

    `positions` [s] or [batch, s] count each document's tokens; one begins where they don't count
    on by one. It reads them on the host: call it once a step, and pass the result to all layers.

    Raises ValueError for positions of another kind, or if rows of the batch differ in documents.
    """
    if positions.ndim not in (1, 2):
        raise ValueError(
            f"positions of shape {tuple(positions.shape)}: [s] or [batch, s] that count tokens are "
            "needed, which text, height and width do not; pass borders as documents=(0, ..., s)"
        )
    rows = positions.unsqueeze(0) if positions.ndim == 1 else positions
    begins = rows.diff() != 1
    if not begins.equal(begins[:1].expand_as(begins)):
        raise ValueError(
            f"rows of positions {tuple(positions.shape)} hold different documents, which are one "
            "for all rows: attend rows by themselves, or pass attn_mask"
        )
    return (0, *(begins[:1].any(0).nonzero().flatten() + 1).tolist(), positions.shape[-1])


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Next-token targets of a whole sequence [..., s]: each token's successor, none for the last.

    Shift before sharding, since the target of a shard's last token lies in the next shard, and
    once: use a loss that does not shift again. `labels` stay as they are.
    """
    targets = torch.full_like(labels, ignore_index)
    targets[..., :-1] = labels[..., 1:]
    return targets


def _apply(
    function: type[torch.autograd.Function],
    tensor: Tensor,
    group: dist.ProcessGroup,
    dim: int,
    lens: tuple[int, ...],
) -> Tensor:
    moved: Tensor = function.apply(tensor, group, dim, lens)
    return moved


class _GatherAlike(torch.autograd.Function):
    """[.., l, ..] to [.., s, ..], equal on all ranks, as are its gradients: backward slices them.

    Of a loss that all ranks compute alike, the gradient of a row held once is that row of the
    whole's gradient, which every rank has.
    """

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int, lens: tuple[int, ...]
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.lens = group, dim, lens
        return _gathered(part, group, dim, lens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_SliceAlike, grad, ctx.group, ctx.dim, ctx.lens), None, None, None


class _SliceAlike(torch.autograd.Function):
    """[.., s, ..], equal on all ranks, to [.., l, ..]: the transpose of `_GatherAlike`."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, group: dist.ProcessGroup, dim: int, lens: tuple[int, ...]
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.lens = group, dim, lens
        return _own_rows(whole, dim, lens, dist.get_rank(group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_GatherAlike, grad, ctx.group, ctx.dim, ctx.lens), None, None, None


def _gathered(part: Tensor, group: dist.ProcessGroup, dim: int, lens: tuple[int, ...]) -> Tensor:
    """All ranks' parts in rank order; its transpose sums.

    Every rank's tile is the whole sequence: the exchange then is a gather for any lengths, which
    gloo's all_gather is for equal ones only.
    """
    dim %= part.ndim
    before, after = part.shape[:dim], part.shape[dim + 1 :]
    part_blhd = part.reshape(prod(before), lens[dist.get_rank(group)], 1, prod(after))
    (whole_bshd,) = shard_to_tile((part_blhd,), (gathering(lens),), group, fused=False)
    return whole_bshd.reshape(*before, sum(lens), *after)


def _own_rows(whole: Tensor, dim: int, lens: tuple[int, ...], rank: int) -> Tensor:
    rows = whole.narrow(dim, sum(lens[:rank]), lens[rank])
    return rows.clone(memory_format=torch.contiguous_format)


def _lens_of_whole(
    whole: Tensor, dim: int, seq_lens: Sequence[int] | None, num_ranks: int
) -> tuple[int, ...]:
    """The lengths into which a whole sequence is cut."""
    length = whole.shape[dim]
    if seq_lens is None:
        return shard_lengths(length, num_ranks)
    lens = tuple(int(n) for n in seq_lens)
    if len(lens) != num_ranks or min(lens) < 0 or sum(lens) != length:
        raise ValueError(
            f"seq_lens={lens} over {num_ranks} ranks, but dim {dim} of {tuple(whole.shape)} holds "
            f"{length}: pass one length >= 0 for each rank that add up to {length}, or none"
        )
    return lens


def lens_of_parts(
    part: Tensor, group: Group, dim: int, seq_lens: Sequence[int] | None
) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """The group, if it has several ranks, and the lengths that they hold."""
    found = process_group(group)
    rank, num_ranks = rank_in(found)
    length = part.shape[dim]
    if seq_lens is None and num_ranks > 1:
        told = torch.empty(num_ranks, dtype=torch.int64, device=part.device)
        dist.all_to_all_single(told, torch.full_like(told, length), group=found)
        return found, tuple(told.tolist())
    lens = checked_lens(seq_lens, length, rank, num_ranks)
    return (found if num_ranks > 1 else None), lens
