"""npu_fused_infer_attention_score: its rules and its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

import torch
from torch import Tensor

from tests.npu_ops.arithmetic import (
    alone,
    entries,
    from_bnsd,
    hidden_keys,
    is_triangle,
    shared,
    to_bnsd,
    weights,
)

_LAYOUTS = ("BSH", "BSND", "BNSD", "TND")
_KNOWN_LAYOUTS = (
    *_LAYOUTS,
    *("NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD"),
    *("BNSD_NBSD", "TND_NTD", "NSD"),
)
_CANN_NAMES = {torch.float32: "DT_FLOAT", torch.float64: "DT_DOUBLE"}
_PLAIN_OPTIONS = {
    "pre_tokens",
    "next_tokens",
    "input_layout",
    "num_heads",
    "num_key_value_heads",
    "scale",
    "sparse_mode",
    "inner_precise",
    "softmax_lse_flag",
}
_PACKED_OPTIONS = {"actual_seq_lengths", "actual_seq_lengths_kv"}
_TENSORS = ("query", "key", "value", "atten_mask", "pse_shift")


def fused_infer_attention_score(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Inference attention: (output, LSE [B, N, Sq, 1] or an empty tensor)."""
    _check_modelled(a)
    _check_layout(a)
    if a.input_layout == "TND":
        return _packed(a)
    kv_heads = a.num_key_value_heads or a.num_heads  # 0 means "as many as num_heads", not "as key"
    query = to_bnsd(a.query, a.input_layout, a.num_heads)
    key, value = (to_bnsd(t, a.input_layout, kv_heads) for t in (a.key, a.value))
    _check_tensors(a, query, key, value)
    _check_heads(a, query, key, value, kv_heads)
    _check_pse(a, query, key)
    if query.shape[2] == 1:  # IncreFlashAttention runs, which has no sparse modes
        hidden = _hidden_of_one_query(a, query, key)
    else:
        _check_sparse(a, query.shape[2], key.shape[2])
        hidden = hidden_keys(
            a.sparse_mode,
            a.pre_tokens,
            a.next_tokens,
            a.atten_mask,
            query.shape[2],
            key.shape[2],
        )
    bias = None
    if a.pse_shift is not None:
        bias = a.pse_shift[:, :, : query.shape[2], : key.shape[2]].float()
    out, lse = _attended(a, query, key, value, hidden, bias)
    lse = lse if a.softmax_lse_flag else torch.empty(0)
    return from_bnsd(out, a.input_layout).to(a.query.dtype), lse


