"""What every local kernel is held against: an explicit float64 reference, and a table of cases."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses.backends.base import Band, Problem
from ulysses.conformance_added import Added, add_to, random_mask

_FULL = Band()


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    band: Band,
    scale: float,
    added: Added | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention written out in float64: output [B, Sq, H, Dv] and log-sum-exp [B, Sq, H].

    Takes [B, Sq, H, D], [B, Sk, Hkv, D] and [B, Sk, Hkv, Dv]; differentiable. A row that sees no
    key gives zeros and -inf.
    """
    group = query.shape[2] // key.shape[2]
    k_bshd, v_bshd = (tensor.double().repeat_interleave(group, 2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), k_bshd) * scale
    visible = band.mask(query.shape[1], key.shape[1], query.device)
    scores, visible, sinks = add_to(scores, visible, added)
    lowest = scores.masked_fill(~visible, torch.finfo(torch.float64).min)
    hidden = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        lowest, hidden = (torch.cat([columns, sinks], -1) for columns in (lowest, hidden))
    weights = lowest.softmax(-1)[..., : key.shape[1]] * visible
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v_bshd)
    return out, hidden.logsumexp(-1).transpose(1, 2)


def _in_order(*order: int) -> Callable[[Tensor], Tensor]:
    """A layout whose memory holds the dims of [B, S, H, D] in this order."""
    inverse = sorted(range(4), key=order.__getitem__)
    return lambda tensor: tensor.permute(order).contiguous().permute(inverse)


def _among_other_heads(tensor: Tensor) -> Tensor:
    """A view into a wider tensor, as a fused projection of q, k and v gives one."""
    batch, rows, heads, dim = tensor.shape
    wide = tensor.new_full((batch, rows, heads + 3, dim), torch.nan)
    wide[:, :, 2:-1] = tensor
    return wide[:, :, 2:-1]


def _every_other_element(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _one_batch_for_all(tensor: Tensor) -> Tensor:
    """Stride 0 in the batch, as `expand` gives it."""
    return tensor[:1].expand_as(tensor)


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "BSHD": _in_order(0, 1, 2, 3),
    "SBHD": _in_order(1, 0, 2, 3),
    "BHSD": _in_order(0, 2, 1, 3),
    "BHDS": _in_order(0, 2, 3, 1),
    "fused projection": _among_other_heads,
    "strided dim": _every_other_element,
    "expanded batch": _one_batch_for_all,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem in sizes, visibility and memory layout, without dtype or device.

    `bool_mask` and `float_mask` name the dims of B, H, Q, K that a mask has.
    """

    name: str
    batch: int = 1
    num_queries: int = 7
    num_keys: int = 7
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    value_dim: int = 16
    band: Band = _FULL
    scale: float = 0.25
    memory: tuple[str, str, str] = ("BSHD", "BSHD", "BSHD")  # of query, key, value
    bool_mask: str = ""
    float_mask: str = ""
    alibi: bool = False
    sinks: bool = False

    def problem(
        self, dtype: torch.dtype, device_type: str, *, requires_grad: bool, dropout_p: float = 0.0
    ) -> Problem:
        mask = self.added(dtype, torch.device("cpu")).mask
        return Problem(
            batch=self.batch,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            device_type=device_type,
            requires_grad=requires_grad,
            band=self.band,
            dropout_p=dropout_p,
            mask_dtype=None if mask is None else mask.dtype,
            mask_shape=None if mask is None else (*mask.shape,),
            alibi=self.alibi,
            sinks=self.sinks,
        )

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value in this case's memory layout; the same values on every call."""
        generator = self._generator()
        shapes = (
            (self.batch, self.num_queries, self.num_heads, self.head_dim),
            (self.batch, self.num_keys, self.num_kv_heads, self.head_dim),
            (self.batch, self.num_keys, self.num_kv_heads, self.value_dim),
        )
        query, key, value = (
            MEMORY[memory](torch.randn(shape, generator=generator).to(device, dtype))
            for shape, memory in zip(shapes, self.memory, strict=True)
        )
        return query, key, value

    def added(self, dtype: torch.dtype, device: torch.device) -> Added:
        """What is added to the scores; the same values on every call."""
        generator = self._generator()
        mask = slopes = sinks = None
        if dims := self.bool_mask or self.float_mask:
            sizes = (self.batch, self.num_heads, self.num_queries, self.num_keys)
            is_bool = bool(self.bool_mask)
            mask = random_mask(sizes, dims, is_bool=is_bool, generator=generator)
            mask = mask.to(device, torch.bool if is_bool else dtype)
        if self.alibi:
            slopes = (0.5 ** torch.arange(1, self.num_heads + 1)).to(device, dtype)
        if self.sinks:
            sinks = torch.randn(self.num_heads, generator=generator).to(device, dtype)
        return Added(mask, slopes, sinks)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.name.encode()))


