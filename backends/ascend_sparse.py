"""Which sparse mode of the Ascend operators shows a band's keys: plain integers, no tensors.

Modes 2, 3 and 4 read one 2048 x 2048 triangle for any lengths, never an Sq x Sk mask:

    mode  the operator shows row i the columns j with         counted from
    0     all, when no mask is given; else those in a band     the top left corner
          like mode 4's that the given mask does not hide
    2     j <= i                                               the top left corner
    3     j <= i + (Sk - Sq)                                   the bottom right corner
    4     -pre_tokens <= j - i - (Sk - Sq) <= next_tokens      the bottom right corner

Sources: torch_npu's page of npu_fusion_attention, "sparse_mode 4: the parameters' origin is the
bottom right corner, and pre_tokens and next_tokens must have an intersection"; CANN's tiling code
shifts pre_tokens by Sq - Sk and next_tokens by Sk - Sq for mode 4 in both operators, and refuses a
band that shows nothing at all (`sparse_arguments` is not asked about those).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ulysses.backends.base import Band

_UNBOUNDED = 2147483647  # the operators' own default


@dataclass(frozen=True, slots=True)
class SparseArguments:
    """A band in the operators' terms; `has_empty_rows` if some row sees no key."""

    mode: int
    pre_tokens: int
    next_tokens: int
    has_empty_rows: bool


# With a mask that is written out the band must hide nothing: blocks outside it are skipped. Whether
# the mask leaves rows without a key, only its content could tell.
WRITTEN_OUT = SparseArguments(0, _UNBOUNDED, _UNBOUNDED, has_empty_rows=True)


def sparse_arguments(band: Band, num_queries: int, num_keys: int) -> SparseArguments:
    """The mode and tokens for a band that shows at least one key to at least one row."""
    corner = num_keys - num_queries
    band = band.clipped(num_queries, num_keys)
    pre_tokens, next_tokens = _UNBOUNDED, _UNBOUNDED
    if band.is_full:
        mode = 0
    elif band == Band(None, corner):
        mode = 3
    elif band == Band(None, 0):
        mode = 2
    else:
        mode = 4
        # An open side becomes the smallest number that hides nothing.
        pre_tokens = num_keys if band.lower is None else corner - band.lower
        next_tokens = num_queries if band.upper is None else band.upper - corner
    empty = len(rows_with_keys(band, num_queries, num_keys)) < num_queries
    return SparseArguments(mode, pre_tokens, next_tokens, empty)


def shared_arguments(rectangles: Iterable[tuple[Band, int, int]]) -> SparseArguments | None:
    """The mode and tokens for bands of (num_queries, num_keys), each from its own corner.

    None where no one mode shows all of them, or some row sees no key.
    """
    before, after = _Side(), _Side()
    for band, num_queries, num_keys in rectangles:
        if len(rows_with_keys(band, num_queries, num_keys)) < num_queries:
            return None
        corner = num_keys - num_queries
        band = band.clipped(num_queries, num_keys)
        before.add(None if band.lower is None else corner - band.lower, open_from=num_keys - 1)
        after.add(None if band.upper is None else band.upper - corner, open_from=num_queries - 1)
    if not (before.agrees and after.agrees):
        return None
    if not (before.tokens or after.tokens):
        return SparseArguments(0, _UNBOUNDED, _UNBOUNDED, has_empty_rows=False)
    if not before.tokens and after.tokens == {0}:
        return SparseArguments(3, _UNBOUNDED, _UNBOUNDED, has_empty_rows=False)
    return SparseArguments(4, before.value, after.value, has_empty_rows=False)


class _Side:
    """What several bands ask of pre_tokens, or of next_tokens."""

    def __init__(self) -> None:
        self.tokens: set[int] = set()
        self.open_from = 0  # a band that is open here needs as many

    def add(self, tokens: int | None, *, open_from: int) -> None:
        if tokens is None:
            self.open_from = max(self.open_from, open_from)
        else:
            self.tokens.add(tokens)

    @property
    def agrees(self) -> bool:
        """True if one number, not negative, does for all."""
        return len(self.tokens) < 2 and self.value >= self.open_from

    @property
    def value(self) -> int:
        return next(iter(self.tokens), self.open_from)


def rows_with_keys(band: Band, num_queries: int, num_keys: int) -> range:
    """The rows that see at least one key: one interval."""
    lower, upper = band.lower, band.upper
    if lower is not None and upper is not None and lower > upper:
        return range(0)
    start = 0 if upper is None else max(0, -upper)
    stop = num_queries if lower is None else min(num_queries, num_keys - lower)
    return range(start, max(start, stop))
