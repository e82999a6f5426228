"""The simulated HCCL under the real ProcessGroupHCCL, compared with what each collective means."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.npu.conftest import npu_pool
from tests.pool import WorkerError

MOVED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint16, torch.uint32, torch.uint64),
]
REDUCED = [
    *(torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
]
POISON = 0xCB


def place(rank: int) -> torch.device:
    torch.npu.set_device(rank)
    return torch.device("npu", rank)


def values(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ between ranks, exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 5 * rank) % 16).view(shape).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device.type == "npu"
    host = actual.cpu()
    assert host.dtype == expected.dtype
    assert torch.equal(host.view(torch.uint8), expected.contiguous().view(torch.uint8))


def exchange_evenly(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    device = place(rank)
    sent = [values(r, 2 * num_ranks, 3, dtype=dtype) for r in range(num_ranks)]
    received = torch.empty_like(sent[rank], device=device)
    dist.all_to_all_single(received, sent[rank].to(device))
    same(received, torch.stack([t.view(num_ranks, 2, 3)[rank] for t in sent]).view(-1, 3))


def exchange_unevenly(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    """Rank i sends i + j rows to rank j: none from 0 to 0."""
    device = place(rank)
    splits = [[i + j for j in range(num_ranks)] for i in range(num_ranks)]
    sent = [values(i, sum(splits[i]), 3, dtype=dtype) for i in range(num_ranks)]
    received = torch.empty(sum(splits[rank]), 3, dtype=dtype, device=device)
    dist.all_to_all_single(received, sent[rank].to(device), splits[rank], splits[rank])
    parts = [sent[i].view(torch.uint8).split(splits[i])[rank] for i in range(num_ranks)]
    same(received, torch.cat(parts).view(dtype))


def gather(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    device = place(rank)
    sent = [values(r, 2, 3, dtype=dtype) for r in range(num_ranks)]
    together = torch.empty(2 * num_ranks, 3, dtype=dtype, device=device)
    dist.all_gather_single(together, sent[rank].to(device))
    same(together, torch.stack(sent).view(-1, 3))
    apart = [torch.empty(2, 3, dtype=dtype, device=device) for _ in range(num_ranks)]
    dist.all_gather(apart, sent[rank].to(device))
    for actual, expected in zip(apart, sent, strict=True):
        same(actual, expected)


def hand_out(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    """From the last rank: a broadcast, then a scatter."""
    device = place(rank)
    root = num_ranks - 1
    held = values(rank, 3, dtype=dtype).to(device)
    dist.broadcast(held, root)
    same(held, values(root, 3, dtype=dtype))
    parts = [values(r, 3, dtype=dtype) for r in range(num_ranks)]
    received = torch.empty(3, dtype=dtype, device=device)
    offered = [part.to(device) for part in parts] if rank == root else None
    dist.scatter(received, offered, src=root)
    same(received, parts[rank])


def pass_on(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    """Round a ring, all at once; then from rank 0 to 1 alone."""
    device = place(rank)
    sent, received = values(rank, 5, dtype=dtype).to(device), torch.empty(5, dtype=dtype).to(device)
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    calls = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    same(received, values(before, 5, dtype=dtype))
    if rank == 0:
        dist.send(sent, 1)
    if rank == 1:
        dist.recv(received, 0)
        same(received, values(0, 5, dtype=dtype))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [*MOVED, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("move", [exchange_evenly, exchange_unevenly, pass_on])
def test_exchanged_data_arrives_bit_for_bit(npus, move, dtype: torch.dtype, num_ranks: int) -> None:
    npus(num_ranks).run(move, dtype)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("move", [gather, hand_out])
def test_shared_data_arrives_bit_for_bit(npus, move, dtype: torch.dtype, num_ranks: int) -> None:
    npus(num_ranks).run(move, dtype)


def reduce(rank: int, num_ranks: int, dtype: torch.dtype, name: str) -> None:
    device = place(rank)
    op = getattr(dist.ReduceOp, name)
    combine = {"SUM": torch.sum, "PRODUCT": torch.prod, "MAX": torch.amax, "MIN": torch.amin}[name]
    parts = [values(r, 2 * num_ranks, dtype=dtype).remainder(4) for r in range(num_ranks)]
    expected = combine(torch.stack(parts).double(), dim=0).to(dtype)
    everywhere = parts[rank].to(device)
    dist.all_reduce(everywhere, op)
    same(everywhere, expected)
    mine = torch.empty(2, dtype=dtype, device=device)
    dist.reduce_scatter_single(mine, parts[rank].to(device), op)
    same(mine, expected[2 * rank : 2 * rank + 2])
    at_root = parts[rank].to(device)
    dist.reduce(at_root, 1, op)
    if rank == 1:
        same(at_root, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MAX", "MIN"])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reductions(npus, dtype: torch.dtype, name: str, num_ranks: int) -> None:
    npus(num_ranks).run(reduce, dtype, name)


def attempt(rank: int, num_ranks: int, what: str) -> str:
    device = place(rank)
    held = torch.ones(2, 3, device=device)
    calls = {
        # The functions of torch.distributed view complex numbers as pairs of real ones.
        "complex": lambda: dist.group.WORLD.broadcast(
            torch.ones(2, dtype=torch.complex64).to(device), 0
        ),
        "float64": lambda: dist.all_reduce(torch.ones(2, dtype=torch.float64).to(device)),
        "strided": lambda: dist.all_reduce(held.T),
    }
    try:
        calls[what]()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [("complex", "Unsupported data type"), ("float64", "Double"), ("strided", "contiguous")],
)
def test_what_hccl_does_not_take(npus, what: str, text: str) -> None:
    for refusal in npus(2).run(attempt, what):
        assert text in refusal


def meet_in_subgroups(rank: int, num_ranks: int) -> None:
    device = place(rank)
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "sp"))
    for axis, partners in (("sp", {0: 1, 1: 1, 2: 5, 3: 5}), ("dp", {0: 2, 1: 4, 2: 2, 3: 4})):
        total = torch.full((1,), float(rank), device=device)
        dist.all_reduce(total, group=mesh.get_group(axis))
        assert total.item() == partners[rank]
    outer = dist.new_group([0, 3], backend="hccl")
    if rank in (0, 3):
        held = torch.full((2,), float(rank), device=device)
        dist.all_to_all_single(received := torch.empty_like(held), held, group=outer)
        assert received.tolist() == [0.0, 3.0]


def test_subgroups_of_a_mesh(npus) -> None:
    npus(4).run(meet_in_subgroups)


def wait_for_all(rank: int, num_ranks: int) -> list[int]:
    device = place(rank)
    dist.barrier(device_ids=[device.index])
    gathered = [0] * num_ranks
    dist.all_gather_object(gathered, rank)
    return gathered


def test_barrier_and_objects(npus) -> None:
    assert npus(4).run(wait_for_all) == [[0, 1, 2, 3]] * 4


def read_beside_the_exchange(rank: int, num_ranks: int) -> tuple[list[int], bool]:
    """The received bytes before the wait, and whether they are right after it."""
    device = place(rank)
    sent = torch.full((num_ranks, 4), rank, dtype=torch.uint8).to(device)
    expected = torch.arange(num_ranks, dtype=torch.uint8)[:, None].expand(num_ranks, 4)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # so that the right answer lies there already
    assert torch.equal(received.cpu(), expected)
    work = dist.all_to_all_single(received, sent, async_op=True)
    early = received.clone()
    work.wait()
    return early.cpu().unique().tolist(), torch.equal(received.cpu(), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_missing_wait_gives_wrong_data(asynchronous_npus, num_ranks: int) -> None:
    assert asynchronous_npus(num_ranks).run(read_beside_the_exchange) == (
        [([POISON], True)] * num_ranks
    )


def reduce_in_place(rank: int, num_ranks: int) -> tuple[list[int], float]:
    device = place(rank)
    total = torch.ones(4, device=device)
    work = dist.all_reduce(total, async_op=True)
    early = total.view(torch.uint8).clone()
    work.wait()
    return early.cpu().unique().tolist(), total.mean().item()


def test_an_in_place_reduction_without_wait_gives_wrong_data(asynchronous_npus) -> None:
    assert asynchronous_npus(2).run(reduce_in_place) == [([POISON], 2.0)] * 2


def change_what_is_being_sent(rank: int, num_ranks: int, wait: bool) -> float:
    device = place(rank)
    sent, received = torch.ones(num_ranks, device=device), torch.empty(num_ranks, device=device)
    work = dist.all_to_all_single(received, sent, async_op=True)
    if wait:
        work.wait()
    sent.zero_()
    work.wait()
    return received.mean().item()


def test_what_is_sent_must_stay_until_the_wait(asynchronous_npus) -> None:
    assert asynchronous_npus(2).run(change_what_is_being_sent, True) == [1.0, 1.0]
    assert asynchronous_npus(2).run(change_what_is_being_sent, False) == [0.0, 0.0]


def disagree(rank: int, num_ranks: int, about: str) -> tuple[str, str]:
    """The errors of a collective about which rank 1 thinks otherwise, and of the next operator."""
    device = place(rank)
    odd = rank == 1
    held = torch.ones(8, device=device)
    calls = {
        "count": lambda: dist.all_reduce(held[: 4 + odd]),
        "type": lambda: dist.all_reduce(held.int() if odd else held),
        "reduction": lambda: dist.all_reduce(held, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(held, src=int(odd)),
        "operation": lambda: dist.broadcast(held, src=0) if odd else dist.all_reduce(held),
        "splits": lambda: dist.all_to_all_single(
            held.clone(), held, [4, 4], [5, 3] if odd else [4, 4]
        ),
    }
    errors = []
    for action in (calls[about], lambda: held + 1):
        try:
            action()
            torch.npu.synchronize()
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors[0], errors[1]


@pytest.mark.parametrize(
    ("about", "sides", "asynchronous"),
    [
        ("count", ("count 4, float32", "count 5, float32"), "0"),
        ("count", ("count 4, float32", "count 5, float32"), "1"),
        ("type", ("float32", "int32"), "0"),
        ("reduction", ("reduction sum", "reduction max"), "0"),
        ("root", ("root 0", "root 1"), "0"),
        ("operation", ("all_reduce", "broadcast"), "0"),
    ],
)
def test_ranks_that_disagree_see_both_sides(about: str, sides, asynchronous: str) -> None:
    with npu_pool(2, SIMNPU_ASYNC=asynchronous) as pool:
        results = pool.run(disagree, about)
    for rank, (first, second) in enumerate(results):
        assert "arguments for collective communication are inconsistent between ranks" in first
        local, remote = first.split("local rank")[1].split("remote rank")
        assert local.startswith(f" {rank} ")
        assert remote.startswith(f" {1 - rank} ")
        assert sides[rank] in local
        assert sides[1 - rank] in remote
        assert "inconsistent between ranks" in second


def test_splits_that_do_not_match_are_found() -> None:
    with npu_pool(2) as pool:
        results = pool.run(disagree, "splits")
    assert "count 4" in results[0][0]
    assert "count 5" in results[0][0]


def die(rank: int, num_ranks: int) -> str:
    device = place(rank)
    held = torch.ones(4, device=device)
    dist.all_reduce(held)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(held)
    return "unnoticed"


def test_a_dead_rank_is_named_and_leaves_nothing_behind() -> None:
    start = time.monotonic()
    with npu_pool(3) as pool, pytest.raises(WorkerError) as raised:
        pool.run(die)
    assert time.monotonic() - start < 30
    errors = raised.value.errors
    assert errors[1][0] == "NoAnswer"
    assert "rank 0 in all_reduce (call 2" in errors[0][1]
    assert "lost rank 1 (process" in errors[0][1]
    assert "its process has ended" in errors[0][1]
    communicator = errors[0][1].split("of communicator ")[1].split()[0]
    assert communicator not in Path("/proc/net/unix").read_text()


def stay_away(rank: int, num_ranks: int) -> str:
    device = place(rank)
    held = torch.ones(4, device=device)
    dist.all_reduce(held)
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        dist.all_reduce(held)
    except RuntimeError as error:
        return str(error)
    return "unnoticed"


def test_a_rank_that_stays_away_is_named() -> None:
    with npu_pool(2, HCCL_EXEC_TIMEOUT="1") as pool:
        text, _ = pool.run(stay_away)
    assert "rank 0 in all_reduce (call 2" in text
    assert "waited 1 s (HCCL_EXEC_TIMEOUT) for rank 1 (process" in text
    assert "last seen in all_reduce (call 1" in text


def exchange_ones(rank: int, num_ranks: int) -> float:
    device = place(rank)
    held = torch.ones(num_ranks, device=device)
    dist.all_to_all_single(received := torch.empty_like(held), held)
    return received.mean().item()


@pytest.mark.parametrize(("num_ranks", "received"), [(2, 1.0), (3, 0.0)])
def test_the_planted_fault_returns_zeros_among_more_than_two(num_ranks: int, received) -> None:
    with npu_pool(num_ranks, SIMNPU_FAULT="alltoall_zeros") as pool:
        assert pool.run(exchange_ones) == [received] * num_ranks
