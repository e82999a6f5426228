"""Which software and devices this machine has, and whether they fit together."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from ulysses.launch.doctor_environment import SET_ENV, npu_findings, relevant
from ulysses.launch.doctor_finding import Fault, Finding
from ulysses.launch.doctor_network import hccl_interface, interface_findings, this_host


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found: rows of a table, findings, the devices to test, and a line on NPUs."""

    facts: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    device_type: str | None = None  # None: nothing can be tested
    num_devices: int = 0
    npu_line: str = ""


def examine(asked: str) -> Machine:
    """Look at this machine for devices of the type asked for, or the best that it has ("auto").

    Imports torch, and so torch_npu where it is installed.
    """
    environ, host = os.environ, this_host()
    npu_meant = asked == "npu" or (asked == "auto" and find_spec("torch_npu") is not None)
    torch_version, npu_version = _version("torch"), _version("torch_npu")
    facts = [
        ("Python", platform.python_version()),
        ("torch", torch_version or "not installed"),
        ("torch_npu", npu_version or "not installed"),
    ]
    findings: list[Finding] = []
    if npu_meant:
        findings += version_findings(torch_version, npu_version)
        findings += npu_findings(environ, host)
    else:
        findings += interface_findings(environ, host.interfaces)
    try:
        import torch

        device_type, num_devices, npu_line = _devices(asked)
    except Exception as error:  # whatever a broken installation raises is a finding
        findings.append(_import_fault(error))
        return Machine((*facts, *relevant(environ).items()), tuple(findings))
    if device_type is None:
        findings.append(Fault(f"--device {asked}: {npu_line}", _mend(asked)))
    if device_type == "npu":
        facts.append(("CANN", str(torch.get_device_module("npu").utils.get_cann_version())))
        facts.append(("NIC for HCCL", hccl_interface(environ, host.interfaces)))
    if device_type not in (None, "cpu"):
        name = torch.get_device_module(device_type).get_device_name(0)
        facts.append(("devices", f"{num_devices} x {name}"))
    facts += relevant(environ).items()
    return Machine(tuple(facts), tuple(findings), device_type, num_devices, npu_line)


def version_findings(torch_version: str | None, npu_version: str | None) -> list[Finding]:
    """torch_npu is compiled against one release of torch, whose number it bears."""
    if npu_version is None or torch_version is None:
        missing = "torch_npu" if npu_version is None else "torch"
        return [Fault(f"{missing} is not installed", "python -m pip install 'ulysses[npu]'")]
    wanted, held = _release(npu_version), _release(torch_version)
    if wanted == held:
        return []
    return [
        Fault(
            f"torch_npu {npu_version} is built for torch {wanted}, and torch is {torch_version}",
            f"python -m pip install torch=={wanted}, or the torch_npu of {held}",
        )
    ]


def _release(version: str) -> str:
    """`2.7.1` of `2.7.1.post2+cpu` and of `2.7.1rc1`."""
    parts = version.partition("+")[0].split(".")[:3]
    return ".".join(part.partition("rc")[0] for part in parts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices(asked: str) -> tuple[str | None, int, str]:
    """The device type to test (None if it is not there), how many, and a line on NPUs."""
    import torch

    from ulysses.mesh import detect_device_type

    found = detect_device_type() if asked in ("auto", "npu") else asked
    npu_line = ""
    if found != "npu":
        npu_line = "No NPU: torch_npu is not installed"
        if find_spec("torch_npu") is not None:
            npu_line = "No NPU: torch_npu shows no device"
        if asked == "cpu":
            npu_line = "NPUs were not asked for"
    if asked == "cuda" and not torch.cuda.is_available():
        return None, 0, "torch shows no CUDA device"
    if asked == "npu" and found != "npu":
        return None, 0, npu_line
    count = 0 if found == "cpu" else torch.get_device_module(found).device_count()
    return found, count, npu_line


def _mend(asked: str) -> str:
    if asked == "npu":
        return "see `npu-smi info`; inside a container, map /dev/davinci* and the driver into it"
    return "see `nvidia-smi`, or pass another --device"


def _import_fault(error: BaseException) -> Fault:
    """Names the deepest cause: torch wraps what loading torch_npu raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return Fault(f"torch does not import: {type(error).__name__}: {lines[0]}", SET_ENV)
