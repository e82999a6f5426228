"""In which order of axes the Ascend operators are to read [B, S, H, D] tensors without a copy.

BSND and BNSD name every axis, so that the operator compares the head count it is told with the one
it sees. BSH and SBH hide the head axis inside the last one: a wrong head count is then accepted and
the answer is silently wrong, which is why they are not offered here. What the exchange delivers,
[S, B, H, D] in memory, is BSND of one batch with B*H heads, and TND. That is for sequences of
several lengths, one after the other: it takes fewer head dims and modes, and several calls in one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

MAX_HEADS = 256
_MAX_ROW = 65534  # elements of one row's heads, N*D, in BSND


@dataclass(frozen=True, slots=True)
class Layout:
    """One order of axes; `folds_batch` runs the batch as more heads of one row of sequences."""

    name: str
    heads_dim: int
    folds_batch: bool = False

    def is_free(self, tensor: Tensor) -> bool:
        """True if the tensor [B, S, H, D] already lies in this order, row-major."""
        return self._ordered(tensor).is_contiguous()

    def lay(self, tensor: Tensor, width: int) -> Tensor:
        """A [B, S, H, D] tensor in this order, row-major, its last dim padded to `width` by zeros.

        Zeros in q and k add nothing to a score, and zeros in v are columns to cut off again.
        """
        ordered = self._ordered(tensor)
        if width > tensor.shape[3]:
            ordered = functional.pad(ordered, (0, width - tensor.shape[3]))
        ordered = ordered.contiguous()
        if not self.folds_batch:
            return ordered
        folded = ordered.flatten(1, 2)  # [S, B*H, D]
        return folded if self.name == "TND" else folded.unsqueeze(0)

    def restore(self, tensor: Tensor, batch: int, width: int) -> Tensor:
        """The operator's output as [B, S, H, width], a view."""
        if self.folds_batch:
            folded = tensor if self.name == "TND" else tensor.squeeze(0)
            tensor = folded.unflatten(1, (batch, folded.shape[1] // batch))
        return self._ordered(tensor)[..., :width]

    def restore_rows(self, rows: Tensor, batch: int) -> Tensor:
        """What the operator gives a head and row, [B, N, S] in every layout, as [B, S, H]."""
        if self.folds_batch:
            rows = rows.squeeze(0).unflatten(0, (batch, rows.shape[1] // batch))
        return rows.transpose(1, 2)

    def _ordered(self, tensor: Tensor) -> Tensor:
        """From [B, S, H, D] to this order of four axes, and back: each order is its own inverse."""
        if self.folds_batch:
            return tensor.transpose(0, 1)
        return tensor.transpose(1, 2) if self.name == "BNSD" else tensor


_BSND = Layout("BSND", heads_dim=2)
_SBND = Layout("BSND", heads_dim=2, folds_batch=True)
_BNSD = Layout("BNSD", heads_dim=1)
TND = Layout("TND", heads_dim=1, folds_batch=True)


def choose_layout(query: Tensor, key: Tensor, value: Tensor, *, may_fold: bool) -> Layout:
    """The legal layout that copies the fewest elements of these three.

    A batch may not be folded into the heads where a mask differs between its entries.
    """
    batch, _, num_heads, head_dim = query.shape
    width = num_heads * max(head_dim, value.shape[3])
    legal = [_BNSD]
    if may_fold and batch * num_heads <= MAX_HEADS and batch * width <= _MAX_ROW:
        legal.insert(0, _SBND)
    if width <= _MAX_ROW:
        legal.insert(0, _BSND)
    tensors = (query, key, value)
    return min(legal, key=lambda layout: sum(t.numel() for t in tensors if not layout.is_free(t)))
