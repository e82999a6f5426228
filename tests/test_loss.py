"""Loss over ranks: means weigh tokens, gradients follow the one rule, steps equal one process."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import ulysses
from tests import reference
from tests.pool import WorkerPool
from tests.tiny_lm import training_curve
from ulysses.tiling import shard_lengths

Pools = Callable[[int], WorkerPool]

STEPS = 3

VALUES = torch.arange(8.0, dtype=torch.float64)
VALID = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)


def _of_valid_tokens(rank: int, num_ranks: int) -> dict[str, float]:
    """Values 0..7 over the ranks, some of them valid: by the loss's route and by the metric's."""
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    values, valid = (ulysses.shard_sequence(whole, mesh["sp"], dim=0) for whole in (VALUES, VALID))
    count = ulysses.count_targets(torch.where(valid, 1, -100), mesh["sp"])
    share = ulysses.share_of_mean(values[valid].sum(), count, mesh["sp"])
    averages = ulysses.Averages()
    averages.add("value", values[valid].sum(), valid.sum())
    averages.add("ones", float(len(values)), len(values))
    if rank == 0:
        averages.add("on one rank", 6.0, 4)
    averages.add("of nothing", 0.0, 0)
    found = averages.result(mesh["sp"])
    return {"count": int(count), "loss": float(ulysses.mean_over_ranks(share, mesh["sp"])), **found}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_valid_token_counts_once(pool: Pools, num_ranks: int) -> None:
    for found in pool(num_ranks).run(_of_valid_tokens):
        assert math.isnan(found.pop("of nothing"))
        expected = {"count": 4, "loss": 3.75, "value": 3.75, "ones": 1.0, "on one rank": 1.5}
        assert found == expected


def test_averages_start_anew_after_each_result() -> None:
    averages = ulysses.Averages()
    averages.add("loss", torch.tensor(3.0), torch.tensor(2))
    averages.add("loss", 5.0, 2)
    assert averages.result(None) == {"loss": 2.0}
    assert averages.result(None) == {}


def _gradients(rank: int, num_ranks: int, length: int, targets: Any) -> Any:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    logits, own = (
        ulysses.shard_sequence(whole, mesh["sp"])
        for whole in (reference.draw(2, length, 5, seed=2), torch.tensor(targets))
    )
    logits.requires_grad_()
    count = ulysses.count_targets(own, mesh["sp"])
    loss = ulysses.token_loss(logits, own, count, mesh["sp"])
    loss.backward()
    assert logits.grad is not None
    return float(ulysses.mean_over_ranks(loss, mesh["sp"])), logits.grad / num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "targets", [[[4, -100, -100, 1, 2], [-100, -100, -100, 0, -100]], [[3], [1]]]
)
def test_loss_and_gradients_equal_one_process(pool: Pools, num_ranks: int, targets: Any) -> None:
    """Shards without a target and, with more ranks than tokens, without a token."""
    whole = torch.tensor(targets)
    logits = reference.draw(2, whole.shape[1], 5, seed=2)
    expected = cross_entropy(logits.requires_grad_().flatten(0, 1), whole.flatten())
    expected.backward()
    assert logits.grad is not None
    results = pool(num_ranks).run(_gradients, whole.shape[1], targets)
    lens = shard_lengths(whole.shape[1], num_ranks)
    for (loss, grad), part in zip(results, logits.grad.split(lens, dim=1), strict=True):
        assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
        torch.testing.assert_close(grad, part, atol=1e-12, rtol=0)


def test_no_target_at_all_gives_zero_and_zero_gradients() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.full((2, 3), -100)
    loss = ulysses.token_loss(logits, targets, ulysses.count_targets(targets, None), None)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 512, 64).bfloat16()
    targets = torch.randint(64, (1, 512))
    loss = ulysses.token_loss(logits, targets, 512, None)
    expected = cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \(2, 3, 5\), targets \(2, 4\).*shard both"):
        ulysses.token_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), 1, None)


@functools.cache
def one_process(num_micro: int) -> Any:
    return training_curve(0, 1, 0, num_micro=num_micro, steps=STEPS)


@pytest.mark.parametrize(
    ("num_ranks", "sp", "wrapper", "num_micro", "checkpointed"),
    [
        (2, 2, "none", 2, False),
        (2, 2, "ddp", 2, True),
        (2, 2, "fsdp2", 1, True),
        (3, 3, "ddp", 2, False),
        (4, 2, "ddp", 1, True),
        (4, 2, "fsdp2", 2, True),
    ],
)
def test_steps_equal_one_process(
    pool: Pools, num_ranks: int, sp: int, wrapper: str, num_micro: int, checkpointed: bool
) -> None:
    """Uneven shards, clipped gradients, micro-batches of few and many targets."""
    curve, parameters = one_process(num_micro)
    assert curve[0] - curve[-1] != 0.0
    options = {"wrapper": wrapper, "num_micro": num_micro, "checkpointed": checkpointed}
    found = pool(num_ranks).run(training_curve, sp, steps=STEPS, **options)
    for losses, state in found:
        assert losses == pytest.approx(curve, abs=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(state[name], value, atol=1e-9, rtol=0, msg=name)
