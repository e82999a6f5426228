"""Ranks of one group that call the layer with other lengths each, or do not know each other."""

import pytest
import torch
import torch.distributed as dist

from tests.pool import WorkerError
from ulysses import UlyssesAttention, wrap


def _attends() -> torch.nn.Module:
    return torch.nn.MultiheadAttention(8, 2, batch_first=True)


def _one_longer_shard(rank: int, num_ranks: int, check: bool) -> None:
    own = [torch.zeros(1, 3 if rank == 1 else 2, 4, 8) for _ in range(3)]
    UlyssesAttention(dist.group.WORLD, check=check)(*own)


def test_lengths_that_were_not_told_are_named_on_every_rank(pool):
    told = r"query_lens: rank 1 has \(3, 3, 3, 3\), the others \(2, 2, 2, 2\)"
    with pytest.raises(WorkerError, match=told) as refused:
        pool(4).run(_one_longer_shard, True, timeout=20)
    assert {kind for kind, _ in refused.value.errors.values()} == {"ValueError"}
    assert sorted(refused.value.errors) == [0, 1, 2, 3]


def test_without_the_check_no_rank_returns_and_none_waits_for_ever(pool):
    """Gloo ends a process that is sent more than it asked for, and the others hear of that."""
    with pytest.raises(WorkerError) as refused:
        pool(2).run(_one_longer_shard, False, timeout=20)
    assert sorted(refused.value.errors) == [0, 1]
    assert not any("no answer after" in text for _, text in refused.value.errors.values())


@pytest.mark.parametrize("make", [UlyssesAttention, lambda group: wrap(_attends(), group)])
def test_a_layer_made_before_the_groups_says_so(make, monkeypatch):
    """On each of the launched processes it would see its own shard only."""
    make(None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "launched")
    with pytest.raises(
        ValueError, match=r"group=None .* pass .* mesh\[\"sp\"\] of ulysses.init_mesh"
    ):
        make(None)
