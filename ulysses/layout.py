"""Where the parts of one message lie in memory: worked out once for all calls of the same shape.

Between ranks, memory is [rows, B, h, D]. Rows then concatenate in rank order into a whole tile, so
that what arrives is a view of what was received, and what a kernel leaves in that order is sent
as it lies. Tensors that share a message lie side by side in each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from ulysses.route import Route

_MOST_LAYOUTS = 4096


class View(NamedTuple):
    """A view of a message's memory, counted in elements from where that begins in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


class Part(NamedTuple):
    """A part of a shard, its rows and heads or all of it, and where it lies in the message."""

    where: tuple[slice, slice, slice] | None
    view: View

    def of_shard(self, shard: Tensor) -> Tensor:
        """The part in a shard [B, l, H, D], its axes as those of the view."""
        return shard.view(self.view.size) if self.where is None else shard[self.where]


@dataclass(frozen=True)
class Layout:
    """A message between one rank's shards and all ranks' tiles, for one or more tensors."""

    is_local: bool  # nothing leaves its rank, on any rank
    is_whole: bool  # the shard is, in its memory, what tiles send of it: one after the other
    shard_size: int  # elements that this rank's shards send or get, those of its own tiles too
    tile_size: int  # and its tiles
    # [rank]: how many of them between the shards here and the tiles there, and the other way round;
    # None where every rank has as many with every other, and no collective has to be told.
    shard_splits: list[int] | None
    tile_splits: list[int] | None
    tiles: list[View]  # [tensor]: the tile, [B, rows, h, D]
    shards: list[tuple[int, int, int, int]]  # [tensor]: the shard's shape, [B, l, H, D]
    parts: list[list[Part]]  # [tensor]: what makes up the shard


@lru_cache(_MOST_LAYOUTS)
def layout(routes: tuple[Route, ...], rank: int, sizes: tuple[tuple[int, int], ...]) -> Layout:
    """Of tensors whose rows travel alike, each on its route; `sizes` are their B and D."""
    route = routes[0]  # for rows
    row_sizes = [  # [tile][tensor]: elements of a row
        [batch * len(r.heads[tile]) * dim for r, (batch, dim) in zip(routes, sizes, strict=True)]
        for tile in range(len(route.shards))
    ]
    to_tiles = route.between[rank]
    shard_sizes = [len(rows) * sum(row) for rows, row in zip(to_tiles, row_sizes, strict=True)]
    starts = list(accumulate(shard_sizes, initial=0))
    tile_sizes = [len(row[rank]) * sum(row_sizes[rank]) for row in route.between]
    is_even = all(r.is_even for r in routes)
    is_equal = _is_equal(route, [sum(row) for row in row_sizes])

    def tile_view(tensor: int, tile: int, rows: range, start: int) -> View:
        (batch, dim), heads = sizes[tensor], len(routes[tensor].heads[tile])
        return View(
            size=(batch, len(rows), heads, dim),
            stride=(heads * dim, sum(row_sizes[tile]), dim, 1),
            offset=start + sum(row_sizes[tile][:tensor]),
        )

    def parts(tensor: int) -> list[Part]:
        if is_even:
            return [_all_tiles(tile_view(tensor, 0, to_tiles[0], 0), shard_sizes)]
        shard = route.shards[rank].start
        return [
            Part(
                (
                    slice(None),
                    slice(rows.start - shard, rows.stop - shard),
                    slice(heads.start, heads.stop),
                ),
                tile_view(tensor, tile, rows, starts[tile]),
            )
            for tile, (rows, heads) in enumerate(zip(to_tiles, routes[tensor].heads, strict=True))
            if rows and heads
        ]

    tensors = range(len(routes))
    return Layout(
        is_local=all(r.is_local for r in routes),
        is_whole=all(r.is_partition and r.keeps_heads_together for r in routes),
        shard_size=sum(shard_sizes),
        tile_size=sum(tile_sizes),
        shard_splits=None if is_equal else shard_sizes,
        tile_splits=None if is_equal else tile_sizes,
        tiles=[tile_view(i, rank, route.rows[rank], 0) for i in tensors],
        shards=[
            (batch, len(route.shards[rank]), r.num_heads, dim)
            for r, (batch, dim) in zip(routes, sizes, strict=True)
        ],
        parts=[parts(i) for i in tensors],
    )


def _is_equal(route: Route, row_sizes: list[int]) -> bool:
    """True if as many elements travel between any two ranks."""
    num_rows = {len(rows) for row in route.between for rows in row}
    return len(num_rows) == len(set(row_sizes)) == 1


def _all_tiles(first: View, shard_sizes: list[int]) -> Part:
    """The whole shard as one part, [B, l, P, h, D], where what each tile gets is alike."""
    (batch, rows, *rest), (of_batch, of_row, *of_rest) = first.size, first.stride
    view = View(
        size=(batch, rows, len(shard_sizes), *rest),
        stride=(of_batch, of_row, shard_sizes[0], *of_rest),
        offset=first.offset,
    )
    return Part(None, view)
