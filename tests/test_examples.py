"""The examples at small size: curves as in one process, checkpoints for another sp, the plot."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

import ulysses
from examples import finetune, generate, plot_losses, vit_step
from tests.pool import WorkerPool

Pools = Callable[[int], WorkerPool]

WORDS = ["--tiny", "--device", "cpu", "--length", "61", "--lr", "1e-2"]
STEPS = 6


def _trained(rank: int, num_ranks: int, *words: str) -> list[float]:
    arguments = finetune.parsed([*WORDS, "--steps", str(STEPS), *words])
    return finetune.train(arguments, ulysses.init_mesh(sp=arguments.sp, device_type="cpu"))


@functools.cache
def one_process() -> list[float]:
    """The model itself on whole samples, with torch's loss: nothing of ours but the texts."""
    arguments = finetune.parsed(WORDS)
    model: Any
    model, encode = finetune.load_model(arguments, "cpu")
    samples = finetune.dataset(encode, arguments.length, arguments.global_batch)
    order = iter(DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    curve = []
    for _ in range(STEPS):
        batch = [samples[next(order)] for _ in range(arguments.global_batch)]
        logits = model(input_ids=torch.stack([sample["input_ids"] for sample in batch])).logits
        targets = torch.stack([sample["labels"] for sample in batch])[:, 1:]
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (1, ()),
        (2, ("--sp", "2")),
        (2, ("--sp", "2", "--wrapper", "fsdp2", "--accumulate", "2", "--checkpointing")),
        (4, ("--sp", "2", "--accumulate", "2", "--checkpointing")),
        (4, ("--sp", "2", "--wrapper", "fsdp2")),
    ],
    ids=lambda value: "".join(value).replace("--", "-") if isinstance(value, tuple) else str(value),
)
def test_curves_equal_one_process(pool: Pools, num_ranks: int, words: tuple[str, ...]) -> None:
    """Float32, a learning rate that moves the loss, the same global batch."""
    expected = one_process()
    assert expected[-1] < expected[0] - 1
    for curve in pool(num_ranks).run(_trained, *words):
        assert curve == pytest.approx(expected, abs=1e-4)


def test_resuming_needs_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()  # left behind by a run that was killed while it saved
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        finetune.resume(tmp_path, None, None)


def _losses(folder: Path) -> list[float]:
    with (folder / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*range(1, STEPS + 1)]
    return [float(row["loss"]) for row in rows]


def test_a_run_resumes_on_other_ranks(pool: Pools, tmp_path: Path) -> None:
    """Saved by FSDP2 at sp=4; continued by DDP at sp=2."""
    words = ("--out", str(tmp_path), "--save-every", "2")
    pool(4).run(_trained, *words, "--sp", "4", "--wrapper", "fsdp2", "--steps", "3")
    for curve in pool(2).run(_trained, *words, "--sp", "2", "--wrapper", "ddp", "--resume"):
        assert curve == pytest.approx(one_process()[2:], abs=1e-4)
    assert _losses(tmp_path) == pytest.approx(one_process(), abs=1e-4)


def test_a_batch_that_can_not_be_shared_out_is_refused() -> None:
    arguments = finetune.parsed([*WORDS, "--global-batch", "4", "--accumulate", "3"])
    mesh: Any = {"dp": type("Axis", (), {"size": lambda self: 1})()}
    with pytest.raises(ValueError, match=r"--global-batch 4 over dp 1 x --accumulate 3.*of 3"):
        next(finetune.batches([], mesh, arguments))


def test_curves_are_plotted(tmp_path: Path) -> None:
    for name, shift in (("alone", 0.0), ("sp2", 1e-6)):
        folder = tmp_path / name
        folder.mkdir()
        lines = [f"{step},{3 / step + shift},1.0\n" for step in range(1, 4)]
        (folder / "losses.csv").write_text("step,loss,norm\n" + "".join(lines))
    png = tmp_path / "losses.png"
    plot_losses.main([str(tmp_path / "alone"), str(tmp_path / "sp2"), "--png", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG")


VIT_WORDS = ["--tiny", "--device", "cpu", "--lr", "5e-3"]


def _classified(rank: int, num_ranks: int, sp: int) -> list[float]:
    arguments = vit_step.parsed([*VIT_WORDS, "--sp", str(sp)])
    return vit_step.train(arguments, ulysses.init_mesh(sp=sp, device_type="cpu"))


@functools.cache
def classified_in_one_process() -> list[float]:
    arguments = vit_step.parsed(VIT_WORDS)
    model = vit_step.load_model(arguments, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    number = arguments.global_batch
    samples = vit_step.dataset(arguments, arguments.steps * number)
    curve = []
    for step in range(arguments.steps):
        batch = samples[step * number : (step + 1) * number]
        images, classes = (torch.stack([s[n] for s in batch]) for n in ("images", "classes"))
        loss = cross_entropy(model(pixel_values=images).logits, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize(("num_ranks", "sp"), [(1, 1), (3, 3), (4, 2)])
def test_a_classifier_learns_as_in_one_process(pool: Pools, num_ranks: int, sp: int) -> None:
    """17 tokens on 2 or 3 ranks; the global batch must be shared out evenly over dp."""
    expected = classified_in_one_process()
    assert expected[-1] < expected[0]
    for curve in pool(num_ranks).run(_classified, sp):
        assert curve == pytest.approx(expected, abs=1e-4)


def _gone_on(rank: int, num_ranks: int) -> generate.Continuation:
    arguments = generate.parsed(["--tiny", "--device", "cpu", "--prompt", "101", "--new", "12"])
    return generate.go_on(arguments, ulysses.init_mesh(sp=num_ranks, device_type="cpu"))


def test_a_text_is_gone_on_with_as_in_one_process(pool: Pools) -> None:
    (alone,) = pool(1).run(_gone_on)
    assert alone.tokens.shape == (1, 113)
    first, second = pool(2).run(_gone_on)
    assert torch.equal(first.tokens, alone.tokens)
    assert torch.equal(second.tokens, alone.tokens)
    assert first.kept == (56, 56)
    assert "keys and values of 56 + 56 tokens" in str(first)
