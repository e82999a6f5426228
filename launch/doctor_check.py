"""What the doctor's processes find out, as plain data to and from files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """One call of a local attention kernel beside the reference."""

    operator: str
    layout: str  # the order of axes in memory
    dtype: str
    shows: str  # which keys a row sees
    sizes: str
    error: float | None = None  # the largest, relative; None where there is none to measure
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCheck:
    """One collective among all processes, as this rank saw it."""

    name: str
    seconds: float
    num_bytes: int = 0  # sent by this rank to others
    fault: str | None = None


@dataclass(slots=True)
class RankReport:
    """What a rank has done so far: written before each stage, so that a hang can be placed."""

    rank: int
    stage: str | None = "the start of its process group"  # None: it is through
    kernel: tuple[KernelCheck, ...] = ()
    exchange: tuple[ExchangeCheck, ...] = ()
