"""A call's arguments: what they mean, and what one rank can see to be wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ulysses.backends.base import Band
from ulysses.call import Call
from ulysses.ends import NO_ENDS, Ends
from ulysses.group import checked_lens
from ulysses.structure import Structure, one_band, packed, prefix


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
_NUMBERS = ("seq_lens", "key_lens", "documents")


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
        for name in _NUMBERS:
            given = getattr(self, name)
            numbers = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(numbers, Iterable):
                object.__setattr__(self, name, tuple(numbers))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, replicated or not."""
        return self.query, _tensor_of(self.key), _tensor_of(self.value)

    @property
    def mask(self) -> Tensor | None:
        """The mask tensor as [B|1, H|1, Sq|1, Sk|1], Sq being this rank's rows in `QueryRows`."""
        if isinstance(self.attn_mask, CausalBias) or self.attn_mask is None:
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = [_plain(values.pop(name)) for name in _TENSORS]
        return torch.is_grad_enabled(), *tensors, *map(repr, values.values())

    @property
    def options(self) -> dict[str, Any]:
        """What is asked for besides the tensors, by name, for a comparison between ranks."""
        names = ("is_causal", "scale", "window", "documents", "prefix_len")
        bias = self.attn_mask if isinstance(self.attn_mask, CausalBias) else None
        kind = type(self.attn_mask).__name__ if bias is None else str(bias.variant)
        return {name: getattr(self, name) for name in names} | {"attn_mask": kind}


def described(arguments: Arguments, rank: int, num_ranks: int) -> Call:
    """The call as plain data.

    Raises ValueError or TypeError for what this rank can see to be wrong.
    """
    _check_tensors(arguments)
    _check_options(arguments)
    _check_ends(arguments)
    query, key, value = arguments.tensors
    batch, length, num_heads, head_dim = query.shape
    query_lens = checked_lens(arguments.seq_lens, length, rank, num_ranks)
    key_lens = _key_lens(arguments, query_lens, rank)
    num_text = sum(arguments.ends.lens)
    num_queries, num_keys = sum(query_lens) + num_text, sum(key_lens) + num_text
    mask_shape = checked_mask_shape(arguments, (batch, num_heads, num_queries, num_keys))
    added = (arguments.mask, arguments.alibi_slopes, arguments.sinks)
    learned = (query, key, value, *added, *arguments.ends.tensors)
    return Call(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=key.shape[2],
        head_dim=head_dim,
        value_dim=value.shape[3],
        query_lens=query_lens,
        key_lens=key_lens,
        ends=arguments.ends.lens,
        dtype=query.dtype,
        device_type=query.device.type,
        requires_grad=torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in learned),
        structure=_structure(arguments, num_queries, num_keys),
        dropout_p=arguments.dropout_p,
        keys_replicated=isinstance(arguments.key, Replicated),
        mask_dtype=None if arguments.mask is None else arguments.mask.dtype,
        mask_shape=mask_shape,
        alibi=arguments.alibi_slopes is not None,
        sinks=arguments.sinks is not None,
    )


def _plain(value: Any) -> object:
    """A hashable stand-in for an argument: of a tensor, everything but its numbers."""
    if isinstance(value, CausalBias):
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


def _key_lens(arguments: Arguments, query_lens: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Every rank's key length."""
    length = arguments.tensors[1].shape[1]
    if isinstance(arguments.key, Replicated):
        if arguments.key_lens is not None:
            raise ValueError(
                f"key_lens={tuple(arguments.key_lens)} with replicated keys: each rank holds all "
                f"{length} of them; leave key_lens out"
            )
        return (length,) + (0,) * (len(query_lens) - 1)
    if arguments.key_lens is None and length != query_lens[rank]:
        query, key, value = arguments.tensors
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: key "
            "and value must have the query's length in dim 1; for cross-attention give every "
            "rank's key length in key_lens=, or pass Replicated(key) and Replicated(value)"
        )
    lens = query_lens if arguments.key_lens is None else arguments.key_lens
    return checked_lens(lens, length, rank, len(query_lens), "key_lens")


