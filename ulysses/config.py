"""What a run is asked to be: typed, frozen, and checked before any process or group exists.

    parallel:                     # dp * cfg * sp * tp ranks, tp innermost
      sp: 4                       # ranks that share one sequence, or auto
      tp: 2                       # ranks that share one layer's weights and heads, or auto
      dp: 1                       # ranks with sequences of their own, or auto (what is left)
      cfg: 1                      # 2: ranks for each branch of a guided diffusion step
      kv_replication: false       # true: tp may exceed num_kv_heads, each then on several tp ranks
    attention:
      backend: auto               # the local kernel, by name
      grid: auto                  # or [u, r], u * r = sp: u head ranges x r row blocks
    model:
      num_heads: 40               # of the whole model, before tp
      num_kv_heads: 40            # left out: as many as num_heads
      head_dim: 128
      value_dim: 128              # left out: head_dim
      num_layers: 40
      dtype: bfloat16
      seq_len: 25200              # tokens of one sequence, before sp
      batch: 1                    # sequences in one dp rank's step
      is_causal: false

What `auto` means, once the number of ranks is known: one axis takes what the others leave, and any
other `auto` is 1. It is sp if that is auto, else dp (auto unless given), else tp. sp may be any
number: where it does not divide the heads that tp leaves, a grid splits rows as well or head ranges
differ by one. tp has to divide num_heads, and num_kv_heads unless kv_replication says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path
from typing import Literal

from ulysses import strict_yaml
from ulysses.degrees import GUIDED_AXES, Degrees, check_cfg, check_count, divisors, fit, listed

Degree = int | Literal["auto"]
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The degrees; `auto` is settled by `Config.resolve`."""

    sp: Degree = 1
    tp: Degree = 1
    dp: Degree = "auto"
    cfg: int = 1
    kv_replication: bool = False

    def __post_init__(self) -> None:
        for name in ("sp", "tp", "dp"):
            if (value := getattr(self, name)) != "auto":
                check_count(f"parallel.{name}", value, or_else=", or auto")
        check_cfg("parallel.cfg", self.cfg)
        _check_bool("parallel.kv_replication", self.kv_replication)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Which local kernel runs, on which cut of heads and rows."""

    backend: str = "auto"
    grid: tuple[int, int] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str):
            raise TypeError(f"attention.backend={self.backend!r}: give a backend's name, or auto")
        if self.grid == "auto":
            return
        if not isinstance(self.grid, tuple) or len(self.grid) != 2:
            raise TypeError(f"attention.grid={self.grid!r}: give two numbers, [u, r], or auto")
        for size in self.grid:
            check_count("attention.grid: a size", size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The attention layers of the whole model, before tp and sp."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_layers: int = 1
    dtype: str = "bfloat16"
    seq_len: int | None = None
    batch: int = 1
    is_causal: bool = False

    def __post_init__(self) -> None:
        counts = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "num_layers", "batch")
        for name in counts:
            check_count(f"model.{name}", getattr(self, name))
        if self.seq_len is not None:
            check_count("model.seq_len", self.seq_len)
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r}: give one of {', '.join(DTYPES)}")
        _check_bool("model.is_causal", self.is_causal)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: query heads must "
                f"be a multiple of key/value heads; num_kv_heads can be "
                f"{listed(divisors(self.num_heads))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run. `model` is None where the script brings its own."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: ModelConfig | None = None

    def __post_init__(self) -> None:
        self._check(sp=self.parallel.sp, tp=self.parallel.tp)

    @classmethod
    def from_mapping(cls, data: object) -> Config:
        """A configuration from nested plain data, as YAML gives it; null means not given.

        Raises ValueError or TypeError naming the key, for an unknown one with the nearest known.
        """
        sections = strict_yaml.known(cls, data, "the configuration")
        model = sections.get("model")
        if isinstance(model, Mapping):  # these two are optional in a file
            model = dict(model)
            for name, otherwise in (("num_kv_heads", "num_heads"), ("value_dim", "head_dim")):
                if model.get(name) is None:
                    model[name] = model.get(otherwise)
        return cls(
            parallel=strict_yaml.build(ParallelConfig, sections.get("parallel", {}), "parallel"),
            attention=strict_yaml.build(
                AttentionConfig, sections.get("attention", {}), "attention"
            ),
            model=None if model is None else strict_yaml.build(ModelConfig, model, "model"),
        )

    def resolve(self, num_ranks: int) -> Degrees:
        """The degrees in a world of `num_ranks`, with every `auto` settled.

        Raises ValueError when the degrees or the model's heads don't fit, with what would.
        """
        check_count("num_ranks", num_ranks)
        given = {axis: getattr(self.parallel, axis) for axis in GUIDED_AXES}
        counts = {name: 1 if value == "auto" else value for name, value in given.items()}
        rest = self.takes_the_rest()
        if rest in ("sp", "tp"):
            others = prod(counts.values())
            if num_ranks % others:
                axes = Degrees(**counts).axes
                names = "*".join(axis for axis in axes if axis != rest)
                raise ValueError(
                    f"{names}={others} does not divide world {num_ranks}, so nothing whole is left "
                    f"for {rest}=auto: start {others} ranks or a multiple of that, or lower one"
                )
            counts[rest] = num_ranks // others
        dp = None if rest == "dp" else counts["dp"]
        degrees = fit(num_ranks, sp=counts["sp"], tp=counts["tp"], dp=dp, cfg=counts["cfg"])
        self._check(sp=degrees.sp, tp=degrees.tp)
        return degrees

    def takes_the_rest(self) -> Literal["sp", "dp", "tp"] | None:
        """The axis that takes what the others leave of the ranks."""
        axes: tuple[Literal["sp", "dp", "tp"], ...] = ("sp", "dp", "tp")
        return next((axis for axis in axes if getattr(self.parallel, axis) == "auto"), None)

    def explain(self, degrees: Degrees) -> str:
        """Why `degrees`, and what they make of the model's heads, in one line."""
        sizes = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in degrees.axes)
        said = f"{degrees.num_ranks} ranks = {sizes}"
        if rest := self.takes_the_rest():
            said += f"; {rest} takes what the others leave"
        if self.model is None:
            return said
        heads = self.model.num_heads // degrees.tp
        level = gcd(heads, degrees.sp)
        said += f"; {heads} of {self.model.num_heads} query heads on a tp rank"
        if level == degrees.sp:
            return f"{said}, {heads // degrees.sp} on each of its sp ranks"
        return f"{said}: sp does not divide them, grid [{level}, {degrees.sp // level}] is level"

    def _check(self, *, sp: Degree, tp: Degree) -> None:
        """What needs more than one section, as far as the degrees are known."""
        if self.model is not None and tp != "auto":
            _check_heads(self.model, tp, self.parallel.kv_replication)
        grid = self.attention.grid
        if grid != "auto" and sp != "auto" and grid[0] * grid[1] != sp:
            legal = ", ".join(f"[{u}, {sp // u}]" for u in divisors(sp))
            raise ValueError(
                f"attention.grid={list(grid)}: u*r={grid[0] * grid[1]} must be sp={sp}; "
                f"give {legal} or auto"
            )


