"""`UlyssesAttention`: attention over a sequence that is sharded across the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses.agreement import require_agreement
from ulysses.backends.base import Band, Dropout, LocalAttention, no_attention
from ulysses.backends.registry import get_backend
from ulysses.exchange import shard_to_tile, tile_to_shard
from ulysses.grid import Call, plan
from ulysses.group import checked_lens, process_group, rank_in
from ulysses.tiling import Grid, Tile, Tiling, grids

# Query, key and value share a message while those between two ranks are smaller than this. Larger
# ones are sent one by one, the next packed while the last is under way.
_FUSE_BELOW_BYTES = 1 << 21


class UlyssesAttention(nn.Module):
    """Attention of sequence shards: [B, l, H, D] in, [B, l, H, Dv] out, as if on one device.

    `group` holds the ranks that share a sequence: a ProcessGroup, a 1-D DeviceMesh such as
    `mesh["sp"]`, or None for a single process. `backend` names the local kernel ("auto": by device
    type) or is one. `grid` is (u, r) or "auto"; see `ulysses.grid`. With `check=True` each call
    first compares shapes, dtypes and options over the group, and raises on all ranks if they
    differ; that costs a small collective a call.

    `tiling` shows the tiles of the last call, for inspection only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        *,
        backend: str | LocalAttention = "auto",
        grid: tuple[int, int] | Literal["auto"] = "auto",
        check: bool = False,
    ) -> None:
        super().__init__()
        self.group = process_group(group)
        self.rank, self.num_ranks = rank_in(self.group)
        self.backend = backend
        self.grid = _checked_grid(grid, self.num_ranks)
        self.check = check
        self.tiling: Tiling | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        seq_lens: Sequence[int] | None = None,
    ) -> Tensor:
        """Attend to the whole sequence.

        query is [B, l, H, D], key [B, l, Hkv, D], value [B, l, Hkv, Dv], all of one floating dtype
        and device; Hkv divides H. `seq_lens` are the lengths l of all ranks, by default all equal
        to this one's; any of them may be 0. `is_causal` and `scale` (default 1/sqrt(D)) mean what
        they mean to torch's scaled_dot_product_attention. `dropout_p` draws from torch's CPU
        generator: seed it alike on all ranks. Returns this rank's rows, [B, l, H, Dv].

        Raises ValueError or TypeError, before any communication, for what can not be exact.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask is not supported: pass is_causal=True or no mask")
        try:
            backend = get_backend(self.backend, query.device.type)
            call = self._call(query, key, value, dropout_p, is_causal, seq_lens)
            tiling = plan(call, backend, self.grid)
        except (TypeError, ValueError) as error:
            if self.check:
                require_agreement(error, self.group)
            raise
        if self.check:
            require_agreement(_fingerprint(call, backend, self.grid, scale), self.group)
        self.tiling = tiling
        scale = 1 / math.sqrt(call.head_dim) if scale is None else scale
        tile = tiling.tiles[self.rank]
        dropout = _dropout_of(tile, dropout_p)
        if self.group is None:
            return _attend(backend, tile, (query, key, value), call.band, scale, dropout)
        routes = (tiling.query_route, tiling.key_route, tiling.key_route)
        tensors = shard_to_tile(
            (query, key, value), routes, self.group, fused=_is_small(call, self.num_ranks)
        )
        out = _attend(backend, tile, tensors, call.band, scale, dropout)
        (out,) = tile_to_shard((out,), (tiling.query_route,), self.group)
        return out

    def extra_repr(self) -> str:
        return f"num_ranks={self.num_ranks}, backend={self.backend!r}, grid={self.grid!r}"

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        is_causal: bool,
        seq_lens: Sequence[int] | None,
    ) -> Call:
        """The call as plain data, after everything that this rank can see to be wrong."""
        _check_tensors(query, key, value)
        if not 0.0 <= dropout_p < 1.0:
            raise ValueError(f"dropout_p={dropout_p}: a probability in [0, 1) is needed")
        if type(is_causal) is not bool:
            raise TypeError(f"is_causal={is_causal!r}: pass True or False")
        batch, length, num_heads, head_dim = query.shape
        lens = checked_lens(seq_lens, length, self.rank, self.num_ranks)
        return Call(
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=key.shape[2],
            head_dim=head_dim,
            value_dim=value.shape[3],
            query_lens=lens,
            key_lens=lens,
            dtype=query.dtype,
            device_type=query.device.type,
            requires_grad=torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in (query, key, value)),
            band=Band(None, 0) if is_causal else Band(),
            dropout_p=dropout_p,
        )


def _attend(
    backend: LocalAttention,
    tile: Tile,
    tensors: tuple[Tensor, ...],
    band: Band,
    scale: float,
    dropout: Dropout | None,
) -> Tensor:
    """The kernel on a tile: [B, Sq, h, D], [B, Sk, hkv, D], [B, Sk, hkv, Dv] to [B, Sq, h, Dv]."""
    query, key, value = tensors
    if tile.is_empty or not query.numel():
        return no_attention(query, key, value)
    band = band.shifted(tile.queries.start, tile.keys.start)
    outputs = []
    for heads, kv_heads in tile.runs:
        of_run, shared = slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop)
        outputs.append(
            backend(
                query[:, :, of_run],
                key[:, :, shared],
                value[:, :, shared],
                band=band,
                scale=scale,
                dropout=dropout and replace(dropout, head=dropout.head + heads.start),
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _dropout_of(tile: Tile, p: float) -> Dropout | None:
    """Dropout of this tile, from a seed that every rank draws even where its tile is empty."""
    if p == 0.0:
        return None
    seed = int(torch.randint(2**63 - 1, ()))
    return Dropout(
        p=p,
        seed=seed,
        head=tile.heads.start,
        query=tile.queries.start,
        key=tile.keys.start,
    )


def _is_small(call: Call, num_ranks: int) -> bool:
    """True if the messages between two ranks are, on average, small; equal on all ranks."""
    query, key_value, _ = call.row_bytes
    heads = call.num_heads * query + call.num_kv_heads * key_value
    return sum(call.query_lens) * heads < _FUSE_BELOW_BYTES * num_ranks**2


def _checked_grid(grid: tuple[int, int] | Literal["auto"], num_ranks: int) -> Grid | None:
    """The grid, or None for "auto"."""
    if isinstance(grid, str):
        if grid != "auto":
            raise ValueError(f'grid={grid!r}: pass "auto" or a pair (u, r)')
        return None
    choices = ", ".join(str(tuple(choice)) for choice in grids(num_ranks))
    if tuple(grid) not in grids(num_ranks):
        raise ValueError(
            f"grid={tuple(grid)} over {num_ranks} ranks: u * r must be the number of ranks; "
            f'pass "auto" or one of {choices}'
        )
    return Grid(*grid)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Everything that the three tensors must have in common."""
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
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        raise ValueError(f"{shapes}: all three must have this rank's length in dim 1")
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


def _fingerprint(
    call: Call, backend: LocalAttention, grid: Grid | None, scale: float | None
) -> dict[str, Any]:
    """What must be equal on all ranks, by name."""
    return {**asdict(call), "backend": backend.name, "grid": grid, "scale": scale}
