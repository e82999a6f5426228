"""The standing worker pool: results, failures on some or all ranks, hangs, and speed."""

import os
import sys
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.pool import WorkerError, WorkerPool

PoolOf = Callable[[int], WorkerPool]


def add_ranks(rank: int, num_ranks: int, start: int, *, factor: int = 1) -> torch.Tensor:
    total = torch.tensor([start + rank * factor])
    dist.all_reduce(total)
    return total


def worker_state(rank: int, num_ranks: int) -> tuple[int, int, int, float]:
    assert rank == dist.get_rank()
    assert num_ranks == dist.get_world_size()
    return os.getpid(), rank, torch.get_num_threads(), float(torch.rand(()))


def raise_everywhere(rank: int, num_ranks: int) -> None:
    raise ValueError(f"rank {rank} refuses")


def raise_on_rank_one(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise RuntimeError("only here")


def raise_while_others_wait(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise RuntimeError("only here")
    dist.barrier()


def raise_out_of_step(rank: int, num_ranks: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("rank 0 left a collective behind")


def wait_for_rank_one(rank: int, num_ranks: int) -> None:
    if rank != 1:
        dist.barrier()


def die_on_rank_one(rank: int, num_ranks: int) -> None:
    if rank == 1:
        os._exit(7)


def warn(rank: int, num_ranks: int) -> None:
    warnings.warn("loud", UserWarning, stacklevel=1)


def identities(workers: WorkerPool) -> list[int]:
    return [pid for pid, *_ in workers.run(worker_state)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_returns_its_result(pool: PoolOf, num_ranks: int) -> None:
    expected = num_ranks * 5 + 2 * sum(range(num_ranks))
    results = pool(num_ranks).run(add_ranks, 5, factor=2)
    assert [int(result) for result in results] == [expected] * num_ranks


def test_workers_stay_and_start_each_call_alike(pool: PoolOf) -> None:
    first, second = pool(2).run(worker_state), pool(2).run(worker_state)
    assert first == second
    pids, ranks, threads, numbers = zip(*first, strict=True)
    assert len({*pids, os.getpid()}) == 3
    assert ranks == (0, 1)
    assert threads == (1, 1)
    assert numbers[0] == numbers[1]


def test_all_ranks_raising_alike_keeps_the_workers(pool: PoolOf) -> None:
    before = identities(pool(2))
    with pytest.raises(WorkerError, match="2 of 2 ranks failed") as caught:
        pool(2).run(raise_everywhere)
    assert caught.value.errors == {
        0: ("ValueError", "rank 0 refuses"),
        1: ("ValueError", "rank 1 refuses"),
    }
    assert "in raise_everywhere" in str(caught.value)
    assert "in _answer" not in str(caught.value)
    assert identities(pool(2)) == before


@pytest.mark.parametrize("function", [raise_on_rank_one, raise_out_of_step, die_on_rank_one])
def test_workers_that_may_be_out_of_step_are_replaced(
    pool: PoolOf, function: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.pool.GRACE", 0.2)
    before = identities(pool(2))
    with pytest.raises(WorkerError) as caught:
        pool(2).run(function)
    assert 1 in caught.value.errors
    assert not set(identities(pool(2))) & set(before)
    assert [int(result) for result in pool(2).run(add_ranks, 0)] == [1, 1]


def test_a_dead_worker_is_named_with_its_exit_code(pool: PoolOf) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run(die_on_rank_one)
    assert caught.value.errors == {1: ("NoAnswer", "the process ended with exit code 7")}


def test_ranks_waiting_for_one_that_raised_are_not_waited_for(
    pool: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.pool.GRACE", 0.2)
    pool(2).run(worker_state)
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool(2).run(raise_while_others_wait)
    assert time.monotonic() - start < 3
    assert caught.value.errors[1] == ("RuntimeError", "only here")
    assert caught.value.errors[0][0] == "NoAnswer"


def test_a_hang_says_where_each_rank_stands(pool: PoolOf) -> None:
    pool(3).run(worker_state)
    with pytest.raises(WorkerError, match="in wait_for_rank_one") as caught:
        pool(3).run(wait_for_rank_one, timeout=1)
    assert set(caught.value.errors) == {0, 2}
    kind, text = caught.value.errors[0]
    assert kind == "NoAnswer"
    assert text.startswith("no answer after 1.")


def test_warnings_are_errors_in_the_workers_too(pool: PoolOf) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run(warn)
    assert caught.value.errors[0] == ("UserWarning", "loud")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pool(2).run(warn) == [None, None]


def test_a_function_inside_a_function_is_refused_before_it_is_sent(pool: PoolOf) -> None:
    before = identities(pool(2))
    with pytest.raises((AttributeError, TypeError), match=r"local object|lambda"):
        pool(2).run(lambda rank, num_ranks: rank)
    assert identities(pool(2)) == before


def test_a_call_takes_milliseconds(pool: PoolOf) -> None:
    pool(2).run(add_ranks, 1)
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        pool(2).run(add_ranks, 1)
        durations.append(time.perf_counter() - start)
    # The fastest of many, so that a busy machine does not fail it: usually 1 ms.
    assert min(durations) < 0.02


def test_this_module_is_imported_once_under_the_name_that_workers_use() -> None:
    assert __name__ == "tests.test_pool"
    assert sys.modules[__name__].raise_everywhere is raise_everywhere
