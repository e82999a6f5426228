"""Masks and ALiBi written out as the Ascend operators read them: what hides, and what is added.

A mask hides where it is True, the opposite of SDPA's, and has its rows and columns in full: neither
operator broadcasts them. What is added to the scores must be finite, so that the -inf of a float
mask hides instead. Both are [B, H, Sq, Sk] in every layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ulysses.backends.base import Alibi, Band


class Written(NamedTuple):
    """`hidden` is bool [B|1, H|1, Sq, Sk]; `bias` is float32 [B|1, H|1, Sq|1, Sk|1]."""

    hidden: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_for_all_heads(self) -> bool:
        """True if a batch may be run as more heads: nothing differs between the two."""
        of_one = self.hidden is None or self.hidden.shape[:2] == (1, 1)
        return of_one and self.bias is None

    @property
    def empty_rows(self) -> Tensor | None:
        """Bool [B|1, Sq, H|1], True where a row sees no key."""
        return None if self.hidden is None else self.hidden.all(-1).transpose(1, 2)

    def hidden_for(self, batch: int, num_queries: int) -> Tensor | None:
        """The mask in one of the shapes that are taken: [1, 1, ..], [B, 1, ..] or [B, H, ..].

        The inference operator's kernel of one query row reads a row for each batch entry.
        """
        if self.hidden is None:
            return None
        for_each = self.hidden.shape[1] > 1 or num_queries == 1
        return self.hidden.expand(batch if for_each else -1, -1, -1, -1).contiguous()

    def bias_for(
        self, scale: float, num_heads: int, num_queries: int, num_keys: int, dtype: torch.dtype
    ) -> Tensor | None:
        """The bias over `scale`, in the tensors' dtype, as [B|1, H, Sq, Sk].

        A number that the dtype has not becomes its largest, which still leaves a key no weight.
        """
        if self.bias is None:
            return None
        most = torch.finfo(dtype).max
        bias = (self.bias / scale).clamp(-most, most).to(dtype)
        return bias.expand(-1, num_heads, num_queries, num_keys).contiguous()


def write_out(
    band: Band, num_queries: int, num_keys: int, mask: Tensor | None, alibi: Alibi | None
) -> Written:
    """The band is written out only with a mask: a sparse mode shows it otherwise."""
    hidden = bias = None
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        if mask.dtype != torch.bool:
            bias = mask.float().masked_fill(hidden, 0.0)
        hidden = hidden.expand(-1, -1, num_queries, num_keys)
        if not band.is_full:
            hidden = hidden | ~band.mask(num_queries, num_keys, mask.device)
    if alibi is not None:
        slopes = Alibi(alibi.slopes.float(), alibi.distance)
        by_distance = slopes.bias(range(num_queries), range(num_keys))
        bias = by_distance if bias is None else bias + by_distance
    return Written(hidden, bias)
