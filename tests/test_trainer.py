"""transformers' Trainer, by examples/trainer.py, over sp and dp: the curves of one process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState

import ulysses
from examples import trainer
from tests.pool import WorkerPool

Pools = Callable[[int], WorkerPool]


def _trained(
    rank: int, num_ranks: int, folder: Path, sp: int | None, *words: str
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradients' norm of each step, and the weights; without sp, Trainer itself."""
    arguments = trainer.parsed([*words, "--device", "cpu", "--out", str(folder)])
    mesh = ulysses.init_mesh(sp=sp or 1, device_type="cpu")
    options = {
        "args": trainer.settings(arguments, mesh["dp"].size()),
        "train_dataset": trainer.dataset(arguments),
    }
    model = trainer.load_model()
    if sp is None:
        run = transformers.Trainer(model, **options)
    else:
        run = trainer.Trainer(model, mesh, **options)
    run.train()
    steps = [(log["loss"], log["grad_norm"]) for log in run.state.log_history if "loss" in log]
    return steps, {name: value.detach() for name, value in model.named_parameters()}


def _launched(rank: int, num_ranks: int, *given: Any) -> Any:
    """accelerate looks for its ranks in a launcher's variables, and keeps them."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = dict.fromkeys(names[0], str(rank)) | dict.fromkeys(names[1], str(num_ranks))
    told |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}
    with mock.patch.dict(os.environ, told if num_ranks > 1 else {}):
        try:
            return _trained(rank, num_ranks, *given)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            assert dist.is_initialized()


@pytest.mark.parametrize(
    ("num_ranks", "words"), [(2, ()), (4, ("--accumulate", "2"))], ids=["sp", "sp x dp"]
)
def test_a_trainer_over_ranks(
    pool: Pools, tmp_path: Path, num_ranks: int, words: tuple[str, ...]
) -> None:
    steps, weights = pool(1).run(_launched, tmp_path, None, *words)[0]
    assert steps[-1][0] < steps[0][0] - 0.5
    for found, theirs in pool(num_ranks).run(_launched, tmp_path, 2, *words):
        for step, expected in zip(found, steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-4)
        for name, weight in theirs.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4, msg=name)
