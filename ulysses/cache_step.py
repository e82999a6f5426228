"""A decode step: what it asks of the kernel, what a rank's rows show, and the merge over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.argument_checks import checked_mask_shape
from ulysses.arguments import Arguments, QueryRows
from ulysses.backends.base import Band, Piece, Problem
from ulysses.group import rank_in
from ulysses.inputs import described
from ulysses.sequence import gather_sequence_slice_grads
from ulysses.structure import Structure
from ulysses.tile_kernel import Attend, Options, attend_tile
from ulysses.tiling import Tile


def structure_of(num_old: int, new: range, num_queries: int) -> Structure:
    """What the new tokens see of a rank's old rows, and of the new ones that it has taken.

    `new` are those among the `num_queries` new tokens. All of them see the old rows, and each the
    new rows up to its own.
    """
    everything = range(num_old + len(new))
    if not new:
        return Structure((Piece(range(num_queries), everything),))
    earlier = Piece(range(new.start), range(num_old))
    later = Piece(range(new.start, num_queries), everything, Band(None, num_old))
    return Structure(tuple(piece for piece in (earlier, later) if piece.queries))


def described_step(arguments: Arguments, length: int) -> Problem:
    """New tokens behind `length` others, as one process would attend them.

    Raises ValueError or TypeError for what can not be exact.
    """
    if isinstance(arguments.attn_mask, QueryRows) or arguments.causal_bias is not None:
        raise TypeError(
            f"attn_mask is {type(arguments.attn_mask).__name__}: new tokens are causal of "
            "themselves and on every rank; leave it out, or pass a mask [B, H, n, S]"
        )
    call = described(replace(arguments, attn_mask=None), 0, 1)
    mask = arguments.mask
    of_mask = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    if call.requires_grad or of_mask:
        raise ValueError(
            "a tensor requires gradients, and attention to a cache has no backward pass: generate "
            "under torch.no_grad() or torch.inference_mode(), and train with UlyssesAttention"
        )
    num_new = call.query_lens[0]
    sizes = (call.batch, call.num_heads, num_new, length + num_new)
    shape = checked_mask_shape(arguments, sizes)
    dtype = None if mask is None else mask.dtype
    if num_new > 1 and arguments.window is not None and arguments.window[0] is not None:
        shape = (*(shape or (1, 1))[:2], *sizes[2:])
        dtype = dtype or torch.bool
    return Problem(
        batch=call.batch,
        num_queries=num_new,
        num_keys=length + num_new,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        dtype=call.dtype,
        device_type=call.device_type,
        requires_grad=False,
        mask_dtype=dtype,
        mask_shape=shape,
    )


def problems(step: Problem, lens: tuple[int, ...], parts: tuple[range, ...]) -> Iterator[Problem]:
    """The kernel calls of all ranks for a step, of which each takes a part."""
    for num_old, new in zip(lens, parts, strict=True):
        structure = structure_of(num_old, new, step.num_queries)
        for piece in structure.within(range(step.num_queries)):
            if step.batch and piece.keys:
                yield _of_piece(step, piece)


def _of_piece(step: Problem, piece: Piece) -> Problem:
    sizes = len(piece.queries), len(piece.keys)
    shape = step.mask_shape
    if shape is not None:
        batch, heads, *sides = shape
        rows, columns = (1 if side == 1 else n for side, n in zip(sides, sizes, strict=True))
        shape = batch, heads, rows, columns
    return replace(step, num_queries=sizes[0], num_keys=sizes[1], band=piece.band, mask_shape=shape)


def own_mask(
    mask: Tensor | None, positions: Tensor, queries: range, left: int | None
) -> Tensor | None:
    """A whole mask's columns at a rank's positions, and the window where rows see it unlike.

    `queries` are the positions of the new tokens; a single one sees all that is left to it.
    """
    if mask is not None and mask.shape[3] > 1:
        mask = mask.index_select(3, positions)
    if left is None or len(queries) == 1:
        return mask
    rows = torch.arange(queries.start, queries.stop, device=positions.device)
    near = (positions >= rows.unsqueeze(1) - left)[None, None]
    if mask is None:
        return near
    return mask & near if mask.dtype == torch.bool else mask.where(near, -torch.inf)


def attend_own(
    attend: Attend,
    tensors: tuple[Tensor, Tensor, Tensor],
    structure: Structure,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """The new queries [B, n, H, D] over a rank's rows: output and log-sum-exp [B, n, H]."""
    query, key, _ = tensors
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    tile = Tile(
        heads=range(num_heads),
        queries=range(query.shape[1]),
        kv_heads=range(num_kv_heads),
        keys=range(key.shape[1]),
        group_size=num_heads // num_kv_heads,
    )
    out, lse = attend_tile(attend, tile, structure, tensors, options)
    return out, lse


def merged(
    out: Tensor, lse: Tensor, sinks: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    """The output over all ranks' rows, from each rank's own: one collective.

    A sink is a score on top of all rows, so it is counted here, once. In float32 at least.
    """
    message = torch.cat([out.to(lse.dtype), lse.unsqueeze(3)], dim=3)
    lens = (1,) * rank_in(group)[1]
    parts = gather_sequence_slice_grads(message.unsqueeze(0), group, dim=0, seq_lens=lens)
    outs, lses = parts[..., :-1], parts[..., -1]
    total = lses.logsumexp(0)
    if sinks is not None:
        total = total.logaddexp(sinks.to(total.dtype))
    # Where nothing is seen the weights are exp(-inf), not exp(-inf + inf).
    weights = (lses - total.masked_fill(total == -torch.inf, 0.0)).exp()
    return (weights.unsqueeze(4) * outs).sum(0).to(out.dtype)
