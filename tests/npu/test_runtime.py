"""The simulated runtime under the real torch_npu: devices, memory, streams, events, failures."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from tests.npu.conftest import npu_pool

POISON = 0xCB


def test_devices() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 8
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert dist.get_default_backend_for_device("npu") == "hccl"
    assert torch.npu.get_device_name(0) == "Ascend910_9391"


def test_memory_belongs_to_one_device() -> None:
    before = torch.npu.memory_allocated(3), torch.npu.memory_allocated(2)
    with torch.npu.device(3):
        held = torch.empty(1000, device="npu")
    assert held.device == torch.device("npu", 3)
    assert torch.npu.memory_allocated(3) > before[0]
    assert torch.npu.memory_allocated(2) == before[1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_round_trip(dtype: torch.dtype) -> None:
    host = torch.arange(12).view(3, 4).to(dtype)
    device = host.npu()
    assert device.device.type == "npu"
    assert torch.equal(device.cpu(), host)
    assert torch.equal(device.view(4, 3)[1:3].cpu(), host.view(4, 3)[1:3])


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda t: t.permute(0, 2, 1, 3).contiguous(),
        lambda t: t[:, ::2].contiguous(),
        lambda t: t.transpose(1, 3).reshape(2, -1),
        lambda t: t.permute(3, 0, 1, 2).to(torch.float16),
        lambda t: torch.cat([t, t[:, :1]], 1),
        lambda t: t[:, :1].expand(2, 6, 4, 16)[..., 0].clone(),
        lambda t: torch.stack([t, t], 2),
    ],
)
def test_strided_copies(rearrange) -> None:
    host = torch.randn(2, 6, 4, 16)
    expected, actual = rearrange(host), rearrange(host.npu())
    assert actual.device.type == "npu"
    assert torch.equal(actual.cpu(), expected)


def test_copy_into_a_strided_destination() -> None:
    host = torch.randn(2, 6, 4, 16)
    target = torch.empty(4, 2, 6, 16, device="npu")
    target.permute(1, 2, 0, 3).copy_(host.npu())
    assert torch.equal(target.permute(1, 2, 0, 3).cpu(), host)


def test_fresh_memory_is_poisoned() -> None:
    torch.npu.empty_cache()
    fresh = torch.empty(40_000_001, dtype=torch.uint8, device="npu")
    assert fresh.cpu().eq(POISON).all()


def test_a_full_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMNPU_MEMORY_GB", "1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**31, dtype=torch.uint8, device="npu")


def count_devices(rank: int, num_ranks: int) -> int:
    return torch.npu.device_count()


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1,5", 3), ("2", 1), ("1, 2", 1), ("3,1", 1), ("0,9", 1)]
)
def test_visible_devices_end_at_the_first_fault(visible: str, count: int) -> None:
    with npu_pool(1, ASCEND_RT_VISIBLE_DEVICES=visible) as pool:
        assert pool.run(count_devices) == [count]


def error_of(action) -> str:
    try:
        action()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def fail_on_a_device(rank: int, num_ranks: int) -> tuple[str, str, float]:
    """The texts of a failing operator and of the next one; a result of another device."""
    torch.npu.set_device(1)
    table = torch.zeros(4, device="npu")
    first = error_of(lambda: table.index_select(0, torch.tensor([9], device="npu")))
    second = error_of(lambda: table + 1)
    torch.npu.set_device(0)
    return first, second, (torch.ones(2, device="npu") + 1).sum().item()


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_a_failure_breaks_every_later_operator_of_its_device(asynchronous: str) -> None:
    with npu_pool(1, SIMNPU_ASYNC=asynchronous) as pool:
        ((first, second, other),) = pool.run(fail_on_a_device)
    assert "aclnnIndexSelect" in first
    assert "index out of range" in first
    assert "index out of range" in second
    assert other == 4


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_the_task_queue_loses_no_failure(asynchronous: str) -> None:
    with npu_pool(1, SIMNPU_ASYNC=asynchronous, TASK_QUEUE_ENABLE="1") as pool:
        ((first, second, _),) = pool.run(fail_on_a_device)
    # torch_npu has its own text for what its thread met, with the operator but not its complaint.
    assert "aclnnIndexSelect" in first
    assert "error" in second


def fail_later(rank: int, num_ranks: int) -> tuple[str, str]:
    """What an operator that will fail answers at once, and what the wait for it says."""
    table = torch.zeros(4, device="npu")
    rows = torch.tensor([9], device="npu")
    busy()
    try:
        table.index_select(0, rows)
        at_once = ""
    except RuntimeError as error:
        at_once = str(error)
    return at_once, error_of(lambda: None)


def busy() -> torch.Tensor:
    """Keeps the current stream busy for some tenths of a second."""
    factor = torch.ones(2000, 2000, device="npu")
    return factor @ factor


def test_asynchronous_failures_show_at_the_wait() -> None:
    with npu_pool(1, SIMNPU_ASYNC="1") as pool:
        ((at_once, later),) = pool.run(fail_later)
    assert at_once == ""
    assert "index out of range" in later


def read_across_streams(rank: int, num_ranks: int, wait: bool) -> float:
    """One element of a product of another stream."""
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(side):
        product = busy()
    if wait:
        torch.npu.current_stream().wait_stream(side)
    return product[0, :1].clone().cpu().item()


def test_streams_are_ordered_by_events_alone(asynchronous_npus) -> None:
    assert asynchronous_npus(1).run(read_across_streams, True) == [2000.0]
    assert asynchronous_npus(1).run(read_across_streams, False) != [2000.0]


def follow_an_event(rank: int, num_ranks: int) -> tuple[bool, bool, bool, float]:
    fresh = torch.npu.Event()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    torch.npu.synchronize()
    start.record()
    busy()
    end.record()
    early = end.query()
    end.synchronize()
    return fresh.query(), early, end.query(), start.elapsed_time(end)


def test_events_are_reached_when_their_stream_gets_there(asynchronous_npus) -> None:
    ((fresh, early, late, milliseconds),) = asynchronous_npus(1).run(follow_an_event)
    assert (fresh, early, late) == (True, False, True)
    assert milliseconds > 1


def wait_on_a_stale_record(rank: int, num_ranks: int) -> tuple[bool, bool]:
    """Whether a stream that waited for an event's first record is held up by its second."""
    side = torch.npu.Stream()
    event = torch.npu.Event()
    event.record()
    side.wait_event(event)
    busy()
    event.record()
    side.synchronize()
    return side.query(), event.query()


