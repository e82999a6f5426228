"""One attention call over all ranks as plain data: what every rank knows of every rank's tile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ulysses.backends.base import Problem
from ulysses.structure import Structure
from ulysses.tiling import Grid, Tile, Tiling, tile_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Sizes, dtype and options of a call, equal on every rank.

    `key_lens` of replicated keys are (Sk, 0, ..., 0). `ends` are the numbers of replicated rows
    before and behind all shards. `mask_shape` is the whole mask's, [B|1, H|1, Sq|1, Sk|1].
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    ends: tuple[int, int] = (0, 0)
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    structure: Structure
    dropout_p: float = 0.0
    keys_replicated: bool = False
    mask_dtype: torch.dtype | None = None
    mask_shape: tuple[int, int, int, int] | None = None
    alibi: bool = False
    sinks: bool = False

    @property
    def row_bytes(self) -> tuple[int, int, int]:
        """What `Tiling.bytes_sent` asks for; replicated keys and values do not travel."""
        element = self.batch * self.dtype.itemsize
        key_value = 0 if self.keys_replicated else self.head_dim + self.value_dim
        return element * self.head_dim, element * key_value, element * self.value_dim

    def tiled(self, grid: Grid) -> Tiling:
        """This call's tiles on a grid."""
        return tile_attention(
            self.num_heads,
            self.num_kv_heads,
            self.query_lens,
            self.key_lens,
            grid,
            self.structure,
            self.ends,
        )

    def problems(self, tile: Tile) -> Counter[Problem]:
        """The kernel calls of a tile, and how often each is made."""
        shapes = Counter(
            (len(piece.queries), len(piece.keys), piece.band, len(heads), len(kv_heads))
            for piece in self.structure.within(tile.queries)
            for heads, kv_heads in tile.runs
            if piece.keys and self.batch
        )
        problems: Counter[Problem] = Counter()
        for (num_queries, num_keys, band, num_heads, num_kv_heads), times in shapes.items():
            problem = Problem(
                batch=self.batch,
                num_queries=num_queries,
                num_keys=num_keys,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=self.head_dim,
                value_dim=self.value_dim,
                dtype=self.dtype,
                device_type=self.device_type,
                requires_grad=self.requires_grad,
                band=band,
                dropout_p=self.dropout_p,
                mask_dtype=self.mask_dtype,
                mask_shape=self._cut(num_heads, num_queries, num_keys),
                alibi=self.alibi,
                sinks=self.sinks,
            )
            problems[problem] = times
        return problems

    def _cut(
        self, num_heads: int, num_queries: int, num_keys: int
    ) -> tuple[int, int, int, int] | None:
        if self.mask_shape is None:
            return None
        batch, heads, queries, keys = self.mask_shape
        return (
            batch,
            min(heads, num_heads),
            num_queries if queries > 1 else 1,
            num_keys if keys > 1 else 1,
        )
