"""Small inputs for tests of the operators and of the kernel on them."""

import torch
from torch.overrides import TorchFunctionMode

from ulysses.backends import Band, Problem
from ulysses.backends.ascend import AscendAttention

FULL = Band()
# What sparse modes 2, 3 and 4 read: True hides.
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def tensors(batch=1, queries=6, keys=6, heads=4, kv_heads=None, dim=16, dtype=torch.bfloat16):
    """Query, key and value [B, S, H, D], the same on every call."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, queries, heads, dim), *[(batch, keys, kv_heads or heads, dim)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def problem(**changes) -> Problem:
    options = {
        "batch": 1,
        "num_queries": 8,
        "num_keys": 8,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "value_dim": 16,
        "dtype": torch.bfloat16,
        "device_type": "cpu",
        "requires_grad": False,
    }
    return Problem(**options | changes)


class Recorder(TorchFunctionMode):
    """Notes each call of the operators: (name, arguments by name)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "npu":
            names = (argument.name for argument in func._schema.arguments)
            bound = dict(zip(names, args, strict=False)) | kwargs
            self.calls.append((func._schema.name.partition("::")[2], bound))
        return func(*args, **kwargs)


def attend(query, key, value, band=FULL, **options):
    """One call of a fresh kernel: (output, the operator's name, its arguments)."""
    with Recorder() as recorder:
        out = AscendAttention()(query, key, value, band=band, scale=0.25, **options)
    ((name, arguments),) = recorder.calls
    return out, name, arguments
