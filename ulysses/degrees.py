"""The three degrees: dp * sp * tp is the number of ranks.

Rank r of the world stands at (dp_rank, sp_rank, tp_rank), tp innermost:

    r = (dp_rank * sp + sp_rank) * tp + tp_rank

tp ranks hold heads of the same tokens and talk most, so they are neighbours; sp ranks share one
sequence; dp ranks hold different sequences. Plain integers: no torch, no process group.
"""

from collections.abc import Iterable
from dataclasses import dataclass

AXES = ("dp", "sp", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How many ranks stand along each axis."""

    dp: int
    sp: int
    tp: int

    @property
    def num_ranks(self) -> int:
        return self.dp * self.sp * self.tp

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis`, groups in the order of their first rank."""
        after = AXES[AXES.index(axis) + 1 :]
        size, step = getattr(self, axis), 1
        for inner in after:
            step *= getattr(self, inner)
        firsts = (r for r in range(self.num_ranks) if r // step % size == 0)
        return [list(range(first, first + size * step, step)) for first in firsts]


def check_count(name: str, value: object, *, or_else: str = "") -> int:
    """`value`, if it is a whole number of at least 1.

    Raises TypeError (a float, a string, True) or ValueError (0, -1) that begins with `name` and
    tells what to give; `or_else` ends that sentence.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r} is a {kind}: give a whole number of at least 1{or_else}")
    if value < 1:
        raise ValueError(f"{name}={value}: give a whole number of at least 1{or_else}")
    return value


def fit(num_ranks: int, *, sp: int, tp: int, dp: int | None = None) -> Degrees:
    """The degrees of a world of `num_ranks`; `dp=None` takes what sp and tp leave.

    Raises ValueError with the product, the world and the legal choices when they don't fit.
    """
    for name, value in (("sp", sp), ("tp", tp), ("dp", 1 if dp is None else dp)):
        check_count(name, value)
    if num_ranks % (sp * tp):
        raise ValueError(
            f"tp*sp={tp * sp} does not divide world {num_ranks} (tp={tp}, sp={sp}): "
            + "; or ".join(_ways_out(num_ranks, sp=sp, tp=tp))
        )
    left = num_ranks // (sp * tp)
    if dp is not None and dp != left:
        raise ValueError(
            f"dp*sp*tp={dp * sp * tp} is not world {num_ranks} (dp={dp}, sp={sp}, tp={tp}): "
            f"let dp be {left}; or start {dp * sp * tp} ranks"
        )
    return Degrees(dp=left, sp=sp, tp=tp)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(values: Iterable[int]) -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _ways_out(num_ranks: int, *, sp: int, tp: int) -> list[str]:
    """What else sp, tp or the number of ranks could be."""
    ways = []
    if num_ranks % tp == 0:
        ways.append(f"with tp={tp}, sp can be {listed(divisors(num_ranks // tp))}")
    if num_ranks % sp == 0:
        ways.append(f"with sp={sp}, tp can be {listed(divisors(num_ranks // sp))}")
    return [*ways, f"start {sp * tp} ranks or a multiple of that"]
