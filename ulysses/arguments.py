"""What `UlyssesAttention` is called with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ulysses.ends import NO_ENDS, Ends
from ulysses.loaded import is_causal_bias


@dataclass(frozen=True, slots=True)
class QueryRows:
    """A mask of this rank's query rows and all keys, [.., l, Sk], as `attn_mask`."""

    mask: Tensor


@dataclass(frozen=True, slots=True)
class Replicated:
    """A key or value that every rank holds whole, [B, Sk, Hkv, D]: it is not exchanged.

    Its gradient on each rank is that rank's share: their sum over the group is the whole.
    """

    tensor: Tensor


# Arguments that a plan knows by shape, dtype, device and need of a gradient.
_TENSORS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "ends")
NUMBERS = ("seq_lens", "key_lens", "documents")  # several whole numbers each


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What `UlyssesAttention` was called with."""

    query: Tensor
    key: Tensor | Replicated
    value: Tensor | Replicated
    attn_mask: Tensor | QueryRows | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    seq_lens: Sequence[int] | None = None
    key_lens: Sequence[int] | None = None
    window: tuple[int | None, int | None] | None = None
    documents: Sequence[int] | None = None
    prefix_len: int | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    ends: Ends = NO_ENDS

    def __post_init__(self) -> None:
        """Read lengths and borders once: they may be a tensor's, or an iterator's."""
        for name in NUMBERS:
            given = getattr(self, name)
            numbers = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(numbers, Iterable):
                object.__setattr__(self, name, tuple(numbers))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, replicated or not."""
        return self.query, _tensor_of(self.key), _tensor_of(self.value)

    @property
    def causal_bias(self) -> Any:
        """The mask, if it is a causal bias of torch.nn.attention.bias; else None."""
        return self.attn_mask if is_causal_bias(self.attn_mask) else None

    @property
    def mask(self) -> Tensor | None:
        """The mask tensor as [B|1, H|1, Sq|1, Sk|1], Sq being this rank's rows in `QueryRows`."""
        if self.attn_mask is None or self.causal_bias is not None:
            return None
        mask = self.attn_mask.mask if isinstance(self.attn_mask, QueryRows) else self.attn_mask
        return mask[(None,) * (4 - mask.ndim)]

    @property
    def scores_are_learned(self) -> bool:
        """True if anything but the value asks for a gradient."""
        query, key, _ = self.tensors
        given = (query, key, self.mask, self.alibi_slopes, self.sinks)
        return any(tensor is not None and tensor.requires_grad for tensor in given)

    @property
    def signature(self) -> tuple[object, ...]:
        """All that a description and a plan of the call depend on: equal means equal plans."""
        return torch.is_grad_enabled(), *map(_plain, _tensors(self)), repr(_others(self))

    @property
    def options(self) -> dict[str, Any]:
        """What is asked for besides the tensors, by name, for a comparison between ranks."""
        names = ("is_causal", "scale", "window", "documents", "prefix_len")
        bias = self.causal_bias
        kind = type(self.attn_mask).__name__ if bias is None else str(bias.variant)
        return {name: getattr(self, name) for name in names} | {"attn_mask": kind}


_tensors = attrgetter(*_TENSORS)
_others = attrgetter(*(field.name for field in fields(Arguments) if field.name not in _TENSORS))


def _plain(value: Any) -> object:
    """A hashable stand-in for an argument: of a tensor, everything but its numbers."""
    if value is None:
        return None
    if is_causal_bias(value):
        return value.variant, value.seq_len_q, value.seq_len_kv
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, QueryRows | Replicated | Ends):
        return type(value), *(_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return repr(value)


def _tensor_of(given: Tensor | Replicated) -> Tensor:
    return given.tensor if isinstance(given, Replicated) else given
