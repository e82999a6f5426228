"""What the Ascend operators take, and which of the two runs a problem.

The limits are those of CANN's documents and tiling code, Nov 2025 to Aug 2026.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ulysses.backends.ascend_layout import MAX_HEADS
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.base import Problem

_MAX_HEAD_DIM = 512
_MAX_BATCH = 65536
_MAX_LENGTH = {INFERENCE: 20_971_520, TRAINING: 1_048_576}
_HALVES = (torch.float16, torch.bfloat16)
# Beyond these the training operator runs a forward pass, too.
_MAX_INFERENCE_GROUP = 64
_MAX_KEYS_OF_ONE_QUERY = 262_144


def choose_operator(problem: Problem) -> str:
    """The inference operator where it gives the answer asked for, else the training operator."""
    inference = (
        not problem.requires_grad
        and problem.dropout_p == 0.0
        and problem.dtype in _HALVES
        and not _has_mask_per_head(problem)
        and not needs_float32(problem)
        and problem.num_heads <= _MAX_INFERENCE_GROUP * problem.num_kv_heads
        and (problem.num_queries > 1 or problem.num_keys <= _MAX_KEYS_OF_ONE_QUERY)
    )
    return INFERENCE if inference else TRAINING


def needs_float32(problem: Problem) -> bool:
    """True if a bias would lose digits: both operators take one in the dtype of the tensors only.

    In bfloat16 a bias of -100 is off by up to a quarter. A mask of the tensors' own dtype is added
    as it is by the inference operator; the training operator wants it divided by the scale.
    """
    if problem.dtype not in _HALVES:
        return False
    mask_dtype = problem.mask_dtype
    has_float_mask = mask_dtype is not None and mask_dtype != torch.bool
    if not (has_float_mask or problem.alibi):
        return False
    as_it_is = not problem.alibi and mask_dtype == problem.dtype
    trains = problem.requires_grad or problem.dropout_p > 0.0 or _has_mask_per_head(problem)
    return trains or not as_it_is


def refusals(problem: Problem, operator: torch._ops.OpOverload) -> Iterator[str]:
    """Every limit of the operator that the problem would break, as a user can act on it."""
    name = choose_operator(problem)
    key = _dispatch_key(problem.device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        yield (
            f"device type {problem.device_type!r}: {name} has no kernel for it; move the "
            "tensors to 'npu', or pass backend='sdpa'"
        )
    if problem.dtype not in (*_HALVES, torch.float32):
        yield (
            f"dtype={problem.dtype}: the Ascend operators take torch.float16, torch.bfloat16 "
            "and torch.float32; cast to one of these, or use backend='sdpa' on CPU"
        )
    if problem.num_heads > MAX_HEADS:
        yield (
            f"num_heads={problem.num_heads} on one rank: {name} takes at most {MAX_HEADS}; "
            "spread the heads over more ranks with a larger sp or tp"
        )
    if max(problem.head_dim, problem.value_dim) > _MAX_HEAD_DIM:
        yield (
            f"head_dim={problem.head_dim}, value_dim={problem.value_dim}: {name} takes at most "
            f"{_MAX_HEAD_DIM}; split the heads, or use backend='sdpa' on CPU"
        )
    if problem.batch > _MAX_BATCH:
        yield (
            f"batch={problem.batch}: {name} takes at most {_MAX_BATCH}; split the batch over "
            "several calls"
        )
    length = max(problem.num_queries, problem.num_keys)
    if length > _MAX_LENGTH[name]:
        yield (
            f"num_queries={problem.num_queries}, num_keys={problem.num_keys}: {name} takes at "
            f"most {_MAX_LENGTH[name]} rows; split the sequence over several calls"
        )
    if not 0.0 <= problem.dropout_p < 1.0:
        yield f"dropout_p={problem.dropout_p}: {name} takes 0 <= dropout_p < 1"


def _has_mask_per_head(problem: Problem) -> bool:
    """The inference operator takes such a mask and reads the first head's for all (its tiling)."""
    return problem.mask_shape is not None and problem.mask_shape[1] > 1


def _dispatch_key(device_type: str) -> str:
    """torch_npu is what the PrivateUse1 backend is called once it is imported."""
    return "PrivateUse1" if device_type == "npu" else torch._C._dispatch_key_for_device(device_type)
