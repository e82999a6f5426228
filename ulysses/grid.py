"""Choosing a grid: the same choice on every rank, from what all ranks know.

Bytes decide among grids that are level and that the kernel runs without building a mask. Where no
grid is both, time decides: the largest tile's score elements, each dearer where a mask is read.
"""

from __future__ import annotations

import logging
from functools import lru_cache

from ulysses.backends.base import LocalAttention
from ulysses.call import Call
from ulysses.tiling import Grid, Tiling, grids

_LOG = logging.getLogger(__name__)

_LEVEL = 0.10  # work counts as level up to this imbalance
# Bottom-right causal SDPA on CPU took 58 ms with a mask, the same work as whole heads 37 ms.
_MASK_COST = 58 / 37


@lru_cache(maxsize=1024)
def plan(call: Call, backend: LocalAttention, grid: Grid | None) -> Tiling:
    """The tiling of a call on the given grid, or on the best one.

    Raises ValueError if the kernel can not run a tile of it, on whichever rank that tile is.
    """
    if grid is not None:
        tiling = call.tiled(grid)
        if reason := _refusal(call, backend, tiling):
            raise ValueError(reason)
        return tiling
    tilings = [call.tiled(candidate) for candidate in grids(len(call.query_lens))]
    refusals = [_refusal(call, backend, tiling) for tiling in tilings]
    able = [tiling for tiling, refusal in zip(tilings, refusals, strict=True) if refusal is None]
    if not able:
        raise ValueError(refusals[0])
    best = min(able, key=lambda tiling: _cost(call, backend, tiling))
    _LOG.info("grid (u=%d, r=%d) for %s", *best.grid, call)
    return best


def _refusal(call: Call, backend: LocalAttention, tiling: Tiling) -> str | None:
    for problem in call.problems(tiling):
        if reason := backend.unsupported(problem):
            return f"backend {backend.name!r} can not run grid {tuple(tiling.grid)}: {reason}"
    return None


def _cost(call: Call, backend: LocalAttention, tiling: Tiling) -> tuple[float, int]:
    """(time of the largest tile, 0 if level and free of masks; most bytes of any rank)."""
    masked = any(backend.materialises(problem) for problem in call.problems(tiling))
    time = max(tiling.work) * (_MASK_COST if masked else 1.0)
    if not masked and tiling.imbalance <= _LEVEL:
        time = 0.0
    ranks = range(len(tiling.tiles))
    return time, max(
        max(tiling.bytes_sent(i, call.row_bytes), tiling.bytes_received(i, call.row_bytes))
        for i in ranks
    )
