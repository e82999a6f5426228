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


def rows_with_keys(band: Band, num_queries: int, num_keys: int) -> range:
    """The rows that see at least one key: one interval."""
    lower, upper = band.lower, band.upper
    if lower is not None and upper is not None and lower > upper:
        return range(0)
    start = 0 if upper is None else max(0, -upper)
    stop = num_queries if lower is None else min(num_queries, num_keys - lower)
    return range(start, max(start, stop))