def _structure(arguments: Arguments, num_queries: int, num_keys: int) -> Structure:
    """Causality, window, documents and prefix as pieces."""
    band = _band(arguments, num_queries, num_keys)
    if arguments.documents is not None:
        documents = _checked_documents(arguments, num_queries, num_keys)
        return packed(documents, num_queries, band)
    if arguments.prefix_len is None:
        return one_band(num_queries, num_keys, band)
    if band != Band(None, 0):
        raise ValueError(
            f"prefix_len={arguments.prefix_len} with is_causal={arguments.is_causal}, "
            f"window={arguments.window}: a prefix is seen on top of causal attention; pass "
            "is_causal=True and no window"
        )
    if not 0 <= arguments.prefix_len <= num_keys:
        raise ValueError(
            f"prefix_len={arguments.prefix_len}: must lie in 0..{num_keys}, the whole length"
        )
    return prefix(arguments.prefix_len, num_queries, num_keys)


def _band(arguments: Arguments, num_queries: int, num_keys: int) -> Band:
    """Causality and window as one band of all rows and keys."""
    bias, diagonal = arguments.attn_mask, 0
    is_causal = arguments.is_causal
    if isinstance(bias, CausalBias):
        if (bias.seq_len_q, bias.seq_len_kv) != (num_queries, num_keys):
            raise ValueError(
                f"attn_mask is a causal bias of {bias.seq_len_q} queries and {bias.seq_len_kv} "
                f"keys: the whole sequence has {num_queries} and {num_keys}"
            )
        is_causal = True
        if bias.variant == CausalVariant.LOWER_RIGHT:
            diagonal = num_keys - num_queries
    elif num_queries != num_keys and (is_causal or arguments.window is not None):
        raise ValueError(
            f"is_causal={is_causal}, window={arguments.window} with {num_queries} queries and "
            f"{num_keys} keys: say which corner they count from, with attn_mask="
            "torch.nn.attention.bias.causal_lower_right(...) or causal_upper_left(...) of these "
            "two lengths"
        )
    left, right = arguments.window or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return Band(
        None if left is None else diagonal - left, None if right is None else diagonal + right
    )


def _checked_documents(arguments: Arguments, num_queries: int, num_keys: int) -> tuple[int, ...]:
    assert arguments.documents is not None, "the caller asked"
    documents = tuple(int(border) for border in arguments.documents)
    rising = all(a <= b for a, b in pairwise(documents))
    if not documents or documents[0] != 0 or not rising or documents[-1] > num_queries:
        raise ValueError(
            f"documents={documents}: pass the borders of consecutive documents in the whole "
            f"sequence, (0, ..., end) with end <= {num_queries}, as cu_seqlens on the host"
        )
    if num_queries != num_keys or arguments.prefix_len is not None:
        raise ValueError(
            f"documents with {num_queries} queries, {num_keys} keys and "
            f"prefix_len={arguments.prefix_len}: documents are for self-attention without a prefix"
        )
    return documents