def _bands() -> list[Case]:
    """Every kind of visibility; names say (num_queries, num_keys) where they differ."""
    causal, nothing = Band(None, 0), Band(None, -9)
    rows = (
        ("causal", 9, 9, causal),
        ("causal from the top left, more keys", 5, 11, causal),
        ("causal from the top left, more queries", 11, 5, causal),
        ("causal from the bottom right, more keys", 5, 11, Band(None, 6)),
        ("causal from the bottom right, first rows see nothing", 11, 5, Band(None, -6)),
        ("causal between the corners", 5, 11, Band(None, 3)),
        ("causal beyond the corner", 5, 11, Band(None, 8)),
        ("causal window", 9, 9, Band(-2, 0)),
        ("causal window of one key", 9, 9, Band(0, 0)),
        ("causal window from the bottom right", 5, 11, Band(4, 6)),
        ("window to both sides", 9, 12, Band(-3, 2)),
        ("open above", 9, 12, Band(1, None)),
        ("last rows see nothing", 9, 6, Band(-2, 1)),
        ("first and last rows see nothing", 12, 4, Band(-6, -3)),
        ("future keys only", 6, 9, Band(2, 4)),
        ("no row sees anything", 9, 5, nothing),
        ("a band that hides nothing", 6, 8, Band(-50, 50)),
        ("one query, causal from the top left", 1, 9, causal),
        ("one query, causal from the bottom right", 1, 9, Band(None, 8)),
        ("one query, window", 1, 9, Band(3, 5)),
        ("one query that sees nothing", 1, 5, nothing),
        ("longer than a block, window", 150, 170, Band(-40, 33)),
    )
    return [
        Case(
            name=name,
            num_queries=num_queries,
            num_keys=num_keys,
            band=band,
            num_kv_heads=2,
            batch=2,
        )
        for name, num_queries, num_keys, band in rows
    ]


def _memories() -> list[Case]:
    """Every layout for all three tensors, and layouts that differ between them."""
    mixed = [("SBHD", "BHSD", "BSHD"), ("BHSD", "fused projection", "strided dim")]
    return [
        Case(
            name=f"memory {', '.join(dict.fromkeys(memory))}",
            memory=memory,
            batch=3,
            num_queries=6,
            num_keys=8,
            num_kv_heads=2,
            band=Band(None, 2),
        )
        for memory in [(name, name, name) for name in MEMORY] + mixed
    ]


def _added() -> list[Case]:
    """Masks of every shape, ALiBi and sinks, alone and together."""
    sizes: dict[str, Any] = {"batch": 3, "num_queries": 6, "num_keys": 9, "num_kv_heads": 2}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("key padding", {"bool_mask": "BK"}),
        ("bool mask", {"bool_mask": "QK"}),
        ("bool mask of each sample", {"bool_mask": "BQK"}),
        ("bool mask of each head", {"bool_mask": "HQK"}),
        ("bool mask of each sample and head", {"bool_mask": "BHQK"}),
        ("bool mask of rows", {"bool_mask": "Q"}),
        ("float mask", {"float_mask": "QK", "scale": 0.3}),
        ("float mask of each sample and head", {"float_mask": "BHQK"}),
        ("float mask of keys of each head", {"float_mask": "HK"}),
        ("key padding, causal from the bottom right", {"bool_mask": "BK", "band": Band(None, 3)}),
        ("float mask, window", {"float_mask": "BQK", "band": Band(-2, 3)}),
        ("key padding, one query, window", {"bool_mask": "BK", "num_queries": 1, "band": Band(2)}),
        ("float mask, one query", {"float_mask": "HQK", "num_queries": 1, "band": Band(3, 7)}),
        ("bool mask, batch before heads", {"bool_mask": "QK", "memory": ("SBHD",) * 3}),
        ("ALiBi", {"alibi": True}),
        ("ALiBi, causal", {"alibi": True, "band": Band(None, 0), "memory": ("SBHD",) * 3}),
        ("ALiBi, one query, window", {"alibi": True, "num_queries": 1, "band": Band(2, 5)}),
        ("sinks", {"sinks": True}),
        ("sinks, first rows see nothing", {"sinks": True, "band": Band(None, -2)}),
        ("all of it", {"float_mask": "BK", "alibi": True, "sinks": True, "band": Band(-4, 2)}),
    ]
    return [Case(name=name, **sizes | changes) for name, changes in rows]


SIZES = [
    Case(name="plain"),
    Case(name="batch of 3", batch=3, num_queries=5, num_keys=8),
    Case(name="grouped heads", num_heads=6, num_kv_heads=2, num_keys=9),
    Case(name="grouped heads, batch of 2", num_heads=12, num_kv_heads=3, batch=2),
    Case(name="one key/value head", num_heads=5, num_kv_heads=1),
    Case(name="one head", num_heads=1, num_kv_heads=1),
    Case(name="wide values", value_dim=40, head_dim=24),
    Case(name="narrow values", value_dim=8, head_dim=32, num_heads=6, num_kv_heads=3),
    Case(name="odd head dims", head_dim=5, value_dim=3, batch=2),
    Case(name="head dim 80", head_dim=80, value_dim=80),
    Case(name="one query", num_queries=1, num_keys=9, num_kv_heads=2),
    Case(name="one key", num_queries=6, num_keys=1),
    Case(name="one query and one key", num_queries=1, num_keys=1),
    Case(name="scale of one", scale=1.0),
    Case(name="small scale", scale=0.01),
]
CASES = (*SIZES, *_bands(), *_memories(), *_added())