def test_a_wait_concerns_the_latest_record_before_it(asynchronous_npus) -> None:
    assert asynchronous_npus(1).run(wait_on_a_stale_record) == [(True, False)]


def overwrite_the_source(rank: int, num_ranks: int, pinned: bool) -> float:
    """What arrives of a host tensor that changes right after a non-blocking copy."""
    source = torch.ones(8, pin_memory=pinned)
    target = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    busy()
    target.copy_(source, non_blocking=True)
    source.fill_(7)
    return target.cpu().mean().item()


def test_only_page_locked_memory_is_copied_later(asynchronous_npus) -> None:
    assert asynchronous_npus(1).run(overwrite_the_source, True) == [7.0]
    assert asynchronous_npus(1).run(overwrite_the_source, False) == [1.0]


def overwrite_after_acl(rank: int, num_ranks: int, pinned: bool) -> tuple[int, float]:
    """The same through ACL itself, since torch_npu only asks for such copies of pinned memory."""
    source = torch.ones(8, pin_memory=pinned)
    target = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    busy()
    copy_async = ctypes.CDLL("libascendcl.so").aclrtMemcpyAsync
    stream = torch.npu.current_stream().npu_stream
    to, source_pointer = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
    size, host_to_device = ctypes.c_size_t(32), 1
    code = copy_async(to, size, source_pointer, size, host_to_device, ctypes.c_void_p(stream))
    source.fill_(7)
    return code, target.cpu().mean().item()


def test_acl_returns_after_a_copy_of_pageable_memory(asynchronous_npus) -> None:
    assert asynchronous_npus(1).run(overwrite_after_acl, True) == [(0, 7.0)]
    assert asynchronous_npus(1).run(overwrite_after_acl, False) == [(0, 1.0)]


def read_too_early(rank: int, num_ranks: int) -> tuple[float, float, float]:
    """A product read back by .cpu(), and into page-locked memory before and after a wait."""
    target = torch.zeros(1, pin_memory=True)
    blocking = busy()[0, 0].cpu().item()
    target.copy_(busy()[0, :1], non_blocking=True)
    early = target.item()
    torch.npu.synchronize()
    return blocking, early, target.item()


def test_a_blocking_copy_waits_and_another_does_not(asynchronous_npus) -> None:
    assert asynchronous_npus(1).run(read_too_early) == [(2000.0, 0.0, 2000.0)]
