"""Batches over ranks: each sp group has the same samples, each rank its shard, and labels stay."""

import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ulysses
from tests.pool import WorkerPool
from ulysses.data import TOKEN_DIMS

Pools = Callable[[int], WorkerPool]


def samples(number: int, length: int = 8) -> list[dict[str, Tensor]]:
    """Sample n holds the tokens 100 n, 100 n + 1, ..."""
    ids = [100 * n + torch.arange(length) for n in range(number)]
    return [{"input_ids": tokens, "labels": tokens + 1000} for tokens in ids]


def _passes(
    rank: int, num_ranks: int, sp: int, number: int, epochs: int, options: dict[str, Any]
) -> list[list[Any]]:
    """All input_ids of every epoch, with the rank's global generators seeded differently."""
    multiprocessing.current_process().daemon = False  # a pool's process may have no children else
    torch.manual_seed(rank)
    random.seed(rank)
    mesh = ulysses.init_mesh(sp=sp, device_type="cpu")
    loader = ulysses.data_loader(samples(number), mesh, **options)
    passes = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        passes.append([batch["input_ids"].tolist() for batch in loader])
        assert len(passes[-1]) == len(loader)
    return passes


def test_an_sp_group_takes_each_sample_once(pool: Pools) -> None:
    """Three samples are three steps, and rank r has tokens 4 r to 4 r + 3 of each."""
    for rank, (steps,) in enumerate(pool(2).run(_passes, 2, 3, 1, {})):
        starts = [100 * n + 4 * rank for n in range(3)]
        assert steps == [[list(range(start, start + 4))] for start in starts]


