"""What a rank's kernel is given: its tile of query, key, value and mask, sent or already there."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.arguments import Arguments, QueryRows
from ulysses.call import Call
from ulysses.exchange import shard_to_tile
from ulysses.joint import with_ends
from ulysses.route import Route
from ulysses.tile_kernel import Options
from ulysses.tiling import Tile, Tiling

# Query, key and value share a message while those between two ranks are smaller than this. Larger
# ones are sent one by one, the next packed while the last is under way.
_FUSE_BELOW_BYTES = 1 << 21

_Tensors = tuple[Tensor, Tensor, Tensor]


def tile_inputs(
    arguments: Arguments, call: Call, tiling: Tiling, rank: int, group: dist.ProcessGroup | None
) -> tuple[_Tensors, Options]:
    """Query, key and value of this rank's tile, text rows included, and the kernel's options.

    Collective over the group, unless all is where it is needed.
    """
    tensors, options = arguments.tensors, _options(arguments, call)
    if group is not None:  # a single process has its tile
        tensors, mask = _sent(arguments, call, tiling, rank, group)
        if mask is not None:
            options = replace(options, mask=mask, mask_is_of_tile=True)
    if arguments.ends.tensors:
        tensors = with_ends(tensors, arguments.ends, tiling, rank)
    return tensors, options


def _sent(
    arguments: Arguments, call: Call, tiling: Tiling, rank: int, group: dist.ProcessGroup
) -> tuple[_Tensors, Tensor | None]:
    """What the tile needs of query, key and value, and of a mask that is given in rows."""
    tile = tiling.tiles[rank]
    query, key, value = arguments.tensors
    moving, routes = [query], [tiling.query_route]
    if not call.keys_replicated:
        moving += [key, value]
        routes += [tiling.key_route, tiling.key_route]
    if isinstance(arguments.attn_mask, QueryRows):
        mask = arguments.mask
        assert mask is not None, "rows of a mask are a mask"
        moving.append(mask.transpose(1, 2))
        routes.append(_mask_route(tiling, mask.shape[1]))
    query, *others = shard_to_tile(moving, routes, group, fused=_is_small(call))
    rows = others.pop().transpose(1, 2) if isinstance(arguments.attn_mask, QueryRows) else None
    if call.keys_replicated:
        others = [_own_part(key, tile), _own_part(value, tile)]
    key, value = others
    return (query, key, value), rows


def _options(arguments: Arguments, call: Call) -> Options:
    """What the kernel is told. Every rank draws the seed, even where its tile is empty."""
    seed = int(torch.randint(2**63 - 1, (), device="cpu")) if call.dropout_p > 0 else 0
    return Options(
        scale=1 / math.sqrt(call.head_dim) if arguments.scale is None else arguments.scale,
        dropout_p=call.dropout_p,
        seed=seed,
        mask=arguments.mask,
        alibi_slopes=arguments.alibi_slopes,
        sinks=arguments.sinks,
    )


def _own_part(whole: Tensor, tile: Tile) -> Tensor:
    """A tile's rows and heads of a key or value that is there already."""
    keys, heads = tile.keys, tile.kv_heads
    return whole[:, keys.start : keys.stop, heads.start : heads.stop]


def _mask_route(tiling: Tiling, num_heads: int) -> Route:
    """The way of mask rows [B|1, l, H|1, Sk]: with the queries, each rank's heads or the one."""
    route = tiling.query_route
    if num_heads == tiling.num_heads:
        return route
    shared = tuple(range(1) if heads else range(0) for heads in route.heads)
    return Route(route.shards, route.rows, shared, num_heads)


def _is_small(call: Call) -> bool:
    """True if the messages between two ranks are, on average, small; equal on all ranks."""
    query, key_value, _ = call.row_bytes
    of_queries = sum(call.query_lens) * call.num_heads * query
    of_keys = sum(call.key_lens) * call.num_kv_heads * key_value
    return of_queries + of_keys < _FUSE_BELOW_BYTES * len(call.query_lens) ** 2
