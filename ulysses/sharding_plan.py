"""A model's own plan of what to shard: which tensors of which parts are cut, and which gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

MAIN = "hidden_states"  # the argument by this name is the sequence that is cut and gathered again


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor's sequence dim. A tensor of other than `ndim` dims is left whole."""

    dim: int
    ndim: int | None = None


@dataclass(slots=True)
class PartPlan:
    """What is done around one part of a model; inputs by name, outputs by place."""

    inputs: dict[str, tuple[Cut | None, ...]] = field(default_factory=dict)
    outputs: dict[int, Cut] = field(default_factory=dict)
    gathered: tuple[Cut | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """By name of the part, "" for the model itself.

    `whole_keys` are the names of attention whose keys are whole on every rank. `check` raises
    ValueError if a forward of the model with these arguments can't be right on a shard.
    """

    parts: Mapping[str, PartPlan]
    whole_keys: Collection[str]
    check: Callable[[nn.Module, Mapping[str, Any]], None]
