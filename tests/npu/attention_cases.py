"""What the tests of the fused attention operators share: layouts, names, and a reference."""

import torch
import torch_npu
from torch import Tensor

# True hides, as in every mask of these operators; what sparse modes 2, 3 and 4 read.
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)

# npu_fused_infer_attention_score -> its _v2.
SECOND_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, heads=4, kv_heads=None, queries=7, keys=7, dim=16, dtype=torch.bfloat16):
    """Query, key and value [B, N, S, D] on the CPU, the same on every call."""
    kv_shape = (batch, kv_heads or heads, keys, dim)
    return (
        draw(batch, heads, queries, dim, seed=1, dtype=dtype),
        draw(*kv_shape, seed=2, dtype=dtype),
        draw(*kv_shape, seed=3, dtype=dtype),
    )


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    """[B, N, S, D] rearranged, contiguous; in TND and NTD the batch entries follow each other."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    if layout == "TND":
        return tensor.transpose(1, 2).flatten(0, 1)
    assert layout == "NTD", layout
    return tensor.transpose(0, 1).flatten(1, 2)


def from_layout(tensor: Tensor, layout: str, batch: int, heads: int) -> Tensor:
    """The inverse of to_layout."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    if layout == "TND":
        return tensor.unflatten(0, (batch, -1)).transpose(1, 2)
    assert layout == "NTD", layout
    return tensor.unflatten(1, (batch, -1)).transpose(0, 1)


def scores(query: Tensor, key: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """[B, N, Sq, Skv] in float32 at least, -inf where hidden."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.to(wide).repeat_interleave(query.shape[1] // key.shape[1], 1)
    product = query.to(wide) @ key.mT * scale
    return product if hidden is None else product.masked_fill(hidden, -torch.inf)


def attention(query, key, value, scale, hidden=None, keep=None) -> Tensor:
    """[B, N, Sq, D]; rows that see nothing are zero; keep multiplies the weights (dropout)."""
    weights = scores(query, key, scale, hidden).softmax(-1).nan_to_num(0.0)
    if keep is not None:
        weights = weights * keep
    return weights @ value.to(weights.dtype).repeat_interleave(query.shape[1] // value.shape[1], 1)


def outside(queries: int, keys: int, before: int | None, after: int | None, right=True) -> Tensor:
    """True outside a band: along the diagonal to the bottom right, or that from the top left."""
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    distance = distance - (keys - queries) * right
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if before is not None:
        hidden |= distance < -before
    if after is not None:
        hidden |= distance > after
    return hidden


def to_npu(options: dict) -> dict:
    return {k: v.npu() if isinstance(v, Tensor) else v for k, v in options.items()}


def infer(query, key, value, *, version=1, **options):
    """npu_fused_infer_attention_score or its _v2 on tensors of the operator's layout."""
    options = to_npu(options)
    operator = torch_npu.npu_fused_infer_attention_score
    if version == 2:
        operator = torch_npu.npu_fused_infer_attention_score_v2
        options = {SECOND_NAMES.get(name, name): value for name, value in options.items()}
    return operator(query.npu(), key.npu(), value.npu(), **options)


def train(query, key, value, heads, layout, **options):
    """npu_fusion_attention on tensors of the operator's layout."""
    return torch_npu.npu_fusion_attention(
        query.npu(), key.npu(), value.npu(), heads, layout, **to_npu(options)
    )


def cumulative(batch: int, length: int) -> list[int]:
    return [length * (entry + 1) for entry in range(batch)]
