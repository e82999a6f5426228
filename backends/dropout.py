"""Dropout drawn by position: each weight's fate depends on the seed and its global place only.

A random stream gives another pattern as soon as the work is cut another way. Here weight (batch,
head, query, key) is kept or dropped by a hash of those four and the seed, so that one process and
any number of ranks agree bit for bit, and no two heads or rows repeat each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ulysses.backends.base import Dropout

_BITS = 0xFFFFFFFF


def kept(shape: tuple[int, int, int, int], dropout: Dropout, device: torch.device) -> Tensor:
    """Bool [B, H, Sq, Sk], True where the weight survives, with probability 1 - p."""
    batch, heads, queries, keys = (
        torch.arange(start, start + size, device=device)
        for start, size in zip((0, dropout.head, dropout.query, dropout.key), shape, strict=True)
    )
    word = torch.tensor(dropout.seed & _BITS, device=device)
    word = _mixed(word) ^ (dropout.seed >> 32 & _BITS)
    word = _mixed(word).view(1, 1, 1, 1) ^ batch.view(-1, 1, 1, 1)
    word = _mixed(word) ^ heads.view(1, -1, 1, 1)
    word = _mixed(word) ^ queries.view(1, 1, -1, 1)
    word = _mixed(word) ^ keys.view(1, 1, 1, -1)
    return _mixed(word) >= math.ceil(dropout.p * (_BITS + 1))


def attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    row: int,
    column: int,
    *,
    scale: float,
    dropout: Dropout,
) -> Tensor:
    """Attention of [B, S, H, D] rows that begin at `row` of the tile, over keys at `column`.

    Weights are computed in float32 at least. Rows of `mask` without a True give zeros.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    q_bkgsd = query.to(exact).unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bqkgd,bskd->bkgqs", q_bkgsd, key.to(exact)) * scale
    weights = scores.masked_fill(~mask, torch.finfo(exact).min).softmax(-1)
    weights = weights.masked_fill(~mask, 0.0).flatten(1, 2)
    place = Dropout(
        p=dropout.p,
        seed=dropout.seed,
        head=dropout.head,
        query=dropout.query + row,
        key=dropout.key + column,
    )
    batch, _, num_queries, num_keys = weights.shape
    survivors = kept((batch, heads, num_queries, num_keys), place, query.device)
    weights = (weights * survivors / (1 - dropout.p)).unflatten(1, (kv_heads, -1))
    out = torch.einsum("bkgqs,bskd->bqkgd", weights, value.to(exact))
    return out.flatten(2, 3).to(query.dtype)


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit finaliser with full avalanche (two xor-shift-multiply rounds), in int64."""
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B & _BITS
    return (word >> 16) ^ word
