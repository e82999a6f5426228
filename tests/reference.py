"""Attention in one process, written out, and whole tensors to compare sharded ones with."""

import torch
from torch import Tensor

from ulysses.backends.base import Band


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """[B, S, H, D] attention by matrix products; rows that see nothing are zero."""
    group_size = query.shape[2] // key.shape[2]
    key = key.repeat_interleave(group_size, 2)
    value = value.repeat_interleave(group_size, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
    visible = (band or Band()).mask(query.shape[1], key.shape[1], query.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
        visible = visible & (mask > -torch.inf)
    lowest = torch.finfo(scores.dtype).min
    weights = scores.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same normal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def shard(tensor: Tensor, lens: tuple[int, ...], rank: int) -> Tensor:
    """This rank's rows (dim 1) of a whole tensor."""
    start = sum(lens[:rank])
    return tensor[:, start : start + lens[rank]]
