"""One process of `ulysses doctor`: tests the kernel on its own device, then the exchange.

    python -m ulysses.launch.worker -m ulysses.launch.doctor_rank FOLDER DEVICE_TYPE SECONDS

FOLDER gets a report of each rank. A process that is not through after SECONDS writes where it
stands to stderr and ends, whatever it waits for.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import ulysses
from ulysses.backends.registry import get_backend
from ulysses.launch.doctor_check import RankReport
from ulysses.launch.doctor_exchange import exchange_checks
from ulysses.launch.doctor_kernel import kernel_checks
from ulysses.launch.doctor_packed import packed_checks
from ulysses.launch.doctor_refusal import refusal_checks

_GRACE = 5.0  # seconds for the traceback


def main() -> None:
    """Leaves the report; raises if a collective does."""
    folder, device_type, seconds = sys.argv[1:]
    _end_after(float(seconds))
    report = RankReport(dist.get_node_local_rank(fallback_rank=0))
    _write(report, folder)
    ulysses.init_mesh(device_type=device_type)
    device = _current_device(device_type)
    _kernel(report, folder, device)
    _exchange(report, folder, device)
    dist.destroy_process_group()
    report.stage = None
    _write(report, folder)


def _end_after(seconds: float) -> None:
    """Say where the process stands once its time is up, and end it."""

    def end() -> None:
        print(f"Not through after {seconds:g} s; it stands here:", file=sys.stderr)
        # With the interpreter's lock: faulthandler's own timer reads the stacks of running threads,
        # and crashes now and then.
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # A call that waits with the lock held lets no thread speak; this signal needs none.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _kernel(report: RankReport, folder: str, device: torch.device) -> None:
    report.stage = "the kernel's self-test"
    _write(report, folder)
    kernel = get_backend("auto", device.type)
    checks = [*kernel_checks(kernel, device), *packed_checks(kernel, device)]
    if kernel.name == "ascend":
        checks += refusal_checks(device)
    report.kernel = tuple(checks)


def _exchange(report: RankReport, folder: str, device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None, "init_mesh has started it"
    if group.size() == 1:
        return
    for name, check in exchange_checks(device, group).items():
        report.stage = name
        _write(report, folder)
        report.exchange += (check(),)


def _write(report: RankReport, folder: str) -> None:
    """In one step, so that nobody reads half a report."""
    unfinished = Path(folder, f"unfinished-{report.rank}")
    unfinished.write_bytes(pickle.dumps(report))
    os.replace(unfinished, Path(folder, f"rank-{report.rank}"))


if __name__ == "__main__":
    main()
