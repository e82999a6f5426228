"""The negative test of the Ascend operators: a head count that is not the tensor's is refused.

Told 20 heads where a tensor has 5, as happens when a count from before the exchange is kept, an
operator that names the head axis has to raise. One that went on would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ulysses.backends.ascend_operators import INFERENCE, TRAINING, load_operators
from ulysses.launch.doctor_check import KernelCheck

SHOWS = "wrong heads"
_TOLD, _HELD, _ROWS, _DIM = 20, 5, 32, 128
_SHAPES = {"BSND": (1, _ROWS, _HELD, _DIM), "BNSD": (1, _HELD, _ROWS, _DIM)}


def refusal_checks(device: torch.device) -> Iterator[KernelCheck]:
    """Both operators in both layouts."""
    load_operators()
    for layout, shape in _SHAPES.items():
        query, key, value = torch.zeros(3, *shape, dtype=torch.bfloat16, device=device)
        infer = partial(
            torch.ops.npu.npu_fused_infer_attention_score,
            query,
            key,
            value,
            num_heads=_TOLD,
            num_key_value_heads=_TOLD,
            input_layout=layout,
            scale=_DIM**-0.5,
        )
        train = partial(
            torch.ops.npu.npu_fusion_attention, query, key, value, _TOLD, layout, scale=_DIM**-0.5
        )
        for operator, call in ((INFERENCE, infer), (TRAINING, train)):
            yield KernelCheck(
                operator=operator,
                layout=layout,
                dtype="bfloat16",
                shows=SHOWS,
                sizes=f"{_TOLD} heads told, {_HELD} held",
                fault=_accepted(call),
            )


def _accepted(call: Callable[[], tuple[torch.Tensor, ...]]) -> str | None:
    try:
        call()[0].cpu()  # waits: with TASK_QUEUE_ENABLE=2 the refusal comes late
    except RuntimeError:
        return None
    return f"a head count of {_TOLD} is accepted for a tensor with {_HELD} heads"
