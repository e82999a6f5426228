"""What a case adds to its scores: a mask, ALiBi, sinks; and the same for the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ulysses.backends.base import Alibi

_DIMS = "BHQK"
_DISTANCE = 3  # of the tile's first key from its first query


@dataclass(frozen=True, slots=True)
class Added:
    """A mask [B|1, H|1, Sq|1, Sk|1], slopes [H] and sinks [H], each there or not."""

    mask: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """As a kernel takes them: those that there are."""
        alibi = None if self.slopes is None else Alibi(self.slopes, _DISTANCE)
        arguments = {"mask": self.mask, "alibi": alibi, "sinks": self.sinks}
        return {name: value for name, value in arguments.items() if value is not None}

    @property
    def learned(self) -> dict[str, Tensor]:
        """What has a gradient."""
        tensors = {"mask": self.mask, "slopes": self.slopes, "sinks": self.sinks}
        return {n: t for n, t in tensors.items() if t is not None and t.dtype != torch.bool}

    def changed(self, change: Callable[[Tensor], Tensor]) -> Added:
        """With each floating tensor replaced."""
        return replace(self, **{name: change(tensor) for name, tensor in self.learned.items()})

    @property
    def as_leaves(self) -> Added:
        return self.changed(lambda tensor: tensor.detach().requires_grad_())

    @property
    def on_cpu(self) -> Added:
        mask = None if self.mask is None else self.mask.cpu()
        return replace(self.changed(lambda tensor: tensor.cpu()), mask=mask)


def random_mask(
    sizes: tuple[int, int, int, int], dims: str, *, is_bool: bool, generator: torch.Generator
) -> Tensor:
    """A mask that has the named ones of the dims B, H, Q, K, and 1 in the place of the others.

    It hides a third; the first row, where it has rows, and else the first key, everywhere.
    """
    shape = [size if dim in dims else 1 for size, dim in zip(sizes, _DIMS, strict=True)]
    hidden = torch.rand(shape, generator=generator) < 1 / 3
    if "Q" in dims:
        hidden[:, :, 0] = True
    else:
        hidden[..., 0] = True
    if is_bool:
        return ~hidden
    return torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf)


def add_to(
    scores: Tensor, visible: Tensor, added: Added | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Float64 scores [B, H, Sq, Sk] with mask and bias, what is visible, sinks [B, H, Sq, 1]."""
    added = added or Added()
    mask = added.mask
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask != -torch.inf)
        scores = scores + mask.double().masked_fill(mask == -torch.inf, 0.0)
    if added.slopes is not None:
        rows, columns = range(scores.shape[2]), range(scores.shape[3])
        scores = scores + Alibi(added.slopes.double(), _DISTANCE).bias(rows, columns)
    if added.sinks is None:
        return scores, visible, None
    return scores, visible, added.sinks.double().view(1, -1, 1, 1).expand_as(scores[..., :1])
