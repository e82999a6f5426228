"""The way of rows and heads from the ranks that hold them to those that need them.

Plain integers, as in `ulysses.tiling`: every rank computes what all ranks send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Route:
    """The way of one kind of tensor from shards to tiles: rows held, rows and heads wanted."""

    shards: tuple[range, ...]
    rows: tuple[range, ...]
    heads: tuple[range, ...]
    num_heads: int

    @cached_property
    def between(self) -> tuple[tuple[range, ...], ...]:
        """[source][target]: the (global) rows that the one holds and the other needs.

        Empty where the target needs no head of them.
        """
        return tuple(
            tuple(
                intersection(shard, rows) if heads else range(0)
                for rows, heads in zip(self.rows, self.heads, strict=True)
            )
            for shard in self.shards
        )

    def elements(self, source: int, target: int) -> int:
        """Row-head pairs that travel from `source` to `target`."""
        return len(self.between[source][target]) * len(self.heads[target])

    @cached_property
    def is_local(self) -> bool:
        """True if nothing leaves its rank, on any rank: no collective is needed."""
        ranks = range(len(self.shards))
        return not any(self.elements(i, j) for i in ranks for j in ranks if i != j)

    @cached_property
    def is_identity(self) -> bool:
        """True if every tile is its rank's whole shard."""
        return self.rows == self.shards and self.keeps_heads_together

    @cached_property
    def keeps_heads_together(self) -> bool:
        """True if each rank that needs a row needs all its heads."""
        return all(len(heads) == self.num_heads for heads in self.heads)

    @cached_property
    def is_even(self) -> bool:
        """True if each rank needs all rows, and as many heads as any other, in rank order."""
        share, rest = divmod(self.num_heads, len(self.heads))
        whole = range(self.shards[0].start, self.shards[-1].stop)
        return rest == 0 and all(
            rows == whole and heads == range(share * rank, share * (rank + 1))
            for rank, (rows, heads) in enumerate(zip(self.rows, self.heads, strict=True))
        )

    @cached_property
    def is_partition(self) -> bool:
        """True if each (row, head) goes to exactly one rank, so that the way back is a move."""
        total = sum(len(shard) for shard in self.shards) * self.num_heads
        wanted = list(zip(self.rows, self.heads, strict=True))
        disjoint = all(
            not (intersection(rows, other_rows) and intersection(heads, other_heads))
            for n, (rows, heads) in enumerate(wanted)
            for other_rows, other_heads in wanted[:n]
        )
        return disjoint and sum(len(rows) * len(heads) for rows, heads in wanted) == total


def consecutive(lengths: Sequence[int], start: int = 0) -> tuple[range, ...]:
    """The ranges of these lengths laid end to end from `start`."""
    return tuple(range(a, b) for a, b in pairwise(accumulate(lengths, initial=start)))


def gathering(lengths: Sequence[int]) -> Route:
    """The way of shards of these lengths, of one head each, to every rank."""
    num_ranks = len(lengths)
    everything, one_head = range(sum(lengths)), range(1)
    return Route(consecutive(lengths), (everything,) * num_ranks, (one_head,) * num_ranks, 1)


def intersection(a: range, b: range) -> range:
    """What both hold."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, max(start, stop))
