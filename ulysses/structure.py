"""The shape of a mask as plain data: which rows see which keys, without a mask tensor.

Causal attention, sliding windows, packed documents and prefix-LM are all rows cut into pieces, each
of which sees a band of one interval of keys. The tiling computes what a tile needs from that, and
a kernel is called once a piece, with a band that it may have a flag for, or once for all pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ulysses.backends.base import Band, Piece

NO_KEYS = range(0)


@dataclass(frozen=True)
class Structure:
    """Pieces that cover all rows in order; later rows see no earlier first or last key."""

    pieces: tuple[Piece, ...]

    def keys(self, queries: range, num_keys: int) -> range:
        """The columns that at least one of these rows may see, as one interval."""
        del num_keys  # the pieces know
        places = self._places(queries)
        first = self._first_keys(queries, places)
        return range(first.start, self._first_keys(queries, reversed(places)).stop)

    def area(self, queries: range, num_keys: int) -> int:
        """How many (row, column) pairs are visible in these rows."""
        del num_keys
        return self._area_above(queries.stop) - self._area_above(queries.start)

    def within(self, queries: range) -> list[Piece]:
        """The pieces cut to these rows, each with no more keys than its rows see."""
        cut = (_cut(self.pieces[place], queries) for place in self._places(queries))
        return [piece for piece in cut if piece.queries]

    def _places(self, queries: range) -> range:
        """Where the pieces of these rows are."""
        if not queries:
            return range(0)
        first = max(0, bisect_right(self._starts, queries.start) - 1)
        return range(first, bisect_left(self._starts, queries.stop))

    def _first_keys(self, queries: range, places: Iterable[int]) -> range:
        """The keys of the first of these pieces that sees any."""
        cut = (_cut(self.pieces[place], queries).keys for place in places)
        return next((keys for keys in cut if keys), NO_KEYS)

    def _area_above(self, row: int) -> int:
        """Visible pairs in rows 0..row."""
        place = bisect_right(self._starts, row) - 1
        if place < 0:
            return 0
        piece = self.pieces[place]
        rows = range(min(row, piece.queries.stop) - piece.queries.start)
        return self._areas[place] + piece.band.area(rows, len(piece.keys))

    @cached_property
    def _starts(self) -> list[int]:
        return [piece.queries.start for piece in self.pieces]

    @cached_property
    def _areas(self) -> list[int]:
        """Visible pairs above each piece."""
        areas = (p.band.area(range(len(p.queries)), len(p.keys)) for p in self.pieces)
        return list(accumulate(areas, initial=0))


def one_band(num_queries: int, num_keys: int, band: Band) -> Structure:
    """All rows see one band of all keys."""
    return Structure((Piece(range(num_queries), range(num_keys), band),))


def packed(documents: Sequence[int], length: int, band: Band) -> Structure:
    """Rows see a band of their own document; rows behind the last one see nothing.

    `documents` are the borders (0, ..., end) of consecutive documents, empty ones allowed.
    """
    pieces = [Piece(range(a, b), range(a, b), band) for a, b in pairwise(documents) if a < b]
    if documents[-1] < length:
        pieces.append(Piece(range(documents[-1], length), NO_KEYS))
    return Structure(tuple(pieces))


def prefix(prefix_len: int, num_queries: int, num_keys: int) -> Structure:
    """Causal from the upper left, but all rows see the first `prefix_len` keys."""
    rows = min(prefix_len, num_queries)
    first = Piece(range(rows), range(prefix_len))
    rest = Piece(range(rows, num_queries), range(num_keys), Band(None, prefix_len))
    return Structure(tuple(piece for piece in (first, rest) if piece.queries))


def _cut(piece: Piece, queries: range) -> Piece:
    """Those of a piece's rows that are asked for, and the keys that they see."""
    start = min(max(piece.queries.start, queries.start), piece.queries.stop)
    rows = range(start, max(start, min(piece.queries.stop, queries.stop)))
    down = rows.start - piece.queries.start
    keys = piece.band.keys(range(down, down + len(rows)), len(piece.keys))
    across = keys.start
    start = piece.keys.start + across
    return Piece(rows, range(start, start + len(keys)), piece.band.shifted(down, across))