def _attended(
    a: SimpleNamespace,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Float32 output [B, N, Sq, D] and LSE [B, N, Sq, 1]."""
    # Modes 2 to 4 know from their geometry that a row is empty and handle it unasked.
    zero_empty_rows = a.sparse_mode >= 2 or bool(a.inner_precise & 2)
    probability, largest, total = weights(query, key, a.scale, hidden, zero_empty_rows, bias)
    lse = largest + total.log()
    if hidden is not None and zero_empty_rows:
        # "inf = invalid data"; the merge of another library wants -inf
        lse = lse.masked_fill(hidden.all(-1, keepdim=True), torch.inf)
    return probability @ shared(value.float(), query), lse


def _packed(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Layout TND: output [T, N, D] and LSE [T, N, 1], each sequence for itself."""
    _check_packed(a)
    out, lse = torch.zeros_like(a.query), a.query.new_zeros(*a.query.shape[:2], 1).float()
    sequences = entries(a.actual_seq_lengths, a.actual_seq_lengths_kv)
    for number, (rows, keys) in enumerate(sequences):
        query, key, value = alone(a.query, rows), alone(a.key, keys), alone(a.value, keys)
        num_queries, num_keys = query.shape[2], key.shape[2]
        if a.sparse_mode == 3 and num_queries > num_keys:
            _reject(
                f"When layout is TND and sparse = 3 ,Batch[{number}], need s1[{num_queries}] <= "
                f"s2[{num_keys}]."
            )
        hidden = hidden_keys(
            a.sparse_mode, a.pre_tokens, a.next_tokens, a.atten_mask, num_queries, num_keys
        )
        own_out, own_lse = _attended(a, query, key, value, hidden)
        out[rows], lse[rows] = (own.squeeze(0).transpose(0, 1) for own in (own_out, own_lse))
    return out, lse if a.softmax_lse_flag else torch.empty(0)


def _check_modelled(a: SimpleNamespace) -> None:
    for name, value in vars(a).items():
        is_option = name in _PLAIN_OPTIONS or name in _TENSORS
        is_option |= name in _PACKED_OPTIONS and a.input_layout == "TND"
        if not is_option and (isinstance(value, Tensor) or value not in (None, 0)):
            raise NotImplementedError(f"npu_fused_infer_attention_score with {name}={value}")


def _check_layout(a: SimpleNamespace) -> None:
    """OP get_query_and_attention_out_layout: exact, so that `bsnd` and SBH are unknown."""
    if a.input_layout not in _KNOWN_LAYOUTS:
        raise RuntimeError(
            f"layout only support {', '.join(_KNOWN_LAYOUTS)}, but got {a.input_layout}\n"
            "[ERROR] ERR01003 OPS invalid value"
        )
    if a.input_layout not in _LAYOUTS:
        raise NotImplementedError(f"input_layout {a.input_layout}")
    if a.query.dim() != len(a.input_layout):
        raise RuntimeError("query's dim should be consistent with that of Layout")


def _check_tensors(a: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        _reject(f"query, key and value must share a dtype: {query.dtype} {key.dtype} {value.dtype}")
    if query.dtype not in (torch.float16, torch.bfloat16):
        _reject(f"query's dtype can not be {_CANN_NAMES.get(query.dtype, query.dtype)}")
    if not all(tensor.is_contiguous() for tensor in (a.query, a.key, a.value)):
        _reject("non-contiguous tensors are not supported")  # OP's page of the operator
    head_dim = query.shape[3]
    if not head_dim == key.shape[3] == value.shape[3]:
        _reject(f"D of q, k and v must be equal: {query.shape} {key.shape} {value.shape}")
    if head_dim > 512:
        _reject(f"D should be less than or equal to 512 of Q/KV shape! but now D = {head_dim}.")
    if head_dim % 16:
        _reject(f"D should be 32 bytes aligned, but now D = {head_dim}.")
    if query.shape[0] != key.shape[0] or key.shape != value.shape:
        _reject(f"B and S must agree: {query.shape} {key.shape} {value.shape}")


def _check_packed(a: SimpleNamespace) -> None:
    """CN prompt_flash_attention_tiling.cpp, the TND branch; bfloat16 and two head dims."""
    if not all(tensor.is_contiguous() for tensor in (a.query, a.key, a.value)):
        _reject("non-contiguous tensors are not supported")
    dims = {tensor.shape[2] for tensor in (a.query, a.key, a.value)}
    if a.query.dtype != torch.bfloat16:
        _reject("When layout is TND, inputDataType should be bf16")
    if dims not in ({64}, {128}):
        _reject(f"When layout is TND, queryD, keyD and valueD {dims} must be same equal 128/64")
    if a.query.shape[1] != a.num_heads:
        _reject(
            f"the values of queryN({a.query.shape[1]}) not equal to Attr the query's heads "
            f"num({a.num_heads})"
        )
    if a.num_heads % a.key.shape[1] or a.num_heads // a.key.shape[1] > 64:
        _reject(f"queryN({a.num_heads}) should be a multiple of keyN({a.key.shape[1]}), <= 64")
    _check_ends("query", a.actual_seq_lengths, a.query)
    _check_ends("key", a.actual_seq_lengths_kv, a.key)
    if len(a.actual_seq_lengths) != len(a.actual_seq_lengths_kv):
        _reject("the length of actualSequenceLengthQ and actualSequenceLengthKV must be equal.")
    if a.sparse_mode not in (0, 3, 4):
        _reject(f"sparseMode only support 0,3 or 4, but sparseMode = {a.sparse_mode}")
    if a.sparse_mode == 0 and a.atten_mask is not None:
        _reject("When Layout is TND, sparseMode = 0 not support attentionMask.")
    if a.sparse_mode and not is_triangle(a.atten_mask):
        _reject(f"attenMask must be 2048 x 2048 when sparse_mode is {a.sparse_mode}")
    if a.pse_shift is not None:
        _reject("When Layout is TND, not support PSE")


def _check_ends(whose: str, ends: list[int] | None, tensor: Tensor) -> None:
    """Running totals without the leading 0, the last of them T."""
    if not ends:
        _reject(f"actualSequenceLength of {whose} is required, but now is nullptr!")
    if list(ends) != sorted(ends) or ends[-1] != tensor.shape[0]:
        _reject(f"actualSequenceLength of {whose} must rise to T {tensor.shape[0]}, but is {ends}")


def _check_heads(
    a: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor, kv_heads: int
) -> None:
    """CN prompt_flash_attention_tiling.cpp, CheckBNSDNotNull... and SetTilingHeadNumRatio.

    In BSH the views above were made with these very counts, so nothing can differ.
    """
    if a.num_heads > 256:
        _reject(f"the query's heads num({a.num_heads}) should not be more than 256!")
    if query.shape[1] != a.num_heads:
        _reject(
            f"numHeads({query.shape[1]}) in query shape must be equal to "
            f"numHeads({a.num_heads}) in attr!"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[1] != kv_heads:
            _reject(
                f"numHeads({tensor.shape[1]}) in {name} shape do not match "
                f"numKeyValueHeads({kv_heads}) in attr!"
            )
    if a.num_heads % kv_heads:
        _reject(f"numHeads({a.num_heads}) % numKeyValueHeads({kv_heads}) must be 0!")
    if a.num_heads // kv_heads > 64:
        _reject(f"numHeads({a.num_heads}) / numKeyValueHeads({kv_heads}) cannot be larger than 64")


def _check_sparse(a: SimpleNamespace, num_queries: int, num_keys: int) -> None:
    """CN prompt_flash_attention_tiling.cpp: a band must show something, a mode its triangle."""
    if a.sparse_mode not in range(5):
        _reject(f"sparse_mode = {a.sparse_mode} is out of range.")
    if a.sparse_mode == 0:
        if a.atten_mask is not None:
            _check_written(a, num_queries, num_keys)
        return
    if a.atten_mask is None:
        _reject(f"attenMask should not be null when sparse_mode is {a.sparse_mode}.")
    _check_mask_type(a)
    if a.sparse_mode == 1:
        raise NotImplementedError("sparse_mode 1")
    if not is_triangle(a.atten_mask):
        _reject(f"attenMask shape {tuple(a.atten_mask.shape)} must be 2048 x 2048")
    if a.sparse_mode != 4:
        return
    pre, following = a.pre_tokens, a.next_tokens
    if pre < 0 and following < 0:
        _reject("preTokens and nextTokens must not be negative number in band mode")
    if -following > pre:
        _reject("nexttoken line should be higher than pretoken line.")
    if following < 0 and -following >= num_keys:
        _reject(f"nextTokens absolute value should be smaller than length of k, {following}")
    if pre < 0 and -pre >= num_queries:
        _reject(f"preTokens absolute value should be smaller than length of q, {pre}")


def _check_mask_type(a: SimpleNamespace) -> None:
    if a.atten_mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        _reject(f"invalid maskType dtype[{a.atten_mask.dtype}]")


def _check_written(a: SimpleNamespace, num_queries: int, num_keys: int) -> None:
    """CN CheckAttenMaskShape: no broadcasting. A mask for each head it takes, and reads the first's
    for all; nothing here does that, so it is an error."""
    _check_mask_type(a)
    shape = tuple(a.atten_mask.shape)
    batches = (1, a.query.shape[0])
    if shape not in [(batch, 1, num_queries, num_keys) for batch in batches]:
        _reject(f"attenMask {shape} must be 1 or B x 1 x Q_S {num_queries} x KV_S {num_keys}")
    if (a.pre_tokens, a.next_tokens) != (2147483647, 2147483647):
        raise NotImplementedError("a written mask with tokens that hide keys, too")


def _hidden_of_one_query(a: SimpleNamespace, query: Tensor, key: Tensor) -> Tensor | None:
    """CN incre_flash_attention_tiling: a row of the mask for each batch entry, and no broadcast."""
    if a.atten_mask is None or a.sparse_mode:
        return None
    if a.atten_mask.shape[0] != query.shape[0] or a.atten_mask.shape[-1] < key.shape[2]:
        _reject(f"atten_mask {tuple(a.atten_mask.shape)} for {query.shape[0]} batch entries")
    return a.atten_mask.bool().reshape(query.shape[0], 1, 1, -1)[..., : key.shape[2]]


def _check_pse(a: SimpleNamespace, query: Tensor, key: Tensor) -> None:
    """CN CheckPseShift: [1|B, N, >=Sq, >=Skv] of query's dtype."""
    if a.pse_shift is None:
        return
    if a.pse_shift.dtype != query.dtype:
        _reject(f"pse shift dtype {a.pse_shift.dtype} must be query's {query.dtype}")
    batch, heads, rows, columns = a.pse_shift.shape
    fits = batch in (1, query.shape[0]) and heads == query.shape[1]
    if not fits or rows < query.shape[2] or columns < key.shape[2]:
        _reject(f"pse shift shape must be [1 or B, N, >=Sq, >=Skv], but is {a.pse_shift.shape}")


def _reject(text: str) -> NoReturn:
    """The form in which CANN's tiling checks reach Python."""
    raise RuntimeError(
        "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\n"
        f"[ERROR] ERR00100 PTA call acl api failed.\nEZ9999: Inner Error!\n{text}"
    )
