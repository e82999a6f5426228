"""The local kernel on one rank's tile: for each even run of heads, once a piece of rows.

A kernel that can takes all pieces of a run at once (`LocalAttention` in ulysses.backends.base).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ulysses.backends.base import (
    Alibi,
    Dropout,
    LocalAttention,
    Piece,
    cut_mask,
    no_attention,
    nothing,
)
from ulysses.structure import NO_KEYS, Structure
from ulysses.tiling import Tile

_Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Attend:
    """What a tile asks of its kernel, called with (query, key, value, **arguments).

    `piece` gives the output, or the output and the log-sum-exp, of rows that see one band;
    `pieces`, where the kernel has it, the output of all at once, or None where it can not.
    """

    piece: Callable[..., tuple[Tensor, ...]]
    pieces: Callable[..., Tensor | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a kernel is told besides the tensors.

    `mask` [B|1, H|1, Sq|1, Sk|1] holds all heads and rows or, with `mask_is_of_tile`, this tile's;
    `alibi_slopes` and `sinks` are [H], of all heads; `seed` is set where there is dropout.
    """

    scale: float
    dropout_p: float = 0.0
    seed: int = 0
    mask: Tensor | None = None
    mask_is_of_tile: bool = False
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def attend_tile(
    attend: Attend, tile: Tile, structure: Structure, tensors: _Tensors, options: Options
) -> tuple[Tensor, ...]:
    """[B, Sq, h, D], [B, Sk, hkv, D] and [B, Sk, hkv, Dv] of a tile to what `attend` gives."""
    pieces = structure.within(tile.queries) or [Piece(tile.queries, NO_KEYS)]
    query, key, value = tensors
    runs = []
    for heads, kv_heads in tile.runs or ((range(0), range(0)),):
        of_run = _cut(query, 2, heads), _cut(key, 2, kv_heads), _cut(value, 2, kv_heads)
        together = _together(attend, tile, pieces, heads, of_run, options)
        if together is None:
            rows = [_apart(attend, tile, piece, heads, of_run, options) for piece in pieces]
            runs.append(_joined(rows, dim=1))
        else:
            runs.append((together,))
    return _joined(runs, dim=2)


def _together(
    attend: Attend,
    tile: Tile,
    pieces: list[Piece],
    heads: range,
    tensors: _Tensors,
    options: Options,
) -> Tensor | None:
    """All pieces of a run of heads in one call, if there are several and the kernel can."""
    if attend.pieces is None or len(pieces) == 1 or not all(tensor.numel() for tensor in tensors):
        return None
    whole = Piece(tile.queries, tile.keys)
    arguments = _arguments(tile, whole, heads, options)
    return attend.pieces(*tensors, pieces=[_within(piece, whole) for piece in pieces], **arguments)


def _apart(
    attend: Attend, tile: Tile, piece: Piece, heads: range, tensors: _Tensors, options: Options
) -> tuple[Tensor, ...]:
    """One piece of a run of heads."""
    own = _within(piece, Piece(tile.queries, tile.keys))
    query, key, value = tensors
    cut = _cut(query, 1, own.queries), _cut(key, 1, own.keys), _cut(value, 1, own.keys)
    return attend.piece(*cut, band=piece.band, **_arguments(tile, piece, heads, options))


def _cut(tensor: Tensor, dim: int, part: range) -> Tensor:
    """The part of a tensor that it has; all of it is no new view, a node in autograd."""
    if len(part) == tensor.shape[dim]:
        return tensor
    return tensor[:, part.start : part.stop] if dim == 1 else tensor[:, :, part.start : part.stop]


def _within(piece: Piece, whole: Piece) -> Piece:
    """The piece, counted from the whole's first row and key."""
    row, column = whole.queries.start, whole.keys.start
    queries, keys = piece.queries, piece.keys
    return replace(
        piece,
        queries=range(queries.start - row, queries.stop - row),
        keys=range(keys.start - column, keys.stop - column) if keys else NO_KEYS,
    )


