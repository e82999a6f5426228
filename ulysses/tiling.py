"""Tile arithmetic: which rank computes which heads and rows, and what must travel for it.

Attention work is a rectangle of query heads x query rows. A grid (u, r) of P = u*r ranks cuts it
into u head ranges and r row blocks; rank i takes head range i % u of row block i // u, so that the
u ranks of one row block hold neighbouring shards. (P, 1) is Ulysses, (1, P) is a key/value
all-gather. Everything here is plain integers: no torch, no process group, every rank computes the
figures of all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from ulysses.route import Route, consecutive, intersection

# Row blocks follow the shards unless levelling them takes more than this off the largest tile:
# while they do, no query row leaves its block.
_LEVEL_TOLERANCE = 0.05


class Visibility(Protocol):
    """What the shape of a mask says about rows: hashable, and monotone in the row."""

    def keys(self, queries: range, num_keys: int) -> range:
        """The columns that at least one of these rows may see, as one interval."""
        ...

    def area(self, queries: range, num_keys: int) -> int:
        """How many (row, column) pairs are visible in these rows: score elements."""
        ...


@dataclass(frozen=True, slots=True)
class Everything:
    """No mask: each row sees each key."""

    def keys(self, queries: range, num_keys: int) -> range:
        return range(num_keys if queries else 0)

    def area(self, queries: range, num_keys: int) -> int:
        return len(queries) * num_keys


EVERYTHING = Everything()


class Grid(NamedTuple):
    """u head ranges x r row blocks; u * r is the number of ranks."""

    u: int
    r: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One rank's work: query heads x query rows, and the keys and values that it needs."""

    heads: range
    queries: range
    kv_heads: range
    keys: range
    group_size: int  # query heads that share one key/value head, in the whole tensor

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to attend, so that no kernel runs."""
        return not (self.heads and self.queries and self.keys)

    @property
    def runs(self) -> tuple[tuple[range, range], ...]:
        """The tile's heads as kernel calls: (query heads, kv heads), counted within the tile.

        A kernel shares key/value heads evenly. A tile that begins or ends inside a group of query
        heads does not, and is cut there: at most three runs, each even.
        """
        if not self.heads:
            return ()
        size = self.group_size
        cuts = {self.heads.start, self.heads.stop}
        first, last = -(-self.heads.start // size) * size, self.heads.stop // size * size
        if len(self.kv_heads) > 1:
            cuts |= {cut for cut in (first, last) if self.heads.start < cut < self.heads.stop}
        return tuple(
            (
                range(a - self.heads.start, b - self.heads.start),
                range(a // size - self.kv_heads.start, -(-b // size) - self.kv_heads.start),
            )
            for a, b in pairwise(sorted(cuts))
        )


@dataclass(frozen=True)
class Tiling:
    """The tiles of all ranks for one call, and the routes that feed them."""

    grid: Grid
    num_heads: int
    num_kv_heads: int
    query_shards: tuple[range, ...]
    key_shards: tuple[range, ...]
    tiles: tuple[Tile, ...]
    work: tuple[int, ...]  # score elements of each rank's tile

    @cached_property
    def query_route(self) -> Route:
        """How queries reach their tile; reversed, how the output gets back."""
        return Route(
            self.query_shards,
            _held(self.query_shards, (tile.queries for tile in self.tiles)),
            tuple(tile.heads for tile in self.tiles),
            self.num_heads,
        )

    @cached_property
    def key_route(self) -> Route:
        """How keys and values reach their tile."""
        return Route(
            self.key_shards,
            _held(self.key_shards, (tile.keys for tile in self.tiles)),
            tuple(tile.kv_heads for tile in self.tiles),
            self.num_kv_heads,
        )

    @property
    def imbalance(self) -> float:
        """The largest tile's work over the mean, minus 1; 0 is level."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total - 1 if total else 0.0

    def bytes_sent(self, rank: int, row_bytes: tuple[int, int, int]) -> int:
        """Bytes that leave `rank` in one forward pass.

        `row_bytes` are the bytes of one row of one head over the whole batch, of the query, of
        key and value together, and of the output: (B*D*e, B*(D+Dv)*e, B*Dv*e) for e bytes an
        element. The backward pass moves the same bytes the other way.
        """
        return sum(self._pair_bytes(rank, other, row_bytes) for other in self._others(rank))

    def bytes_received(self, rank: int, row_bytes: tuple[int, int, int]) -> int:
        """Bytes that reach `rank` from other ranks in one forward pass; see `bytes_sent`."""
        return sum(self._pair_bytes(other, rank, row_bytes) for other in self._others(rank))

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(len(self.tiles)) if other != rank]

    def _pair_bytes(self, source: int, target: int, row_bytes: tuple[int, int, int]) -> int:
        query, key_value, output = row_bytes
        return (
            self.query_route.elements(source, target) * query
            + self.key_route.elements(source, target) * key_value
            + self.query_route.elements(target, source) * output
        )


