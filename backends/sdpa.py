"""torch's scaled_dot_product_attention: the reference on CPU, and the kernel on CUDA.

SDPA itself knows two shapes of visibility without a mask tensor, full and top-left causal. Any
other band, and what is added to the scores, is attended in blocks of query rows, each over the keys
that it can see, so that no mask of ours is larger than a block. Dropout by position and the
log-sum-exp are beyond SDPA and run written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ulysses.backends.base import Alibi, Band, Dropout, Problem, cut_mask, no_attention
from ulysses.backends.written_out import attend_written_out

_BLOCK_ROWS = 512
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TOP_LEFT = Band(None, 0)


class SdpaAttention:
    """Local attention by torch.nn.functional.scaled_dot_product_attention."""

    name = "sdpa"
    contiguous = False
    lse_has_gradient = True

    def unsupported(self, problem: Problem) -> str | None:
        """SDPA takes all that the contract can ask, in floating point."""
        if problem.dtype not in _DTYPES:
            return f"dtype={problem.dtype}: sdpa takes {', '.join(map(str, _DTYPES))}"
        return None

    def materialises(self, problem: Problem) -> bool:
        """True for any band but full and top-left causal, and for what is added to the scores."""
        band = problem.band.clipped(problem.num_queries, problem.num_keys)
        added = problem.dropout_p > 0 or problem.alibi or problem.sinks
        return added or not (band.is_full or band == _TOP_LEFT)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `ulysses.backends.base.LocalAttention`."""
        band = band.clipped(query.shape[1], key.shape[1])
        nothing_added = dropout is None and mask is None and alibi is None and sinks is None
        if nothing_added and (band.is_full or band == _TOP_LEFT):
            return _sdpa(query, key, value, scale=scale, is_causal=not band.is_full)
        blocks = _blocks(query, key, value, band, mask, alibi, sinks)
        if dropout is None:
            outputs = [_sdpa(*block.tensors, scale=scale, mask=block.mask) for block in blocks]
        else:
            outputs = [block.written_out(scale, dropout)[0] for block in blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp, with gradients through both; a sink counts as a score."""
        band = band.clipped(query.shape[1], key.shape[1])
        blocks = _blocks(query, key, value, band, mask, alibi, sinks)
        outputs, lses = zip(*(block.written_out(scale, dropout) for block in blocks), strict=True)
        return torch.cat(outputs, dim=1), torch.cat(lses, dim=1)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows and the keys that they see, with all that is added to their scores in one mask."""

    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    row: int
    column: int

    def written_out(self, scale: float, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        here = dropout and dropout.shifted(query=self.row, key=self.column)
        return attend_written_out(*self.tensors, self.mask, scale=scale, dropout=here)


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band,
    mask: Tensor | None,
    alibi: Alibi | None,
    sinks: Tensor | None,
) -> Iterator[_Block]:
    num_queries, num_keys = query.shape[1], key.shape[1]
    # A caller's mask is there already: with nothing to add to it, cutting saves no memory.
    whole = band.is_full and alibi is None and sinks is None
    step = num_queries if whole else _BLOCK_ROWS
    for start in range(0, num_queries, step):
        rows = range(start, min(start + step, num_queries))
        keys = band.keys(rows, num_keys)
        block_mask = _mask(query, rows, keys, band, mask, alibi)
        k_bshd, v_bshd = key[:, keys.start : keys.stop], value[:, keys.start : keys.stop]
        if sinks is not None:
            block_mask = _with_sinks(block_mask, sinks, query, len(rows), len(keys))
            k_bshd, v_bshd = (functional.pad(t, (0, 0, 0, 0, 0, 1)) for t in (k_bshd, v_bshd))
        own = query[:, rows.start : rows.stop]
        yield _Block((own, k_bshd, v_bshd), block_mask, rows.start, keys.start)


def _mask(
    query: Tensor,
    rows: range,
    keys: range,
    band: Band,
    mask: Tensor | None,
    alibi: Alibi | None,
) -> Tensor | None:
    """Band, mask and bias of a block as one mask [B|1, H|1, rows|1, keys|1], bool if it can be."""
    band = band.shifted(rows.start, keys.start).clipped(len(rows), len(keys))
    visible = None if band.is_full else band.mask(len(rows), len(keys), query.device)[None, None]
    if mask is not None:
        mask = cut_mask(mask, queries=rows, keys=keys)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else visible & mask
        mask = None
    if alibi is not None:
        bias = Alibi(alibi.slopes.to(_exact(query)), alibi.distance).bias(rows, keys)
        mask = bias if mask is None else mask + bias
    if mask is None:
        return visible
    mask = mask.to(_exact(query))
    return mask if visible is None else mask.masked_fill(~visible, -torch.inf)


def _exact(query: Tensor) -> torch.dtype:
    """What is added to scores: float32 at least, or a bias of -100 is off by a half in bfloat16."""
    return torch.promote_types(query.dtype, torch.float32)


def _with_sinks(
    mask: Tensor | None, sinks: Tensor, query: Tensor, num_queries: int, num_keys: int
) -> Tensor:
    """The mask with one more column, each head's sink: the score of a key that gives no value."""
    exact = _exact(query)
    if mask is None:
        mask = query.new_zeros(1, 1, 1, 1, dtype=exact)
    elif mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape, dtype=exact).masked_fill(~mask, -torch.inf)
    batch, heads = mask.shape[0], sinks.shape[0]
    column = sinks.to(exact).view(1, heads, 1, 1).expand(batch, -1, num_queries, -1)
    return torch.cat([mask.expand(batch, heads, num_queries, num_keys), column], dim=3)


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
    if not key.shape[1]:
        return no_attention(query, key, value)
    batch = query.shape[0]
    tensors = [query, key, value]
    folded = (
        batch > 1
        and (mask is None or mask.shape[:2] == (1, 1))
        and all(_batch_lies_before_heads(tensor) for tensor in tensors)
    )
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
