"""What `ulysses.verify` found, and how that reads."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was compared: the worst over the ranks."""

    what: str
    largest: float  # magnitude in one process
    difference: float  # largest, of any rank; nan where something is not a number
    allowed: float
    rank: int  # where it was

    @property
    def is_gradient(self) -> bool:
        return self.what.startswith("gradient of ")

    @property
    def agrees(self) -> bool:
        """False as well for nan."""
        return self.difference <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which rows of an output change with one token of the input."""

    what: str
    alone: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        return self.alone == self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A module in one process against the same module over ranks."""

    module: str
    lens: tuple[int, ...]  # each rank's tokens
    token: int  # the one that was changed
    attention: str  # what attends, and how
    rows: tuple[Row, ...]
    sights: tuple[Sight, ...]

    @property
    def wrong(self) -> list[str]:
        """What differs."""
        compared: list[Row | Sight] = [*self.rows, *self.sights]
        return [item.what for item in compared if not item.agrees]

    @property
    def agrees(self) -> bool:
        """Whether it is the same function, and something of it was compared."""
        return bool(self.rows) and not self.wrong

    def __str__(self) -> str:
        text = io.StringIO()
        show(self, Console(file=text, width=120))
        return text.getvalue()


def show(report: Report, console: Console, *, every: bool = False) -> None:
    """Prints the tables, and a last line that says whether it is the same function.

    Of the gradients that agree, all but the worst are counted only, unless `every` is true.
    """
    console.print(report.attention, markup=False, highlight=False)
    console.print(_compared(report, every))
    if report.sights:
        console.print(_seen(report))
    wrong = report.wrong
    ranks = f"over {len(report.lens)} rank{'s' * (len(report.lens) > 1)}"
    if report.agrees:
        console.print(f"{report.module} {ranks} is the same function as in one process.")
    else:
        told = (
            f"{', '.join(wrong[:5])}{', ...' * (len(wrong) > 5)}" if wrong else "nothing compared"
        )
        console.print(f"{report.module} {ranks} DIFFERS from one process: {told}.", markup=False)


def _compared(report: Report, every: bool) -> Table:
    lens = ", ".join(map(str, report.lens))
    table = Table(title=f"{report.module}: one process against ranks with {lens} tokens")
    table.add_column("compared")
    for name in ("largest", "difference", "allowed", "on rank"):
        table.add_column(name, justify="right")
    table.add_column("")
    plain = [row for row in report.rows if row.agrees and row.is_gradient]
    worst = max(plain, key=lambda row: row.difference / (row.allowed or 1.0), default=None)
    for row in report.rows:
        if row in plain and row is not worst and not every:
            continue
        cells = (f"{number:.1e}" for number in (row.largest, row.difference, row.allowed))
        table.add_row(row.what, *cells, str(row.rank), _verdict(row.agrees))
    if len(plain) > 1 and not every:
        table.add_row(f"{len(plain) - 1} more gradients, all closer", *[""] * 4, _verdict(True))
    return table


def _seen(report: Report) -> Table:
    table = Table(title=f"Who sees token {report.token} change")
    for name in ("output", "rows in one process", "rows over ranks", ""):
        table.add_column(name)
    for sight in report.sights:
        table.add_row(sight.what, spans(sight.alone), spans(sight.ranks), _verdict(sight.agrees))
    return table


def _verdict(agrees: bool) -> str:
    return "[green]equal[/]" if agrees else "[bold red]DIFFERS[/]"


def spans(numbers: Iterable[int]) -> str:
    """`0-3, 7` of rising numbers; both ends are meant."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = (str(first) if first == last else f"{first}-{last}" for first, last in found)
    return ", ".join(texts) or "none"
