"""Classes of torch that are slow to import: if nobody has, nothing is an instance of them.

torch.distributed.tensor and torch.nn.attention.bias load sympy and the compiler, which takes as
long as torch itself, in each process that is launched.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_causal_bias(given: object) -> bool:
    """True for a causal bias of torch.nn.attention.bias, a tensor that has no numbers to read."""
    return isinstance(given, _loaded("torch.nn.attention.bias", "CausalBias"))


def is_dtensor(given: object) -> bool:
    """True for a DTensor of torch.distributed.tensor."""
    return isinstance(given, _loaded("torch.distributed.tensor", "DTensor"))


def local_part(tensor: Any) -> Tensor:
    """What this rank holds: of a DTensor its part, of another all."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def _loaded(module: str, name: str) -> Any:
    """The class for isinstance, or that of no object."""
    return getattr(sys.modules.get(module), name, ())
