"""Libraries whose models have a way of their own to take attention over, if they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ulysses.sharding_plan import ShardingPlan
from ulysses.wrap_scope import Wrapping


class Family(Protocol):
    """What an integration is: a module of `ulysses.integrations` with these functions."""

    def take_over(self, module: nn.Module, wrapping: Wrapping) -> None:
        """Make the library call ulysses for this module's attention."""
        ...

    def give_back(self, module: nn.Module) -> None:
        """Undo it."""
        ...

    def routed(
        self, part: nn.Module, forward: Callable[..., Any], wrapping: Wrapping
    ) -> Callable[..., Any]:
        """A part's forward (the module comes first) with what it needs around it, or the same."""
        ...

    def shards_inputs(self, module: nn.Module) -> bool:
        """Whether `parallelize` may shard this model's inputs, rather than its layers."""
        ...

    def continues(self, inputs: Any) -> bool:
        """Whether a forward's tokens come behind a cache, so that every rank is given all."""
        ...

    def take_rows(
        self, given: dict[str, Any], lens: tuple[int, ...], rank: int
    ) -> tuple[int, ...] | None:
        """Every rank's number of rows of logits, if `given` asks for some of the whole only.

        `given` then asks for this rank's, which are the last of those that are returned.
        """
        ...

    def take_targets(self, module: nn.Module, given: dict[str, Any]) -> Tensor | None:
        """Whole targets [B, S] of a token loss, from arguments out of which labels are taken."""
        ...


def families() -> list[Family]:
    """Those of the libraries that this process has loaded: none is loaded for it."""
    found: list[Family] = []
    if "transformers.modeling_utils" in sys.modules:
        from ulysses.integrations import huggingface

        found.append(huggingface)
    return found


def plan_of(module: nn.Module) -> ShardingPlan | None:
    """What a model of diffusers says of itself that is to be sharded, if that library is loaded."""
    if "diffusers.models.modeling_utils" not in sys.modules:
        return None
    from ulysses.integrations import diffusers

    return diffusers.sharding_plan(module)
