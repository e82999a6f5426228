"""The degrees: dp * cfg * sp * tp is the number of ranks.

Rank r of the world stands at (dp_rank, cfg_rank, sp_rank, tp_rank), tp innermost:

    r = ((dp_rank * cfg + cfg_rank) * sp + sp_rank) * tp + tp_rank

tp ranks hold heads of the same tokens and talk most, so they are neighbours; sp ranks share one
sequence; cfg ranks have the two branches of a guided diffusion step; dp ranks hold different
sequences. Plain integers: no torch, no process group.
"""

from collections.abc import Iterable
from dataclasses import dataclass

AXES = ("dp", "sp", "tp")
GUIDED_AXES = ("dp", "cfg", "sp", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How many ranks stand along each axis."""

    dp: int
    cfg: int = 1
    sp: int
    tp: int

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cfg * self.sp * self.tp

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh, outermost first: cfg is one only where it has two ranks."""
        return AXES if self.cfg == 1 else GUIDED_AXES

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along `axis`, groups in the order of their first rank."""
        after = GUIDED_AXES[GUIDED_AXES.index(axis) + 1 :]
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


def check_cfg(name: str, value: object) -> int:
    """`value`, if it is 1 or 2; raises as `check_count` does."""
    if (count := check_count(name, value)) > 2:
        raise ValueError(f"{name}={count}: guidance has two branches, give 1 or 2")
    return count


def fit(num_ranks: int, *, sp: int, tp: int, dp: int | None = None, cfg: int = 1) -> Degrees:
    """The degrees of a world of `num_ranks`; `dp=None` takes what the others leave.

    Raises ValueError with the product, the world and the legal choices when they don't fit.
    """
    for name, value in (("sp", sp), ("tp", tp), ("dp", 1 if dp is None else dp)):
        check_count(name, value)
    if num_ranks % check_cfg("cfg", cfg):
        raise ValueError(f"cfg={cfg} does not divide world {num_ranks}: start an even number")
    per_branch = num_ranks // cfg
    if per_branch % (sp * tp):
        raise ValueError(
            f"tp*sp={tp * sp} does not divide world {_said(num_ranks, cfg)} (tp={tp}, sp={sp}): "
            + "; or ".join(_ways_out(per_branch, sp=sp, tp=tp, cfg=cfg))
        )
    left = per_branch // (sp * tp)
    if dp is not None and dp != left:
        raise ValueError(
            f"dp*sp*tp={dp * sp * tp} is not world {_said(num_ranks, cfg)} (dp={dp}, sp={sp}, "
            f"tp={tp}): let dp be {left}; or start {dp * sp * tp * cfg} ranks"
        )
    return Degrees(dp=left, cfg=cfg, sp=sp, tp=tp)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def listed(values: Iterable[int]) -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _said(num_ranks: int, cfg: int) -> str:
    return str(num_ranks) if cfg == 1 else f"{num_ranks} / cfg {cfg}"


def _ways_out(num_ranks: int, *, sp: int, tp: int, cfg: int) -> list[str]:
    """What else sp, tp or the number of ranks, here of one branch, could be."""
    ways = []
    if num_ranks % tp == 0:
        ways.append(f"with tp={tp}, sp can be {listed(divisors(num_ranks // tp))}")
    if num_ranks % sp == 0:
        ways.append(f"with sp={sp}, tp can be {listed(divisors(num_ranks // sp))}")
    return [*ways, f"start {sp * tp * cfg} ranks or a multiple of that"]
