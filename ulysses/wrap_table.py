"""What was found in a module, to read and to print."""

from __future__ import annotations

from dataclasses import astuple, dataclass

_TITLES = ("module", "class", "route", "attention", "heads", "kv heads", "mask")


@dataclass(frozen=True, slots=True)
class Row:
    """A part that attends. None is what only a forward will show."""

    name: str
    kind: str
    route: str
    policy: str
    num_heads: int | None
    num_kv_heads: int | None
    mask: str | None


@dataclass(frozen=True, slots=True)
class Table:
    """All parts of a module that attend; `str()` is a table."""

    module: str
    rows: tuple[Row, ...]
    wrapped: bool

    def __str__(self) -> str:
        cells: list[tuple[str, ...]] = [_TITLES]
        for row in self.rows:
            cells.append(tuple("?" if cell is None else str(cell) for cell in astuple(row)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [f"{self.module}, {'wrapped' if self.wrapped else 'not wrapped'}"]
        for line in cells:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)
