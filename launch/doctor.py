"""Test this machine's devices, kernels and collectives, and say what is wrong and how to mend it.

Exit code 0: this machine can be trusted; 1: it can not; 2: the options make no sense.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ulysses.degrees import check_count
from ulysses.launch.doctor_check import RankReport
from ulysses.launch.doctor_finding import Fault
from ulysses.launch.doctor_machine import examine
from ulysses.launch.doctor_report import rank_faults, show_checks, show_facts, show_findings
from ulysses.launch.environment import CONNECT_TIMEOUT, usable_cores

_CPU_PROCESSES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulysses doctor`."""
    add = parser.add_argument
    devices = ("auto", "npu", "cuda", "cpu")
    add("--device", choices=devices, default="auto", help="auto: the first there is (default)")
    add(
        "--nproc",
        type=int,
        metavar="N",
        help=f"processes, one for each device (default: all devices; {_CPU_PROCESSES} on a CPU)",
    )
    add(
        "--timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="seconds after which a process that is not through is ended (default: 180)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if nothing is wrong, 1 if something is, 2 if nothing could be tested."""
    try:
        _check(arguments)
        machine = examine(arguments.device)
        num_ranks = _num_ranks(arguments.nproc, machine.device_type, machine.num_devices)
    except (TypeError, ValueError) as error:
        print(f"ulysses doctor: error: {error}", file=sys.stderr)
        return 2
    console = Console()
    show_facts(machine.facts, console)
    findings = list(machine.findings)
    device_type = machine.device_type
    if machine.npu_line and device_type is not None:
        backend = {"cpu": "gloo", "cuda": "nccl"}[device_type]
        console.print(f"{machine.npu_line}; sdpa and {backend} are tested, on {device_type}")
    if device_type is not None:
        reports = _self_test(device_type, num_ranks, arguments.timeout)
        show_checks(reports, console)
        findings += rank_faults(reports, num_ranks)
    show_findings(findings, console)
    num_faults = sum(isinstance(finding, Fault) for finding in findings)
    if num_faults:
        console.print(f"[red]NOT to be trusted[/]: {num_faults} wrong.")
        return 1
    console.print(
        f"[green]To be trusted[/]: {num_ranks} x {device_type}, kernels and all-to-all are right."
    )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.nproc is not None:
        check_count("--nproc", arguments.nproc)
    if not 0 < arguments.timeout < float("inf"):
        raise ValueError(f"--timeout {arguments.timeout}: give seconds, more than 0")


def _num_ranks(asked: int | None, device_type: str | None, num_devices: int) -> int:
    """One process for each device, unless fewer are asked for; raises ValueError for more."""
    if device_type in (None, "cpu"):
        return asked or _CPU_PROCESSES
    if asked is not None and asked > num_devices:
        raise ValueError(
            f"--nproc {asked}: this machine shows {num_devices} devices of type {device_type}; "
            "give that many or fewer"
        )
    return asked or num_devices


def _self_test(device_type: str, num_ranks: int, timeout: float) -> list[RankReport]:
    """What each process reports, as far as it came."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_ranks)))
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(CONNECT_TIMEOUT))
    from ulysses.launch.agent import run_torchrun  # loads torch

    with TemporaryDirectory(prefix="ulysses-doctor-") as folder:
        words = ["--nproc-per-node", str(num_ranks), "--standalone"]
        words += ["--module", "ulysses.launch.worker", "-m", "ulysses.launch.doctor_rank"]
        run_torchrun([*words, folder, device_type, str(timeout)], num_ranks)
        reports = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("rank-*")]
    return sorted(reports, key=lambda report: report.rank)
