"""`nn.MultiheadAttention` on shards: its projections as they are, its attention exchanged.

torch attends here inside a function that no mode can look into, or in a fused kernel, so the
module's forward is replaced as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ulysses.sequence import gather_sequence_slice_grads
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope


def multihead_attention(
    scope: Scope,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `nn.MultiheadAttention.forward`, of this rank's rows.

    `attn_mask` is whole, [S, S] or [B*H, S, S]; with is_causal=True it is not read, as torch
    allows. `key_padding_mask` is whole, [B, S], or this rank's part of it. Weights are never
    returned: None stands in their place, whatever `need_weights` asks.
    """
    del need_weights, average_attn_weights
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise ValueError(
            f"{scope.site} adds keys of its own (add_bias_kv or add_zero_attn), once a rank: make "
            "it without them"
        )
    is_batched = query.ndim == 3
    seq_dim = 1 if module.batch_first and is_batched else 0
    rows = [_batch_first(tensor, seq_dim, is_batched) for tensor in (query, key, value)]
    q_blhd, k_blhd, v_blhd = (
        functional.linear(tensor, weight, bias).unflatten(2, (module.num_heads, module.head_dim))
        for tensor, (weight, bias) in zip(rows, _projections(module), strict=True)
    )
    mask = _mask(scope, q_blhd, k_blhd, None if is_causal else attn_mask, key_padding_mask)
    dropout_p = module.dropout if module.training else 0.0
    out = scope.attend(q_blhd, k_blhd, v_blhd, mask, dropout_p, is_causal).flatten(2)
    out = functional.linear(out, module.out_proj.weight, module.out_proj.bias)
    if not is_batched:
        return out.squeeze(0), None
    return (out if seq_dim == 1 else out.transpose(0, 1)), None


def _batch_first(tensor: Tensor, seq_dim: int, is_batched: bool) -> Tensor:
    if not is_batched:
        return tensor.unsqueeze(0)
    return tensor if seq_dim == 1 else tensor.transpose(0, 1)


def _projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of query, key and value."""
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return list(zip(weights, biases, strict=True))


def _mask(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    padding: Tensor | None,
) -> Tensor | None:
    """SDPA's mask, in which True attends, of the two in which True hides."""
    if scope.neutral:
        return None
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, query.shape[2]))
    if padding is not None:
        padding = _whole_padding(scope, key, padding)[:, None, None]
    if attn_mask is None or padding is None:
        held = attn_mask if padding is None else padding
        return ~held if held is not None and held.dtype == torch.bool else held
    if attn_mask.dtype == padding.dtype == torch.bool:
        return ~(attn_mask | padding)
    return _additive(attn_mask, query.dtype) + _additive(padding, query.dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _whole_padding(scope: Scope, key: Tensor, padding: Tensor) -> Tensor:
    """[B, S], gathered once a forward where this rank was given its part."""
    rows = padding.view(-1, padding.shape[-1])
    if scope.policy is Policy.REPLICATED:
        return rows
    lens = scope.lengths.of(key, 1, scope.site)
    if rows.shape[1] == sum(lens):
        return rows
    gathered: list[tuple[Tensor, Tensor]] = scope.notes.setdefault("padding", [])
    for part, whole in gathered:
        if part is padding:
            return whole
    whole = gather_sequence_slice_grads(rows, scope.attention.group, seq_lens=lens)
    gathered.append((padding, whole))
    return whole