def shard_lengths(length: int, num_shards: int) -> tuple[int, ...]:
    """Cut `length` into `num_shards` lengths that differ by at most one, longer ones first."""
    short, longer = divmod(length, num_shards)
    return (short + 1,) * longer + (short,) * (num_shards - longer)


def grids(num_ranks: int) -> tuple[Grid, ...]:
    """All grids over that many ranks, from (P, 1) to (1, P)."""
    return tuple(Grid(u, num_ranks // u) for u in range(num_ranks, 0, -1) if num_ranks % u == 0)


@lru_cache(maxsize=1024)
def tile_attention(
    num_heads: int,
    num_kv_heads: int,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    grid: Grid,
    visibility: Visibility = EVERYTHING,
    ends: tuple[int, int] = (0, 0),
) -> Tiling:
    """Cut attention over len(query_lens) ranks into tiles on `grid`.

    `query_lens` and `key_lens` are the shard lengths of all ranks, 0 allowed; `num_kv_heads` must
    divide `num_heads`, and u * r must be the number of ranks. `ends` are the numbers of rows and
    keys before and behind the shards that every rank holds: they are attended and do not travel.
    """
    num_ranks, num_keys = len(query_lens), sum(key_lens) + sum(ends)
    assert grid.u * grid.r == num_ranks == len(key_lens), "a grid covers all ranks"
    assert num_heads % num_kv_heads == 0, "query heads share key/value heads evenly"
    group_size = num_heads // num_kv_heads
    query_shards = consecutive(query_lens, ends[0])
    head_ranges = consecutive(shard_lengths(num_heads, grid.u))
    blocks = _row_blocks(query_shards, sum(query_lens) + sum(ends), num_keys, grid, visibility)
    tiles = []
    for rank in range(num_ranks):
        heads, queries = head_ranges[rank % grid.u], blocks[rank // grid.u]
        kv_heads = range(heads.start // group_size, -(-heads.stop // group_size))
        keys = visibility.keys(queries, num_keys)
        if not (heads and queries):
            kv_heads = keys = range(0)
        tiles.append(Tile(heads, queries, kv_heads, keys, group_size))
    return Tiling(
        grid=grid,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_shards=query_shards,
        key_shards=consecutive(key_lens, ends[0]),
        tiles=tuple(tiles),
        work=tuple(len(t.heads) * visibility.area(t.queries, num_keys) for t in tiles),
    )


def _row_blocks(
    shards: tuple[range, ...], stop: int, num_keys: int, grid: Grid, visibility: Visibility
) -> tuple[range, ...]:
    """r consecutive row blocks of level work, along the shards' borders where those are level."""

    def up_to(row: int) -> int:
        return visibility.area(range(row), num_keys)

    def largest(blocks: tuple[range, ...]) -> int:
        return max(visibility.area(block, num_keys) for block in blocks)

    starts = [shards[i].start for i in range(grid.u, len(shards), grid.u)]
    along_shards = tuple(range(a, b) for a, b in pairwise([0, *starts, stop]))
    total = up_to(stop)
    borders = [0]
    for i in range(1, grid.r):
        share = total * i / grid.r
        row = bisect_left(range(stop), share, key=up_to)
        if row and share - up_to(row - 1) < up_to(row) - share:
            row -= 1
        borders.append(max(row, borders[-1]))
    level = tuple(range(a, b) for a, b in pairwise([*borders, stop]))
    if largest(along_shards) <= (1 + _LEVEL_TOLERANCE) * largest(level):
        return along_shards
    return level


def _held(shards: tuple[range, ...], wanted: Iterable[range]) -> tuple[range, ...]:
    """What the shards hold of the rows that each tile wants."""
    whole = range(shards[0].start, shards[-1].stop)
    return tuple(intersection(rows, whole) for rows in wanted)
