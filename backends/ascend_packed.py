"""Packed documents, and whatever else is rows in pieces, in one call: layout TND.

An entry of such a call is a piece: its rows are followed by the next one's, its keys too, and the
lengths are told as running totals without the leading 0. All entries share one sparse mode, whose
band each counts from its own bottom right corner, so that the cut document at the border of a block
of rows is like the whole ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ulysses.backends.ascend_layout import MAX_HEADS
from ulysses.backends.ascend_limits import choose_operator
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.ascend_sparse import SparseArguments, shared_arguments
from ulysses.backends.base import Piece, Problem

_MAX_ENTRIES = 1024
_MAX_ROWS = 1_048_576
_INFERENCE_DIMS = (64, 128)


class Packed(NamedTuple):
    """Where each entry's rows and keys end, and what all of them show."""

    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    sparse: SparseArguments


def pack(pieces: Sequence[Piece]) -> Packed | None:
    """The pieces as entries of one call, without rows at the end that see nothing; None if not so.

    They are where the rows and the keys of each follow those of the one before.
    """
    seeing = [piece for piece in pieces if piece.keys]
    if not 0 < len(seeing) <= _MAX_ENTRIES:
        return None
    for axis in ("queries", "keys"):
        parts = [range(0), *(getattr(piece, axis) for piece in seeing)]
        if any(before.stop != part.start for before, part in pairwise(parts)):
            return None
    sparse = shared_arguments((p.band, len(p.queries), len(p.keys)) for p in seeing)
    if sparse is None:
        return None
    query_ends = tuple(piece.queries.stop for piece in seeing)
    return Packed(query_ends, tuple(piece.keys.stop for piece in seeing), sparse)


def packed_operator(problem: Problem, sparse: SparseArguments) -> str | None:
    """Which operator takes the entries of a problem in one call, if one does.

    The inference operator has fewer dtypes and head dims here. Where nothing is hidden it is not
    asked at all: on one stack it gave the average of the values (vllm-ascend#13699).
    """
    folded_heads = problem.batch * problem.num_heads
    if folded_heads > MAX_HEADS or max(problem.num_queries, problem.num_keys) > _MAX_ROWS:
        return None
    infers = (
        choose_operator(problem) == INFERENCE
        and sparse.mode != 0
        and problem.dtype == torch.bfloat16
        and problem.head_dim == problem.value_dim
        and problem.head_dim in _INFERENCE_DIMS
    )
    return INFERENCE if infers else TRAINING
