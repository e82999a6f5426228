"""Libraries whose models have a way of their own to take attention over, if they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

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
