"""torch's scaled_dot_product_attention: the reference on CPU, and the kernel on CUDA.

SDPA itself knows two shapes of visibility without a mask tensor, full and top-left causal. Any
other band is attended in blocks of query rows, each over the keys that it can see, so that no mask
is larger than a block. Dropout is drawn by position, which SDPA can not do, so it runs as written
out matrix products.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ulysses.backends.base import Band, Dropout, Problem, no_attention
from ulysses.backends.dropout import attend_with_dropout

_BLOCK_ROWS = 512
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class SdpaAttention:
    """Local attention by torch.nn.functional.scaled_dot_product_attention."""

    name = "sdpa"
    contiguous = False

    def unsupported(self, problem: Problem) -> str | None:
        """SDPA takes all that the contract can ask, in floating point."""
        if problem.dtype not in _DTYPES:
            return f"dtype={problem.dtype}: sdpa takes {', '.join(map(str, _DTYPES))}"
        return None

    def materialises(self, problem: Problem) -> bool:
        """True for any band but full and top-left causal, and for dropout."""
        band = problem.band.clipped(problem.num_queries, problem.num_keys)
        return problem.dropout_p > 0 or not (band.is_full or band == _TOP_LEFT)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """See `ulysses.backends.base.LocalAttention`."""
        band = band.clipped(query.shape[1], key.shape[1])
        if dropout is not None:
            draw = partial(attend_with_dropout, scale=scale, dropout=dropout)
            return _by_blocks(draw, query, key, value, band)
        if band.is_full or band == _TOP_LEFT:
            return _sdpa(query, key, value, scale=scale, is_causal=not band.is_full)
        return _by_blocks(partial(_masked, scale=scale), query, key, value, band)


_TOP_LEFT = Band(None, 0)


class _Block(Protocol):
    """Attention of rows that begin at `row` over keys that begin at `column`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, row: int, column: int
    ) -> Tensor: ...


def _by_blocks(attend: _Block, query: Tensor, key: Tensor, value: Tensor, band: Band) -> Tensor:
    """Attend a block of rows at a time, each over its own interval of keys."""
    outputs = []
    for start in range(0, query.shape[1], _BLOCK_ROWS):
        rows = range(start, min(start + _BLOCK_ROWS, query.shape[1]))
        keys = band.keys(rows, key.shape[1])
        block = query[:, rows.start : rows.stop]
        if not keys:
            outputs.append(no_attention(block, key, value))
            continue
        seen = slice(keys.start, keys.stop)
        mask = band.shifted(rows.start, keys.start).mask(len(rows), len(keys), query.device)
        outputs.append(attend(block, key[:, seen], value[:, seen], mask, rows.start, keys.start))
    return torch.cat(outputs, dim=1)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, row: int, column: int, *, scale: float
) -> Tensor:
    del row, column  # the mask says it all
    return _sdpa(query, key, value, scale=scale, mask=mask)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One SDPA call on [B, S, H, D] tensors; a batch inside the rows is run as more heads."""
    batch = query.shape[0]
    tensors = [query, key, value]
    folded = batch > 1 and all(_batch_lies_before_heads(tensor) for tensor in tensors)
    if folded:
        tensors = [tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0) for tensor in tensors]
    q_bhsd, k_bhsd, v_bhsd = (tensor.transpose(1, 2) for tensor in tensors)
    out = functional.scaled_dot_product_attention(
        q_bhsd,
        k_bhsd,
        v_bhsd,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)
    if folded:
        out = out.squeeze(0).unflatten(1, (batch, query.shape[2])).transpose(0, 1)
    return out


def _batch_lies_before_heads(tensor: Tensor) -> bool:
    """True for [S, B, H, D] memory: batch and heads are then one axis, and the output can be left
    in that order too, in which it is sent back without a copy."""
    return tensor.stride(0) == tensor.shape[2] * tensor.stride(2)
