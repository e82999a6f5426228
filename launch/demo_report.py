"""What the demo asks of its processes, what they report, and how that reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ulysses.tiling import Grid, Tile

TOLERANCE = 1e-3  # of the loss, sharded against single

REQUEST, MODEL, REPORT = "request", "model", "report"  # files to and from the processes


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to score, and over how many ranks."""

    sp: int
    num_tokens: int
    grid: tuple[int, int] | None  # None: chosen
    device_type: str | None  # None: the first that this machine has
    reference: bool  # also score in one process


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One process's pass over its tokens."""

    loss_sum: float  # of the tokens that have a successor
    num_scored: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank of the sharded run did."""

    score: Score
    tile: Tile
    bytes_sent: int  # in all layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The sharded run, and the run in one process if that was asked for."""

    grid: Grid
    parts: tuple[Part, ...]
    single: Score | None
    shared_bytes: int  # of weights: on a CPU all processes map the same memory

    @property
    def loss(self) -> float:
        """Of the sharded run: each token counts once, on whichever rank it was."""
        return mean_loss([part.score for part in self.parts])

    @property
    def difference(self) -> float:
        """Between the losses of the two runs; 0 if there was one run."""
        return abs(self.loss - mean_loss([self.single])) if self.single else 0.0

    @property
    def agrees(self) -> bool:
        """False as well if a loss is not a number."""
        return self.difference <= TOLERANCE


def mean_loss(scores: Sequence[Score]) -> float:
    """The mean over all tokens scored, of processes that may have scored different numbers."""
    return sum(s.loss_sum for s in scores) / sum(s.num_scored for s in scores)


def progress_bars(*, shown: bool = True) -> Progress:
    """Bars on stderr, one for each task, if they are to be seen."""
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=not shown)


def show(report: Report, console: Console) -> None:
    """Prints each rank's tile and cost, then the two runs side by side and their difference."""
    console.print(_tiles(report))
    console.print(_runs(report))
    if report.shared_bytes:
        console.print(
            "Peak memory is of a whole process, with the "
            f"{_mebibytes(report.shared_bytes)} MiB of weights that all of them share."
        )
    if report.single:
        console.print(
            f"The losses differ by {report.difference:.1e}: "
            + ("equal" if report.agrees else "NOT EQUAL")
            + f" to the tolerance of {TOLERANCE:.0e}."
        )


def _tiles(report: Report) -> Table:
    u, r = report.grid
    table = Table(title=f"grid ({u}, {r}): {u} head ranges x {r} row blocks")
    names = ("rank", "heads", "queries", "kv heads", "seconds", "peak MiB", "sent MiB")
    for name in names:
        table.add_column(name, justify="right")
    for rank, part in enumerate(report.parts):
        tile, score = part.tile, part.score
        cells = [_span(tile.heads), _span(tile.queries), _span(tile.kv_heads)]
        cells += [f"{score.seconds:.2f}", _mebibytes(score.peak_bytes), _mebibytes(part.bytes_sent)]
        table.add_row(str(rank), *cells)
    return table


def _runs(report: Report) -> Table:
    table = Table(title=f"{sum(p.score.num_scored for p in report.parts):,} tokens predicted")
    for name in ("", "loss", "perplexity", "seconds", "peak MiB"):
        table.add_column(name, justify="right")
    scores = [part.score for part in report.parts]
    runs = [(f"{len(scores)} rank{'s' * (len(scores) > 1)}", scores)]
    if report.single:
        runs.append(("one process", [report.single]))
    for name, some in runs:
        loss, seconds = mean_loss(some), max(s.seconds for s in some)
        cells = [f"{loss:.6f}", f"{exp(loss):.4f}", f"{seconds:.2f}"]
        table.add_row(name, *cells, _mebibytes(max(s.peak_bytes for s in some)))
    return table


def _span(numbers: range) -> str:
    """`0-4` with both ends meant, as people count."""
    if len(numbers) < 2:
        return str(numbers[0]) if numbers else "none"
    return f"{numbers[0]}-{numbers[-1]}"


def _mebibytes(count: int) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes:.1f}" if mebibytes < 100 else f"{mebibytes:,.0f}"
