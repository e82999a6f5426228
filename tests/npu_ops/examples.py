"""Small inputs for tests of the operators and of the kernel on them."""

import torch

# What sparse modes 2, 3 and 4 read: True hides.
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def tensors(batch=1, queries=6, keys=6, heads=4, kv_heads=None, dim=16, dtype=torch.bfloat16):
    """Query, key and value [B, S, H, D], the same on every call."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((batch, queries, heads, dim), *[(batch, keys, kv_heads or heads, dim)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
