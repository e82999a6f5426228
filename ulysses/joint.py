"""Joint attention: replicated text around a sharded image, as one sequence in its own order.

The tiles are those of the whole sequence, text included. Each rank cuts its tile's text out of what
it holds, and only image rows travel on the way in. On the way back the image's output goes to its
shards, and the text's to every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.ends import Ends, Rows
from ulysses.exchange import shard_to_tile, tile_to_shard
from ulysses.route import Route, gathering
from ulysses.tiling import Tiling


def with_ends(image: Rows, ends: Ends, tiling: Tiling, rank: int) -> Rows:
    """A tile's image rows, with the text that the tile needs before and behind them."""
    tile = tiling.tiles[rank]
    joined = []
    for i, (tensor, rows, heads, shards) in enumerate(
        (
            (image[0], tile.queries, tile.heads, tiling.query_shards),
            (image[1], tile.keys, tile.kv_heads, tiling.key_shards),
            (image[2], tile.keys, tile.kv_heads, tiling.key_shards),
        )
    ):
        parts = [tensor]
        if ends.prefix is not None:
            parts.insert(0, _cut(ends.prefix[i], 0, rows, heads))
        if ends.suffix is not None:
            parts.append(_cut(ends.suffix[i], shards[-1].stop, rows, heads))
        # [rows, B, h, D] in memory, as the exchange leaves its tiles.
        joined.append(torch.cat([part.transpose(0, 1) for part in parts]).transpose(0, 1))
    query, key, value = joined
    return query, key, value


def image_and_text(
    out: Tensor, tiling: Tiling, rank: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """A tile's output to this rank's image rows [B, l, H, Dv] and all text rows [B, T, H, Dv]."""
    num_text = [_text_rows(tiling, other) for other in range(len(tiling.tiles))]
    before, behind = num_text[rank]
    stop = out.shape[1] - behind
    image, text = out[:, before:stop], torch.cat([out[:, :before], out[:, stop:]], dim=1)
    if group is None:
        return image, text
    shapes = [(sum(n), len(tile.heads)) for n, tile in zip(num_text, tiling.tiles, strict=True)]
    sizes = [rows * heads for rows, heads in shapes]
    routes = (tiling.query_route, gathering(sizes))
    both = (image, text.flatten(1, 2).unsqueeze(2))
    image, gathered = both if len(shapes) == 1 else _returned(*both, routes, group)
    parts = [
        part.reshape(out.shape[0], *shape, out.shape[3])
        for part, shape in zip(gathered.split(sizes, dim=1), shapes, strict=True)
    ]
    u = tiling.grid.u
    blocks = [torch.cat(parts[i : i + u], dim=2) for i in range(0, len(parts), u)]
    return image, torch.cat(blocks, dim=1)


def _returned(
    image: Tensor, text: Tensor, routes: tuple[Route, Route], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    function: type[torch.autograd.Function] = _Return
    shard, gathered = function.apply(routes, group, image, text)
    return shard, gathered


class _Return(torch.autograd.Function):
    """Image rows to their shards and text to all ranks, in one node.

    [B, rows, h, Dv] to [B, l, H, Dv], and [B, t*h, 1, Dv] to all ranks' such parts in a row. Each
    half is a move of `ulysses.exchange`, and its backward pass the transpose, which sums the text's
    gradients. In one node, since a loss may use the image on one rank and the text on another: both
    transposes must run on all of them.
    """

    @staticmethod
    def forward(
        ctx: Any, routes: tuple[Route, Route], group: dist.ProcessGroup, image: Tensor, text: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.routes, ctx.group = routes, group
        (shard,) = tile_to_shard((image,), routes[:1], group)
        (gathered,) = shard_to_tile((text,), routes[1:], group, fused=False)
        return shard, gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor]:
        (image,) = shard_to_tile(grads[:1], ctx.routes[:1], ctx.group, fused=False)
        (text,) = tile_to_shard(grads[1:], ctx.routes[1:], ctx.group)
        return None, None, image, text


def _cut(whole: Tensor, first: int, rows: range, heads: range) -> Tensor:
    """The given rows and heads of a tensor whose first row is number `first`."""
    start = max(rows.start - first, 0)
    return whole[:, start : max(rows.stop - first, start), heads.start : heads.stop]


def _text_rows(tiling: Tiling, rank: int) -> tuple[int, int]:
    """How many rows of a tile lie before the image, and behind it."""
    rows, shards = tiling.tiles[rank].queries, tiling.query_shards
    before = len(range(rows.start, min(rows.stop, shards[0].start)))
    return before, len(range(max(rows.start, shards[-1].stop), rows.stop))
