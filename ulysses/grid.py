"""Choosing a grid: the same choice on every rank, from what all ranks know.

Bytes decide among the grids whose busiest rank takes hardly longer than that of the best. Its time
is its tile's score elements, each dearer in a kernel call that builds a mask. So a window, masked
in blocks on every grid, is a halo exchange; causal attention, which whole heads run without a mask,
stays with whole heads.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import lru_cache
from typing import Literal

from ulysses.backends.base import LocalAttention, Problem
from ulysses.call import Call
from ulysses.tiling import Grid, Tiling, grids

_LOG = logging.getLogger(__name__)

_HARDLY = 0.10
# Bottom-right causal SDPA on CPU took 58 ms with a mask, the same work as whole heads 37 ms.
_MASK_COST = 58 / 37


@lru_cache(maxsize=1024)
def plan(call: Call, backend: LocalAttention, grid: Grid | None) -> Tiling:
    """The tiling of a call on the given grid, or on the best one.

    Raises ValueError if the kernel can not run a tile of it, on whichever rank that tile is.
    """
    if grid is not None:
        tiling = call.tiled(grid)
        if reason := _refusal(backend, tiling, _problems(call, tiling)):
            raise ValueError(reason)
        return tiling
    refusals, times = [], []
    for candidate in grids(len(call.query_lens)):
        tiling = call.tiled(candidate)
        problems = _problems(call, tiling)
        if reason := _refusal(backend, tiling, problems):
            refusals.append(reason)
        else:
            times.append((_time(backend, problems), tiling))
    if not times:
        raise ValueError(refusals[0])
    longest = (1 + _HARDLY) * min(time for time, _ in times)
    quick = [tiling for time, tiling in times if time <= longest]
    best = min(quick, key=lambda tiling: _bytes(call, tiling))
    _LOG.info("grid (u=%d, r=%d) for %s", *best.grid, call)
    return best


def _problems(call: Call, tiling: Tiling) -> list[Counter[Problem]]:
    """The kernel calls of each different tile."""
    different = {(tile.queries, tile.runs): tile for tile in tiling.tiles}
    return [call.problems(tile) for tile in different.values()]


def _refusal(backend: LocalAttention, tiling: Tiling, tiles: list[Counter[Problem]]) -> str | None:
    for problem in (problem for problems in tiles for problem in problems):
        if reason := backend.unsupported(problem):
            return f"backend {backend.name!r} can not run grid {tuple(tiling.grid)}: {reason}"
    return None


def _time(backend: LocalAttention, tiles: list[Counter[Problem]]) -> float:
    """Score elements of the busiest rank, dearer ones counted as more."""
    return max(
        sum(times * _elements(problem, backend) for problem, times in problems.items())
        for problems in tiles
    )


def _elements(problem: Problem, backend: LocalAttention) -> float:
    area = problem.band.area(range(problem.num_queries), problem.num_keys)
    cost = _MASK_COST if backend.materialises(problem) else 1.0
    return problem.num_heads * area * cost


def _bytes(call: Call, tiling: Tiling) -> int:
    """The most that any rank sends or receives."""
    return max(
        max(tiling.bytes_sent(i, call.row_bytes), tiling.bytes_received(i, call.row_bytes))
        for i in range(len(tiling.tiles))
    )


def checked_grid(grid: tuple[int, int] | Literal["auto"], num_ranks: int) -> Grid | None:
    """The grid that was asked for, or None for "auto"; raises ValueError for what is none."""
    if isinstance(grid, str):
        if grid != "auto":
            raise ValueError(f'grid={grid!r}: pass "auto" or a pair (u, r)')
        return None
    choices = ", ".join(str(tuple(choice)) for choice in grids(num_ranks))
    if tuple(grid) not in grids(num_ranks):
        raise ValueError(
            f"grid={tuple(grid)} over {num_ranks} ranks: u * r must be the number of ranks; "
            f'pass "auto" or one of {choices}'
        )
    return Grid(*grid)
