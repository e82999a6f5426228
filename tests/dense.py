"""Attention in one process with everything that a call can ask for, as one dense matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses.backends.base import Dropout
from ulysses.backends.written_out import kept


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Which keys a row sees, in numbers; see `UlyssesAttention.forward`.

    `diagonal` is the key that row 0 calls its own: 0, or Sk - Sq where causal counts from the
    lower right.
    """

    is_causal: bool = False
    diagonal: int = 0
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    prefix_len: int | None = None

    def visible(self, num_queries: int, num_keys: int) -> Tensor:
        """Bool [Sq, Sk], cell by cell: nothing here is clever."""
        rows = [[self._sees(i, j) for j in range(num_keys)] for i in range(num_queries)]
        return torch.tensor(rows, dtype=torch.bool).view(num_queries, num_keys)

    def _sees(self, row: int, column: int) -> bool:
        own = row + self.diagonal
        if self.documents is not None:
            borders = list(zip(self.documents, self.documents[1:], strict=False))
            if not any(a <= row < b and a <= column < b for a, b in borders):
                return False
        if self.prefix_len is not None and column < self.prefix_len:
            return True
        if self.is_causal and column > own:
            return False
        left, right = self.window or (None, None)
        return (left is None or column >= own - left) and (right is None or column <= own + right)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, Sq, H, Dv], and the log-sum-exp [B, Sq, H]; rows that see nothing are 0 and -inf."""
    (batch, num_queries, heads, dim), num_keys = query.shape, key.shape[1]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (dim**-0.5 if scale is None else scale)
    visible = shape.visible(num_queries, num_keys).expand_as(scores)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
        visible = visible & (mask > -torch.inf)
    if alibi_slopes is not None:
        distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
        scores = scores + alibi_slopes[:, None, None] * distance
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(batch, heads, num_queries, 1)
        scores = torch.cat([scores, column], 3)
        visible = torch.cat([visible, torch.ones_like(column, dtype=torch.bool)], 3)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], 1) if num_keys else value
    if not scores.shape[3]:
        zero = 0 * (query.sum() + key.sum() + scores.sum())
        out = query.new_zeros(*query.shape[:3], value.shape[3]) + zero + 0 * value.sum()
        return out, zero - torch.inf * torch.ones_like(out[..., 0])
    finite = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = finite.softmax(-1).masked_fill(~visible, 0.0)
    lse = finite.logsumexp(-1).masked_fill(~visible.any(-1), -torch.inf).transpose(1, 2)
    if dropout is not None:
        weights = weights * kept(tuple(weights.shape), dropout, query.device) / (1 - dropout.p)
    return torch.einsum("bhqk,bkhd->bqhd", weights[..., : value.shape[1]], value), lse
