"""Attention written out as matrix products, for what fused kernels do not give.

Two things: dropout that is drawn by position, and the log-sum-exp with gradients through it.

A random stream gives another dropout pattern as soon as the work is cut another way. Here weight
(batch, head, query, key) is kept or dropped by a hash of those four and the seed, so that one
process and any number of ranks agree bit for bit, and no two heads or rows repeat each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ulysses.backends.base import Dropout

_BITS = 0xFFFFFFFF


def attend_written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B, Sq, H, Dv] and the log-sum-exp [B, Sq, H] of each row's scores.

    `mask` is bool (True attends) or added to the scores, broadcastable to [B, H, Sq, Sk]. Scores
    and log-sum-exp are in float32 at least; rows that see nothing give zeros and -inf.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _attend(query, key, value, mask, scale, dropout)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    heads, kv_heads = query.shape[2], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    q_bkgsd = query.to(exact).unflatten(2, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bqkgd,bskd->bkgqs", q_bkgsd, key.to(exact)).flatten(1, 2) * scale
    hidden = torch.zeros((), dtype=torch.bool, device=query.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    elif mask is not None:
        scores = scores + mask.to(exact)
        hidden = mask == -torch.inf
    # A finite stand-in for -inf: the gradients of a row without keys are then 0, not NaN.
    scores = scores.masked_fill(hidden, torch.finfo(exact).min)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(hidden, 0.0)
    empty = hidden.expand_as(scores).all(-1)
    if dropout is not None:
        survivors = kept(tuple(weights.shape), dropout, query.device)
        weights = weights * survivors / (1 - dropout.p)
    grouped = weights.unflatten(1, (kv_heads, -1))
    out = torch.einsum("bkgqs,bskd->bqkgd", grouped, value.to(exact)).flatten(2, 3)
    lse = lse.squeeze(-1).masked_fill(empty, -torch.inf)
    return out.to(query.dtype), lse.transpose(1, 2)


def kept(shape: tuple[int, ...], dropout: Dropout, device: torch.device) -> Tensor:
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


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit finaliser with full avalanche (two xor-shift-multiply rounds), in int64."""
    for _ in range(2):
        word = ((word >> 16) ^ word) * 0x45D9F3B & _BITS
    return (word >> 16) ^ word