def checked_mask_shape(
    arguments: Arguments, whole: tuple[int, int, int, int]
) -> tuple[int, int, int, int] | None:
    """The whole mask's shape, once it is sure to be one of this call's."""
    mask = arguments.mask
    if mask is None:
        return None
    given = tuple(mask.shape)
    rows_only = isinstance(arguments.attn_mask, QueryRows)
    expected = (*whole[:2], arguments.query.shape[1], whole[3]) if rows_only else whole
    fits = len(given) == 4 and all(g in (1, w) for g, w in zip(given, expected, strict=True))
    if not fits or (rows_only and given[2] != expected[2]):
        what = "QueryRows of shape" if rows_only else "attn_mask of shape"
        raise ValueError(
            f"{what} {given} does not fit [B, H, Sq, Sk] = {expected}: a whole mask has the global "
            "lengths on every rank; this rank's rows of one go in ulysses.QueryRows(mask), and "
            "key padding [B, S] in mask[:, None, None, :]"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask is {mask.dtype}: pass bool (True attends) or floating point")
    batch, heads, queries, keys = given
    return batch, heads, whole[2] if rows_only else queries, keys


def _check_options(arguments: Arguments) -> None:
    if not 0.0 <= arguments.dropout_p < 1.0:
        raise ValueError(f"dropout_p={arguments.dropout_p}: a probability in [0, 1) is needed")
    if type(arguments.is_causal) is not bool:
        raise TypeError(f"is_causal={arguments.is_causal!r}: pass True or False")
    if isinstance(arguments.key, Replicated) != isinstance(arguments.value, Replicated):
        raise TypeError("key and value must both be Replicated, or neither")
    if arguments.scale is not None and not isinstance(arguments.scale, (int, float)):
        raise TypeError(f"scale={arguments.scale!r}: pass a number, or None for 1/sqrt(D)")
    if arguments.scale is not None and not 0 < arguments.scale < inf:
        raise ValueError(
            f"scale={arguments.scale}: kernels scale what hides a key, too, and need a finite "
            "number above 0; multiply the query by any other"
        )
    window = arguments.window
    if window is not None and not _is_window(window):
        raise ValueError(
            f"window={window}: pass (left, right), the numbers of keys seen on each side of a "
            "row's own, 0 or more, None for all of them"
        )
    _check_numbers(arguments)
    _check_mask_kind(arguments)
    query = arguments.query
    num_heads = query.shape[2]
    for name in ("mask", "alibi_slopes", "sinks"):
        given = getattr(arguments, name)
        if given is not None and given.device != query.device:
            raise ValueError(
                f"{name} is on {given.device}, query on {query.device}: both must be on one device"
            )
        if name != "mask" and given is not None and tuple(given.shape) != (num_heads,):
            raise ValueError(
                f"{name} of shape {tuple(given.shape)} with {num_heads} query heads: pass one "
                "number for each head of the query as it is given, [H], whole on every rank"
            )


def _check_numbers(arguments: Arguments) -> None:
    for name in _NUMBERS:
        given = getattr(arguments, name)
        try:
            for number in () if given is None else given:
                index(number)
        except TypeError:
            raise TypeError(
                f"{name}={given!r}: pass whole numbers, in a tuple or in a tensor on the host"
            ) from None


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, (tuple, list))
        and len(window) == 2
        and all(side is None or (type(side) is int and side >= 0) for side in window)
    )


def _check_mask_kind(arguments: Arguments) -> None:
    given = arguments.attn_mask
    tensor = given.mask if isinstance(given, QueryRows) else given
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or (tensor is not given and isinstance(tensor, CausalBias)):
        raise TypeError(
            f"attn_mask is a {type(given).__name__} of {type(tensor).__name__}: pass a tensor, "
            "QueryRows of one, or a causal bias of torch.nn.attention.bias by itself"
        )
    if isinstance(given, CausalBias) and arguments.is_causal:
        raise ValueError(
            "is_causal=True beside a causal bias, which says by itself what is seen: pass one"
        )


def _check_ends(arguments: Arguments) -> None:
    if not arguments.ends.tensors:
        return
    for name in ("key", "attn_mask"):
        if isinstance(given := getattr(arguments, name), (Replicated, QueryRows)):
            raise TypeError(
                f"{name} is {type(given).__name__} in joint attention: its rows are the prefix, "
                "the sharded ones and the suffix, so pass the sharded key and value as they are, "
                "and a mask whole on every rank"
            )
    arguments.ends.check(arguments.tensors)


def _check_tensors(arguments: Arguments) -> None:
    """Everything that the three tensors must have in common."""
    query, key, value = arguments.tensors
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"{shapes}: each must be [batch, seq, heads, dim]")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise TypeError(
            f"query {query.dtype}, key {key.dtype}, value {value.dtype}: one floating dtype is "
            "needed for all three"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query on {query.device}, key on {key.device}, value on {value.device}: all three "
            "must be on one device"
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"{shapes}: batch sizes differ")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"{shapes}: key and value must have the same length in dim 1")
    if key.shape[2] != value.shape[2]:
        raise ValueError(f"{shapes}: key and value must have the same number of heads")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{shapes}: query and key must have the same head dim")
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    if not num_kv_heads or not num_heads or num_heads % num_kv_heads:
        legal = [h for h in range(1, num_heads + 1) if num_heads % h == 0]
        raise ValueError(
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: query heads must be a multiple "
            f"of key/value heads; {num_heads} query heads go with {legal} key/value heads"
        )
    if not query.shape[3] or not value.shape[3]:
        raise ValueError(f"{shapes}: head dims must be at least 1")
