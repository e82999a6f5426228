"""A call as plain data: lengths, and the shape of its mask, from the arguments of one rank."""

from __future__ import annotations

from itertools import pairwise

import torch

from ulysses.argument_checks import check, checked_mask_shape
from ulysses.arguments import Arguments, Replicated
from ulysses.backends.base import Band
from ulysses.call import Call
from ulysses.group import checked_lens
from ulysses.structure import Structure, one_band, packed, prefix


def described(arguments: Arguments, rank: int, num_ranks: int) -> Call:
    """The call as plain data.

    Raises ValueError or TypeError for what this rank can see to be wrong.
    """
    check(arguments)
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
    bias, diagonal = arguments.causal_bias, 0
    is_causal = arguments.is_causal
    if bias is not None:
        if (bias.seq_len_q, bias.seq_len_kv) != (num_queries, num_keys):
            raise ValueError(
                f"attn_mask is a causal bias of {bias.seq_len_q} queries and {bias.seq_len_kv} "
                f"keys: the whole sequence has {num_queries} and {num_keys}"
            )
        is_causal = True
        if bias.variant.name == "LOWER_RIGHT":
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