def load_config(path: str | Path) -> Config:
    """The configuration in a YAML file.

    Raises FileNotFoundError, ValueError or TypeError; the latter two begin with the path.
    """
    try:
        data = strict_yaml.read(path)
        return Config.from_mapping({} if data is None else data)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give true or false")


def _check_heads(model: ModelConfig, tp: int, kv_replication: bool) -> None:
    """Whether tp ranks can share the heads: whole query heads, and key/value heads whole or copied.

    With copies each key/value head stands on tp / num_kv_heads ranks, whose query heads all use it.
    """
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads

    def divides_kv(tp: int) -> bool:
        return num_kv_heads % tp == 0 or (kv_replication and tp % num_kv_heads == 0)

    legal = [size for size in divisors(num_heads) if divides_kv(size)]
    if tp in legal:
        return
    if num_heads % tp:
        wrong = f"num_heads={num_heads} is not a multiple of tp={tp}"
    else:
        wrong = f"num_kv_heads={num_kv_heads} is not a multiple of tp={tp}"
    way_out = f"tp can be {listed(legal)}"
    if num_heads % tp == 0 and tp % num_kv_heads == 0:
        copies = tp // num_kv_heads
        way_out += f"; or kv_replication: true keeps each key/value head on {copies} tp ranks"
    raise ValueError(f"{wrong}: {way_out}")
