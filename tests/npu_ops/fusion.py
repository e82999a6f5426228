"""npu_fusion_attention and npu_fusion_attention_grad: their rules and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.npu_ops.arithmetic import (
    entries,
    from_bnsd,
    hidden_keys,
    is_triangle,
    shared,
    to_bnsd,
    weights,
)

_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
_COLUMNS = 8  # softmax statistics come as eight equal columns


def fusion_attention(a: SimpleNamespace) -> tuple[Any, ...]:
    """Training attention: (out, softmax_max, softmax_sum, empty, seed, offset, numels)."""
    seed = 0
    if 0.0 < a.keep_prob < 1.0:
        # OP dropout_gen_mask: the argument `seed` is overwritten by the default generator's.
        seed = int(torch.randint(1, 2**62, (), generator=torch.default_generator))
    run = _packed if a.input_layout.upper() == "TND" else _padded
    out, largest, total, numels = run(a, seed)
    return out, largest, total, a.query.new_empty(0), seed, 0, numels if seed else 0


def _padded(a: SimpleNamespace, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Output, maximum and sum [B, N, Sq, 8], and the number of weights."""
    query, key, value = _checked_bnsd(a)
    hidden = _hidden(a, query, key)
    probability, largest, total = weights(
        query, key, a.scale, hidden, _zeroes_empty_rows(a), _bias(a, a.scale)
    )
    if seed:
        probability = probability * _survivors(probability, a.keep_prob, seed)
    out = from_bnsd(probability @ shared(value.float(), query), a.input_layout.upper())
    largest, total = (tensor.repeat(1, 1, 1, _COLUMNS) for tensor in (largest, total))
    return out.to(a.query.dtype), largest, total, probability.numel()


