"""The denoising example at small size: latents as in one process, a branch a rank group or not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ulysses
from examples import denoise
from tests.pool import WorkerPool

CONFIG = Path(__file__).resolve().parents[1] / "configs/wan_tiny.yaml"
WORDS = ["--latents", "3,6,6", "--steps", "3", "--warm-up", "1"]


def alone(*words: str) -> Tensor:
    arguments = denoise.parsed([*WORDS, *words])
    return denoise.denoised_in_one_process(arguments, ulysses.load_config(CONFIG), "cpu")


def _denoised(rank: int, num_ranks: int, degrees: dict[str, int]) -> Tensor:
    mesh = ulysses.init_mesh(**degrees, device_type="cpu")
    return denoise.denoised(denoise.parsed(WORDS), ulysses.load_config(CONFIG), mesh)


def test_a_video_is_denoised_as_in_one_process(pool: Callable[[int], WorkerPool]) -> None:
    """27 tokens on 2 ranks, a step without guidance and two with it; float32."""
    expected = alone()
    assert (expected - alone("--guidance", "1")).abs().max() > 1e-3
    for degrees in ({"tp": 2, "sp": 2}, {"cfg": 2, "sp": 2}):
        for found in pool(4).run(_denoised, degrees):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    model = denoise.made(denoise.parsed(["--layers", "1"]), ulysses.load_config(CONFIG), "cpu")
    mesh = type("Three", (), {"size": lambda self: 3})()
    with pytest.raises(ValueError, match="4 heads on tp=3: each rank must hold whole heads"):
        denoise.split_over_ranks(model, mesh)
