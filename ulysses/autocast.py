"""What torch.autocast does to attention: query, key and value run in its lower precision.

That has to happen before the exchange. A kernel that is cast gives its rank's rows another dtype
than a rank without work gives its own, and float32 rows would travel where half the bytes do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ulysses.arguments import Arguments, Replicated
from ulysses.ends import Ends, Rows

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def in_autocast_dtype(arguments: Arguments) -> Arguments:
    """The arguments as autocast, where it is on, hands them to scaled_dot_product_attention.

    float64 stays, as it does there; masks, slopes and sinks stay as exact as they are.
    """
    device_type = arguments.query.device.type
    if not torch.amp.is_autocast_available(device_type):
        return arguments
    if not torch.is_autocast_enabled(device_type):
        return arguments
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in _CAST else tensor

    def cast_given(given: Tensor | Replicated) -> Tensor | Replicated:
        if isinstance(given, Replicated):
            return Replicated(cast(given.tensor))
        return cast(given)

    def cast_rows(rows: Rows | None) -> Rows | None:
        if rows is None:
            return None
        query, key, value = rows
        return cast(query), cast(key), cast(value)

    return replace(
        arguments,
        query=cast(arguments.query),
        key=cast_given(arguments.key),
        value=cast_given(arguments.value),
        ends=Ends(cast_rows(arguments.ends.prefix), cast_rows(arguments.ends.suffix)),
    )