def _packed(a: SimpleNamespace, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Layout TND. The statistics are [T, N, 8] and hold [N, S, 8] of each sequence in turn."""
    results = [_padded(own, own.seed) for own in _sequences(a, seed)]
    outs, largest, totals, numbers = zip(*results, strict=True)
    statistics = (
        torch.cat([own.flatten() for own in parts]).view(*a.query.shape[:2], _COLUMNS)
        for parts in (largest, totals)
    )
    return torch.cat(outs, 1).squeeze(0), *statistics, sum(numbers)


def fusion_attention_grad(a: SimpleNamespace) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and pse, from the saved output and softmax statistics."""
    if a.input_layout.upper() != "TND":
        return _padded_grad(a)
    results = [_padded_grad(own) for own in _sequences(a, a.seed)]
    *gradients, d_pse, nothing = zip(*results, strict=True)
    return *(torch.cat(parts, 1).squeeze(0) for parts in gradients), d_pse[0], nothing[0]


def _sequences(a: SimpleNamespace, seed: int) -> Iterator[SimpleNamespace]:
    """The sequences of a TND call, each as a BSND call of its own."""
    _check_ends("query", a.actual_seq_qlen, a.query)
    _check_ends("key", a.actual_seq_kvlen, a.key)
    if len(a.actual_seq_qlen) != len(a.actual_seq_kvlen):
        _reject("VarLen scene, q is not equal kv.")
    if a.pse is not None:
        raise NotImplementedError("pse in layout TND")
    heads = a.head_num
    for number, (rows, keys) in enumerate(entries(a.actual_seq_qlen, a.actual_seq_kvlen)):
        own = SimpleNamespace(**vars(a) | {"input_layout": "BSND", "seed": seed and seed + number})
        own.actual_seq_qlen = own.actual_seq_kvlen = None
        for name, part in {"query": rows, "dy": rows, "attention_in": rows, "key": keys}.items():
            if hasattr(a, name):
                setattr(own, name, getattr(a, name)[part].unsqueeze(0))
        own.value = a.value[keys].unsqueeze(0)
        if hasattr(a, "softmax_max"):
            for name in ("softmax_max", "softmax_sum"):
                flat = getattr(a, name).view(-1, _COLUMNS)[rows.start * heads : rows.stop * heads]
                setattr(own, name, flat.view(1, heads, -1, _COLUMNS))
        _check_sequence(own, number)
        yield own


def _check_ends(whose: str, ends: list[int] | None, tensor: Tensor) -> None:
    """Running totals without the leading 0; here nothing may be left behind the last one."""
    if not ends or list(ends) != sorted(ends) or ends[-1] != tensor.shape[0]:
        _reject(f"actual_seq_len of {whose} must rise to T {tensor.shape[0]}, but is {ends}")


def _check_sequence(a: SimpleNamespace, number: int) -> None:
    """CN: packed rows that would see no key are refused, where padded ones are given zeros."""
    if a.atten_mask is None:
        return
    rows, keys = a.query.shape[1], a.key.shape[1]
    following = {3: 0, 4: a.next_tockens}.get(a.sparse_mode)
    if following is None:
        raise NotImplementedError(f"sparse_mode {a.sparse_mode} with a mask in layout TND")
    if rows - following > keys or (a.sparse_mode == 4 and a.pre_tockens < 0):
        _reject(f"Batch[{number}], s1[{rows}], s2[{keys}], has invalid row.")


def _padded_grad(a: SimpleNamespace) -> tuple[Tensor, ...]:
    query, key, value = (tensor.float() for tensor in _checked_bnsd(a))
    layout = a.input_layout.upper()
    d_out, out = (to_bnsd(t, layout, a.head_num).float() for t in (a.dy, a.attention_in))
    scores = query @ shared(key, query).mT * a.scale_value
    if (bias := _bias(a, a.scale_value)) is not None:
        scores = scores + bias
    if (hidden := _hidden(a, query, key)) is not None:
        scores = scores.masked_fill(hidden, -torch.finfo(torch.float32).max)
    probability = (scores - a.softmax_max[..., :1]).exp() / a.softmax_sum[..., :1]
    survivors = _survivors(probability, a.keep_prob, a.seed) if a.keep_prob < 1.0 else 1.0
    d_probability = d_out @ shared(value, query).mT * survivors
    d_scores = probability * (d_probability - (d_out * out).sum(-1, keepdim=True)) * a.scale_value
    gradients = (
        d_scores @ shared(key, query),
        _summed(d_scores.mT @ query, key),
        _summed((probability * survivors).mT @ d_out, value),
    )
    nothing = d_pse = a.query.new_empty(0)
    if a.pse is not None:
        d_pse = d_scores.sum_to_size(a.pse.shape).to(a.pse.dtype)
    return (*(from_bnsd(g, layout).to(a.query.dtype) for g in gradients), d_pse, nothing)


class FusionAttention(torch.autograd.Function):
    """torch_npu's formula: only the output's gradient is used, that of the statistics dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pse: Tensor | None,
        operator: torch._ops.OpOverload,
        grad: torch._ops.OpOverload,
        options: dict[str, Any],
    ) -> tuple[Any, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            result = operator(query, key, value, pse=pse, **options)
        ctx.save_for_backward(query, key, value, *result[:3], options["atten_mask"], pse)
        ctx.grad, ctx.options, ctx.random = grad, options, result[4:]
        return result

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Any, ...]:
        query, key, value, out, softmax_max, softmax_sum, mask, pse = ctx.saved_tensors
        options = ctx.options | {"atten_mask": mask, "pse": pse}
        scale = options.pop("scale")
        for name in ("dropout_mask", "seed", "offset"):
            options.pop(name, None)
        seed, offset, numels = ctx.random
        gradients = ctx.grad(
            query,
            key,
            value,
            d_out,
            **options,
            scale_value=scale,
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            attention_in=out,
            seed=seed,
            offset=offset,
            numels=numels,
        )
        d_pse = None if pse is None else gradients[3]
        return *gradients[:3], d_pse, None, None, None


def _checked_bnsd(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as [B, N, S, D], or the operator's refusal."""
    for name in ("padding_mask", "prefix", "actual_seq_qlen", "dropout_mask", "sink"):
        if getattr(a, name, None) is not None:
            raise NotImplementedError(f"npu_fusion_attention with {name}")
    layout = a.input_layout.upper()
    if layout not in _LAYOUTS:
        raise NotImplementedError(f"input_layout {layout}")
    if not 0 < a.keep_prob <= 1:
        raise RuntimeError(
            f"The keep_prob value must be in range of (0, 1], but got {a.keep_prob}\n"
            "[ERROR] ERR01002 OPS invalid parameter"
        )
    if a.sparse_mode not in range(7):
        raise RuntimeError(f"The sparse_mode value must be in range of [0,6], got {a.sparse_mode}")
    query = to_bnsd(a.query, layout, a.head_num)
    # No argument tells the key/value heads: BSH infers them from the head dim that it believes in.
    kv_heads = a.key.shape[2] // query.shape[3] if layout in ("BSH", "SBH") else 0
    key, value = (to_bnsd(tensor, layout, kv_heads) for tensor in (a.key, a.value))
    _check_tensors(a, query, key, value)
    _check_pse(a, query, key)
    _check_mask(a, query.shape[2], key.shape[2])
    return query, key, value


def _check_tensors(a: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        _reject(f"dtypes differ: {query.dtype} {key.dtype} {value.dtype}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        _reject(f"dtype {query.dtype} is not supported")
    if query.shape[1] != a.head_num:
        _reject(f"head_num is [{a.head_num}], but got query dim1 [{query.shape[1]}].")
    if not 1 <= a.head_num <= 256 or a.head_num % key.shape[1]:
        _reject(f"N1 {a.head_num} must be 1..256 and a multiple of N2 {key.shape[1]}")
    if not 512 >= query.shape[3] == key.shape[3] >= value.shape[3]:
        _reject(f"D must be 512 >= Dq == Dk >= Dv: {query.shape} {key.shape} {value.shape}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        _reject(f"B, S and N must agree: {query.shape} {key.shape} {value.shape}")


def _check_mask(a: SimpleNamespace, num_queries: int, num_keys: int) -> None:
    if a.atten_mask is None:
        return
    if a.atten_mask.dtype not in (torch.bool, torch.uint8):
        _reject(f"atten_mask must be bool or uint8, but got {a.atten_mask.dtype}")
    if a.sparse_mode == 0:
        _check_written(a, num_queries, num_keys)
        return
    if a.sparse_mode not in (2, 3, 4):
        raise NotImplementedError(f"sparse_mode {a.sparse_mode} with a mask")
    if not is_triangle(a.atten_mask):
        _reject(f"get unsupported atten_mask shape, the shape is {list(a.atten_mask.shape)}")
    if a.sparse_mode == 4:  # CN SparseBandModeCheck, counted from the top left corner
        corner = num_keys - num_queries
        pre, following = a.pre_tockens - corner, a.next_tockens + corner
        shows_nothing = -pre > following or -pre >= num_keys or -following >= num_queries
        if shows_nothing:
            _reject(
                f"PreTokens[{a.pre_tockens}] and nextTokens[{a.next_tockens}] config error, there "
                "is no valid data block."
            )


def _check_written(a: SimpleNamespace, num_queries: int, num_keys: int) -> None:
    """CN AnalyzeAttenOptionalInput: exactly these shapes, no broadcasting."""
    batch = a.query.shape[1] if a.input_layout.upper() == "SBH" else a.query.shape[0]
    own = [(), (1, 1), (batch, 1), (batch, a.head_num)]
    if tuple(a.atten_mask.shape) not in [(*dims, num_queries, num_keys) for dims in own]:
        _reject(f"get unsupported atten_mask shape, the shape is {list(a.atten_mask.shape)}")
    if (a.pre_tockens, a.next_tockens) != (2147483647, 2147483647):
        raise NotImplementedError("a written mask with tokens that hide keys, too")


def _check_pse(a: SimpleNamespace, query: Tensor, key: Tensor) -> None:
    """pse_type 1: [1|B, N, Sq|1, Skv] of query's dtype."""
    if a.pse is None:
        return
    if a.pse.dtype != query.dtype:
        _reject(f"pse is {a.pse.dtype}, query {query.dtype}")
    batch, heads, rows, columns = a.pse.shape
    fits = batch in (1, query.shape[0]) and heads == query.shape[1] and columns == key.shape[2]
    if not fits or rows not in (1, query.shape[2]):
        _reject(f"get unsupported pse shape, the shape is {list(a.pse.shape)}")


def _bias(a: SimpleNamespace, scale: float) -> Tensor | None:
    """What pse_type 1 adds to the scaled scores: the operator computes scale * (QK^T + pse)."""
    return None if a.pse is None else a.pse.float() * scale


def _hidden(a: SimpleNamespace, query: Tensor, key: Tensor) -> Tensor | None:
    if a.atten_mask is None:  # then sparse_mode does nothing, whatever it is
        return None
    return hidden_keys(
        a.sparse_mode, a.pre_tockens, a.next_tockens, a.atten_mask, query.shape[2], key.shape[2]
    )


def _zeroes_empty_rows(a: SimpleNamespace) -> bool:
    """CN EnableBandInvalidLineImplMode: modes 3 and 4 know from their geometry."""
    return a.inner_precise == 2 or a.sparse_mode in (3, 4)


def _survivors(probability: Tensor, keep_prob: float, seed: int) -> Tensor:
    """The dropout mask that forward draws and backward draws again, over keep_prob."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(probability.shape, generator=generator) < keep_prob) / keep_prob


def _summed(gradient: Tensor, kv: Tensor) -> Tensor:
    """Over the query heads that share a key/value head."""
    return gradient.unflatten(1, (kv.shape[1], -1)).sum(2)


def _reject(text: str) -> NoReturn:
    raise RuntimeError(f"call aclnnFlashAttentionScore failed, error code is 561103\n{text}")
