"""Scoring tokens with a language model: the loss, the time and the memory that it takes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ulysses.launch.demo_report import Score

IGNORE_INDEX = -100  # cross_entropy's and shift_labels' own
_CLEAR = Path("/proc/self/clear_refs")  # Linux: 5 forgets the peak of resident memory
CHUNK = 128  # rows of logits at once: 24 MiB with 49,152 words in float32


@torch.inference_mode()
def score(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    positions: Tensor,
    on_layer: Callable[[], object],
) -> Score:
    """Losses of [1, l] tokens against their successors in `labels`; those of -100 don't count.

    `model` is a causal language model of transformers; `on_layer` is called after each layer.
    """

    def after_layer(*_: object) -> None:
        on_layer()

    _reset_peak(input_ids.device)
    start = time.perf_counter()
    hooks = [layer.register_forward_hook(after_layer) for layer in model.model.layers]
    try:
        states = model.model(input_ids=input_ids, position_ids=positions, use_cache=False)[0]
    finally:
        for hook in hooks:
            hook.remove()
    loss_sum = 0.0
    for some, targets in zip(states.split(CHUNK, 1), labels.split(CHUNK, 1), strict=True):
        logits = model.lm_head(some).flatten(0, 1).float()
        loss_sum += functional.cross_entropy(logits, targets.flatten(), reduction="sum").item()
    return Score(
        loss_sum=loss_sum,
        num_scored=int((labels != IGNORE_INDEX).sum()),
        seconds=time.perf_counter() - start,
        peak_bytes=_peak_bytes(input_ids.device),
    )


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()
    elif _CLEAR.exists():
        _CLEAR.write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Of the device's memory, or on a CPU of the whole process, since the last reset.

    Only Linux can reset a process's peak; elsewhere it is that of all its life.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated())
    if _CLEAR.exists():
        lines = Path("/proc/self/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
