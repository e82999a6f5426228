"""What torch.compile leaves alone, at no cost to who does not compile.

torch.compiler.disable loads the compiler, which takes as long to import as torch itself. Here that
is left until something else has loaded it: before that, nothing can be compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_eager(reason: str) -> Callable[[_Function], _Function]:
    """A decorator as torch.compiler.disable(reason=reason) is one, without its import."""

    def decorate(function: _Function) -> _Function:
        disabled: Any = None

        @functools.wraps(function)
        def eager(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if disabled is None:
                if torch.compiler.is_dynamo_compiling():
                    torch._dynamo.graph_break(msg=reason)  # told to who asks for one graph
                disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*args, **kwargs)

        return eager  # type: ignore[return-value]

    return decorate
