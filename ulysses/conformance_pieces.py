"""Rows in pieces at once, for kernels that offer `attend_pieces`: values, and every gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ulysses.backends.base import Band, Piece
from ulysses.conformance import Case, reference_attention
from ulysses.conformance_checks import Subject

_SIZES = Case(name="pieces", batch=2, num_kv_heads=2, head_dim=64, value_dim=64)
_SCALE = 0.125
_CAUSAL, _WINDOW = Band(None, 0), Band(-2, 0)


def _documents(lengths: Sequence[int], band: Band) -> list[Piece]:
    """Each sees a band of itself."""
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    parts = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return [Piece(part, part, band) for part in parts]


# Cut documents are those at the borders of a block of rows: fewer rows than keys.
PIECES = {
    "documents": _documents([3, 1, 7], Band()),
    "causal documents": _documents([3, 1, 7], _CAUSAL),
    "documents in a window": _documents([1, 9, 5], _WINDOW),
    "a window to both sides": _documents([6, 9], Band(-2, 1)),
    "rows behind the documents": [*_documents([4, 5], _CAUSAL), Piece(range(9, 11), range(0))],
    "a cut document": [Piece(range(2), range(6)), Piece(range(2, 5), range(6, 9))],
    "a cut causal document": [
        Piece(range(2), range(6), Band(None, 4)),
        Piece(range(2, 9), range(6, 13), _CAUSAL),
    ],
    "a cut document in a window": [
        Piece(range(3), range(5), Band(0, 2)),
        Piece(range(3, 9), range(5, 11), _WINDOW),
    ],
    "a prefix": [Piece(range(3), range(3)), Piece(range(3, 8), range(8), Band(None, 3))],
}


def check_pieces(subject: Subject) -> None:
    """What it takes equals the pieces one by one."""
    subject.expect_accepted(_SIZES, requires_grad=True)
    attend_pieces = subject.kernel.attend_pieces  # type: ignore[attr-defined]
    for name, pieces in PIECES.items():
        tensors = _tensors(subject, pieces)
        with torch.no_grad():
            out = attend_pieces(*tensors, pieces=pieces, scale=_SCALE)
        if out is None:
            continue
        exact = tuple(tensor.cpu().double().requires_grad_() for tensor in tensors)
        expected = _one_by_one(exact, pieces)
        subject.compare(f"output of {name}", out, expected)
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        out = attend_pieces(*leaves, pieces=pieces, scale=_SCALE)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        found = torch.autograd.grad(out, leaves, upstream)
        true = torch.autograd.grad(expected, exact, upstream.cpu().double())
        subject.compare(f"output of {name}, with gradients", out, expected)
        for whose, gradient, true_gradient in zip("qkv", found, true, strict=True):
            subject.compare(f"d{whose} of {name}", gradient, true_gradient)


def _tensors(subject: Subject, pieces: list[Piece]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(pieces))
    num_queries, num_keys = pieces[-1].queries.stop, max(piece.keys.stop for piece in pieces)
    return tuple(
        torch.randn(_SIZES.batch, length, heads, _SIZES.head_dim, generator=generator).to(
            subject.device, subject.dtype
        )
        for length, heads in (
            (num_queries, _SIZES.num_heads),
            (num_keys, _SIZES.num_kv_heads),
            (num_keys, _SIZES.num_kv_heads),
        )
    )


def _one_by_one(tensors: tuple[Tensor, ...], pieces: list[Piece]) -> Tensor:
    query, key, value = tensors
    rows = [
        reference_attention(
            query[:, piece.queries.start : piece.queries.stop],
            key[:, piece.keys.start : piece.keys.stop],
            value[:, piece.keys.start : piece.keys.stop],
            band=piece.band,
            scale=_SCALE,
        )[0]
        for piece in pieces
    ]
    return torch.cat(rows, dim=1)
