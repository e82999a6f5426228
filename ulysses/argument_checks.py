"""What one rank can see to be wrong with a call's arguments: errors before any communication."""

from __future__ import annotations

from math import inf
from operator import index
from typing import Any

import torch
from torch import Tensor

from ulysses.arguments import NUMBERS, Arguments, QueryRows, Replicated
from ulysses.loaded import is_causal_bias


def check(arguments: Arguments) -> None:
    """Raise ValueError or TypeError for what no plan is needed to refuse."""
    _check_tensors(arguments)
    _check_options(arguments)
    _check_ends(arguments)


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
    for name in NUMBERS:
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
    if not isinstance(tensor, Tensor) or (tensor is not given and is_causal_bias(tensor)):
        raise TypeError(
            f"attn_mask is a {type(given).__name__} of {type(tensor).__name__}: pass a tensor, "
            "QueryRows of one, or a causal bias of torch.nn.attention.bias by itself"
        )
    if is_causal_bias(given) and arguments.is_causal:
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
