"""What both operators compute, in float32, and how they read sparse modes and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
_TRIANGLE = 2048


def to_bnsd(tensor: Tensor, layout: str, num_heads: int) -> Tensor:
    """A view [B, N, S, D]. BSH and SBH split their last axis by the head count they are told."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    split = tensor.unflatten(2, (num_heads, tensor.shape[2] // num_heads))
    return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)


def from_bnsd(tensor: Tensor, layout: str) -> Tensor:
    """The inverse of `to_bnsd`, row-major."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2).contiguous()
    bsnd = tensor.transpose(1, 2).contiguous()
    return bsnd.flatten(2) if layout == "BSH" else bsnd


def entries(ends: Sequence[int], key_ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The rows and keys of each sequence of a TND call, from where they end."""
    rows, keys = (pairwise([0, *given]) for given in (ends, key_ends))
    for row, key in zip(rows, keys, strict=True):
        yield slice(*row), slice(*key)


def alone(tensor: Tensor, part: slice) -> Tensor:
    """[T, N, D] to one sequence's [1, N, S, D], a view."""
    return tensor[part].transpose(0, 1).unsqueeze(0)


def hidden_keys(
    mode: int,
    pre_tokens: int,
    next_tokens: int,
    mask: Tensor | None,
    num_queries: int,
    num_keys: int,
) -> Tensor | None:
    """Bool, broadcastable to [B, N, Sq, Sk], True where a key is hidden, or None.

    A written mask hides what it says and, in mode 0, the band of the tokens all that is outside it.
    Of the triangle, too, the content decides.

    Modes 3 and 4 count from the bottom right corner: CN flash_attention_score_tiling_general.cpp,
    PretokenAndNexttokenAdjustment, and prompt_flash_attention_tiling.cpp, GetPreNextTokensLeftUp.
    """
    distance = torch.arange(num_keys) - torch.arange(num_queries).unsqueeze(1)
    if mode == 0:
        if mask is None:
            return None
        return mask.bool() | (distance > next_tokens) | (distance < -pre_tokens)
    assert mask is not None
    if mode in (3, 4):
        distance = distance - (num_keys - num_queries)
    if mode in (2, 3):
        return _past(mask, distance)
    return _past(mask, distance - next_tokens) | ~_past(mask, distance + pre_tokens + 1)


def _past(mask: Tensor, distance: Tensor) -> Tensor:
    """What the compressed triangle says of a key that many columns right of the diagonal."""
    last = _TRIANGLE - 1
    return mask.bool()[(-distance).clamp(0, last), distance.clamp(0, last)]


def weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    hidden: Tensor | None,
    zero_empty_rows: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights [B, N, Sq, Sk], and the softmax's maximum and sum [B, N, Sq, 1].

    `bias` is added to the scaled scores.

    A hidden score is -FLT_MAX, so that a row without a key averages all of them unless the
    row-invalid handling is on, which gives zeros.
    """
    scores = query.float() @ shared(key.float(), query).mT * scale
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -FLT_MAX)
    largest = scores.amax(-1, keepdim=True)
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    if hidden is not None and zero_empty_rows:
        empty = hidden.all(-1, keepdim=True)
        exponentials = exponentials.masked_fill(empty, 0.0)
        largest = largest.masked_fill(empty, -FLT_MAX)
        total = total.masked_fill(empty, FLT_MAX)
    return exponentials / total, largest, total


def shared(kv: Tensor, query: Tensor) -> Tensor:
    """Key or value [B, Nkv, S, D] as every query head sees it, [B, N, S, D]."""
    return kv.repeat_interleave(query.shape[1] // kv.shape[1], dim=1)


def is_triangle(mask: Tensor | None) -> bool:
    """The shape that modes 2, 3 and 4 require; nobody checks the content."""
    return mask is not None and tuple(mask.shape) in {
        (_TRIANGLE, _TRIANGLE),
        (1, _TRIANGLE, _TRIANGLE),
        (1, 1, _TRIANGLE, _TRIANGLE),
    }
