"""A plain attention function on shards: `ulysses.wrap_function(flash_attn_func, mesh)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.attention import UlyssesAttention
from ulysses.backends.base import no_attention
from ulysses.exchange import shard_to_tile, tile_to_shard
from ulysses.tiling import Grid, tile_attention
from ulysses.wrap_lengths import Lengths
from ulysses.wrap_open import current_scope

Layout = Literal["bshd", "bhsd"]
Mesh = DeviceMesh | dist.ProcessGroup | None


def wrap_function(
    function: Callable[..., Tensor], mesh: Mesh, *, layout: Layout = "bshd"
) -> AttentionFunction:
    """Make a plain `function(query, key, value, ...)` attend over the ranks of `mesh`.

    `layout` is the function's own: "bshd" or "bhsd". See `AttentionFunction`.
    """
    return AttentionFunction(function, UlyssesAttention(sequence_group(mesh)), layout)


def sequence_group(mesh: Mesh) -> Mesh:
    """The ranks that share a sequence: the axis "sp" of a mesh of several axes."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        if "sp" not in names:
            raise ValueError(f'mesh has axes {names}: one named "sp" is needed, or pass a group')
        return mesh["sp"]
    return mesh


class AttentionFunction:
    """`function(query, key, value, *args, **kwargs)` on this rank's rows, as if on all of them.

    The function is run on complete rows of this rank's heads, so whatever it does alike for every
    head it does as before; anything a head (a bias, sinks, a mask of several heads) it must not be
    given. Without `seq_lens` the lengths are those of the wrapped module that calls it, or asked
    for, one small collective.

    Copies share the group. A pickled one is the plain function again.
    """

    ulysses_function = True  # `ulysses.wrap_sites` knows it by this

    def __init__(
        self, function: Callable[..., Tensor], attention: UlyssesAttention, layout: Layout
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._attention = attention
        self._layout = layout

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        seq_lens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        scope = current_scope()
        query, key, value = (self._turned(tensor) for tensor in (query, key, value))
        if scope is not None and scope.neutral:
            return self._turned(scope.attend(query, key, value))
        if seq_lens is None:
            lengths = scope.lengths if scope is not None else Lengths(self._attention)
            seq_lens = lengths.of(query, 1, self._name)
        if scope is not None:
            scope.num_calls += 1
        return self._turned(self._exchanged([query, key, value], tuple(seq_lens), args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionFunction:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._function,)

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def _turned(self, tensor: Tensor) -> Tensor:
        """[B, l, H, D] from the function's layout, or back."""
        return tensor.transpose(1, 2) if self._layout == "bhsd" else tensor

    def _exchanged(
        self,
        tensors: list[Tensor],
        lens: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        group, rank = self._attention.group, self._attention.rank
        num_heads, num_kv_heads = tensors[0].shape[2], tensors[1].shape[2]
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{self._name}: {num_heads} query heads, {num_kv_heads} key/value heads in "
                f"layout {self._layout!r}: the first must be a multiple of the second"
            )
        tiling = tile_attention(num_heads, num_kv_heads, lens, lens, Grid(len(lens), 1))
        if group is not None:
            routes = (tiling.query_route, tiling.key_route, tiling.key_route)
            tensors = list(shard_to_tile(tensors, routes, group, fused=False))
        tile = tiling.tiles[rank]
        if tile.is_empty:
            out = no_attention(*tensors)
        else:
            outputs = []
            for heads, kv_heads in tile.runs:
                of_run = (heads, kv_heads, kv_heads)
                parts = (
                    self._turned(tensor[:, :, own.start : own.stop])
                    for tensor, own in zip(tensors, of_run, strict=True)
                )
                outputs.append(self._turned(self._function(*parts, *args, **kwargs)))
            out = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        if group is not None:
            (out,) = tile_to_shard((out,), (tiling.query_route,), group)
        return out


def _same(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function