def test_dp_ranks_share_the_samples_out(pool: Pools) -> None:
    options = {"shuffle": True, "batch_size": 2, "seed": 5}
    found = pool(4).run(_passes, 2, 8, 2, options)
    for epoch in range(2):
        seen = [[[row[0] // 100 for row in batch] for batch in passes[epoch]] for passes in found]
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]
        assert sorted(n for batches in (seen[0], seen[2]) for b in batches for n in b) == [
            *range(8)
        ]
    assert found[0][0] != found[0][1], "set_epoch changes the order"


def shifted(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collate function with draws of torch and of Python."""
    shift = int(torch.randint(10_000, ())) * 1000 + random.randrange(1000)
    return {"input_ids": torch.stack([sample["input_ids"] for sample in batch]) + shift}


def _whole_firsts(passes: list[list[Any]], sp_rank: int) -> list[list[int]]:
    """The first token of every whole batch, epoch by epoch."""
    return [[batch[0][0] - 4 * sp_rank for batch in steps] for steps in passes]


def test_random_collation_is_alike_within_an_sp_group(pool: Pools) -> None:
    found = pool(4).run(_passes, 2, 4, 2, {"collate_fn": shifted})
    firsts = [_whole_firsts(passes, rank % 2) for rank, passes in enumerate(found)]
    assert firsts[0] == firsts[1]
    assert firsts[2] == firsts[3]
    assert firsts[0] != firsts[2]
    assert firsts[0][0] != firsts[0][1], "epochs draw differently"


def test_random_collation_in_a_loader_process_is_alike(pool: Pools) -> None:
    found = pool(2).run(_passes, 2, 1, 1, {"collate_fn": shifted, "num_workers": 1})
    assert _whole_firsts(found[0], 0) == _whole_firsts(found[1], 1)


def _draws_left_alone(rank: int, num_ranks: int) -> tuple[float, float]:
    random.seed(3)
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    for _ in ulysses.data_loader(samples(2), mesh, collate_fn=shifted):
        pass
    return random.random(), float(torch.rand(()))


def test_a_pass_leaves_the_global_generators_alone(pool: Pools) -> None:
    random.seed(3)
    torch.manual_seed(0)  # as the pool does
    assert pool(2).run(_draws_left_alone) == [(random.random(), float(torch.rand(())))] * 2


def _sharded(rank: int, num_ranks: int, batch: Any, options: dict[str, Any]) -> Any:
    given = dict(batch)
    part = ulysses.shard_tokens(batch, dist.group.WORLD, **options)
    assert batch.keys() == given.keys(), "the batch itself was changed"
    return part


def test_labels_stay_and_nothing_hangs_on_other_names(pool: Pools) -> None:
    ids = torch.arange(8)[None]
    mask = torch.ones(1, 8)
    batch = {"input_ids": ids, "labels": ids + 10, "attention_mask": mask, "images": None, "n": 3}
    for rank, part in enumerate(pool(2).run(_sharded, batch, {})):
        own = slice(4 * rank, 4 * rank + 4)
        assert list(part) == list(batch)
        assert part["input_ids"].tolist() == ids[:, own].tolist()
        assert part["labels"].tolist() == (ids + 10)[:, own].tolist()
        assert part["attention_mask"].shape == (1, 8), "attention needs the whole mask"
        assert part["images"] is None
        assert part["n"] == 3


def test_targets_and_positions_come_on_request(pool: Pools) -> None:
    """Uneven shards; each token's target is its successor, across the shards' border too."""
    batch = {"input_ids": torch.arange(5)[None] + 50, "labels": torch.arange(5)[None] + 50}
    options = {"targets": "shift_labels", "positions": "position_ids"}
    first, second = pool(2).run(_sharded, batch, options)
    assert first["shift_labels"].tolist() == [[51, 52, 53]]
    assert second["shift_labels"].tolist() == [[54, -100]]
    assert first["labels"].tolist() == [[50, 51, 52]]
    assert [part["position_ids"].tolist() for part in (first, second)] == [[[0, 1, 2]], [[3, 4]]]


def test_what_targets_are_made_of_must_be_there() -> None:
    with pytest.raises(KeyError, match=r"targets='t' is made from 'labels'.*\['input_ids'\]"):
        ulysses.shard_tokens({"input_ids": torch.zeros(1, 4)}, None, targets="t")


def test_lengths_that_differ_are_refused_by_name() -> None:
    batch = {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=r"input_ids 4 .*labels 3"):
        ulysses.shard_tokens(batch, None)


def test_other_dims_by_name(pool: Pools) -> None:
    batch = {"input_ids": torch.zeros(1, 4), "weights": torch.arange(4)}
    for rank, part in enumerate(
        pool(2).run(_sharded, batch, {"dims": {**TOKEN_DIMS, "weights": 0}})
    ):
        assert part["weights"].tolist() == [2 * rank, 2 * rank + 1]


def _compared(rank: int, num_ranks: int, what: str) -> str:
    batch: Any = {
        "input_ids": torch.arange(6),
        "images": [torch.zeros(2), torch.ones(0)],
        "name": "x",
    }
    if rank == 1 and what == "value":
        batch["images"][0][1] = 1e-30
    elif rank == 1 and what == "dtype":
        batch["input_ids"] = batch["input_ids"].int()
    elif rank == 1 and what == "missing":
        del batch["name"]
    elif rank == 1 and what == "layout":  # the same values, in other strides
        batch["input_ids"] = torch.arange(6).repeat_interleave(2)[::2]
    try:
        ulysses.check_same_across_ranks(batch, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "told"),
    [("value", "images.0: rank 1"), ("dtype", "input_ids: rank 1"), ("missing", "name: rank 1")],
)
def test_a_difference_is_named_on_every_rank(pool: Pools, what: str, told: str) -> None:
    for message in pool(3).run(_compared, what):
        assert f"hold different batches: {told} has" in message
        assert "rank 2" not in message


@pytest.mark.parametrize("what", ["", "layout"])
def test_equal_batches_pass(pool: Pools, what: str) -> None:
    assert pool(3).run(_compared, what) == [""] * 3


def _own_loader(rank: int, num_ranks: int, check: bool) -> int:
    """How many batches came before the difference in the second was found."""
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    batches = [{"input_ids": torch.zeros(1, 4)}, {"input_ids": torch.full((1, 4), float(rank))}]
    loader, passed = ulysses.SequenceLoader(batches, mesh, check=check), 0
    try:
        for _ in loader:
            passed += 1
    except ValueError:
        return passed
    return passed


def test_every_batch_is_compared_on_request(pool: Pools) -> None:
    assert pool(2).run(_own_loader, True) == [1, 1]
    assert pool(2).run(_own_loader, False) == [2, 2]