def output_of(backend: LocalAttention) -> Attend:
    """The kernel's output alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor]:
        if not (query.numel() and key.shape[1]):
            return (no_attention(query, key, value, *_learned(arguments)),)
        return (backend(query, key, value, **arguments),)

    return Attend(attend, getattr(backend, "attend_pieces", None))


def output_and_lse_of(backend: LocalAttention) -> Attend:
    """The kernel's output and the log-sum-exp [B, Sq, H] of its scores.

    Whether that has a gradient is the same for every tile, empty or not: all ranks exchange it.
    Raises ValueError for a kernel that has no log-sum-exp.
    """
    with_lse: Callable[..., tuple[Tensor, Tensor]] | None
    with_lse = getattr(backend, "attend_with_lse", None)
    if with_lse is None:
        raise ValueError(
            f"backend {backend.name!r} has no attend_with_lse, so it can not give the log-sum-exp; "
            "pass one that has, such as 'sdpa' or 'ascend'"
        )
    has_gradient = getattr(backend, "lse_has_gradient", False)

    def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        if query.numel() and key.shape[1]:
            out, lse = with_lse(query, key, value, **arguments)
        else:
            learned = _learned(arguments)
            out = no_attention(query, key, value, *learned)
            lse = _lse_of_nothing(query, arguments.get("sinks")) + nothing(query, key, *learned)
        return out, lse if has_gradient else lse.detach()

    return Attend(attend)


def refusing_gradients(lse: Tensor, link: Tensor) -> Tensor:
    """A log-sum-exp that its kernel gives no gradient: it raises in a backward pass through it.

    `link` is any tensor that requires a gradient; it gets none from here.
    """
    result: Tensor = _RefusingGradients.apply(lse, link)  # type: ignore[no-untyped-call]
    return result


class _RefusingGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lse: Tensor, link: Tensor) -> Tensor:
        del link
        return lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "the kernel gives no gradient through the log-sum-exp, which would be lost: use "
            "lse.detach(), or backend='sdpa'"
        )


def _lse_of_nothing(query: Tensor, sinks: Tensor | None) -> Tensor:
    """[B, Sq, H] for rows without a key: -inf, or the sink, which is a score."""
    exact = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=exact)
    return lse if sinks is None else lse.logaddexp(sinks.to(exact))


def _learned(arguments: dict[str, Any]) -> list[Tensor]:
    """Those of a kernel's arguments besides query, key and value that may ask for a gradient."""
    alibi = arguments.get("alibi")
    given = (arguments.get("mask"), alibi and alibi.slopes, arguments.get("sinks"))
    return [tensor for tensor in given if tensor is not None]


def _arguments(tile: Tile, piece: Piece, heads: range, options: Options) -> dict[str, Any]:
    """The kernel's keyword arguments for a run of heads (counted within the tile) of a piece."""
    everywhere = range(tile.heads.start + heads.start, tile.heads.start + heads.stop)
    arguments: dict[str, Any] = {"scale": options.scale}
    if options.dropout_p > 0:
        arguments["dropout"] = Dropout(
            p=options.dropout_p,
            seed=options.seed,
            head=everywhere.start,
            query=piece.queries.start,
            key=piece.keys.start,
        )
    if options.mask is not None:
        row = tile.queries.start if options.mask_is_of_tile else 0
        rows = range(piece.queries.start - row, piece.queries.stop - row)
        of_run = heads if options.mask_is_of_tile else everywhere
        arguments["mask"] = cut_mask(options.mask, heads=of_run, queries=rows, keys=piece.keys)
    own = slice(everywhere.start, everywhere.stop)
    if options.alibi_slopes is not None:
        distance = piece.keys.start - piece.queries.start
        arguments["alibi"] = Alibi(options.alibi_slopes[own], distance)
    if options.sinks is not None:
        arguments["sinks"] = options.sinks[own]
    return arguments


def _joined(parts: list[tuple[Tensor, ...]], dim: int) -> tuple[Tensor, ...]:
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(tensors, dim=dim) for tensors in zip(*parts, strict=True))
