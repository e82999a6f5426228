"""Environment variables with which NPUs fail or mislead: what is wrong, and the way out.

The rules read a mapping and a description of the host, never the process they run in. They are
those of CANN's reference of environment variables, 8.0 to 9.1, and of torch_npu's, Aug 2026; how
processes meet is in doctor_network.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ulysses.launch.doctor_finding import Advice, Fault, Finding
from ulysses.launch.doctor_network import Host, interface_findings, network_findings
from ulysses.launch.environment import CONNECT_TIMEOUT_RANGE

SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh, or wherever CANN is installed"

_RANGES = {
    "HCCL_BUFFSIZE": (1, 2**31 - 1),  # MiB
    "HCCL_CONNECT_TIMEOUT": CONNECT_TIMEOUT_RANGE,
    "HCCL_EVENT_TIMEOUT": (0, 2**31 - 1),
    "HCCL_EXEC_TIMEOUT": (0, 2**31 - 1),
    "HCCL_IF_BASE_PORT": (1024, 65520),
    "TASK_QUEUE_ENABLE": (0, 2),
}
# Whose values a report shows.
_FAMILIES = ("ASCEND_", "HCCL_", "P2P_HCCL_", "TORCH_HCCL_", "PYTORCH_")
_OTHERS = {
    "CPU_AFFINITY_CONF",
    "GLOO_SOCKET_IFNAME",
    "MULTI_STREAM_MEMORY_REUSE",
    "OMP_NUM_THREADS",
    "RANK_TABLE_FILE",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TP_SOCKET_IFNAME",
}


def npu_findings(environ: Mapping[str, str], host: Host) -> list[Finding]:
    """All that is wrong, or unwise, in the variables of a process that is to use NPUs."""
    return [
        *_cann(environ),
        *_visible_devices(environ),
        *_out_of_range(environ),
        *_allocator(environ),
        *_task_queue(environ),
        *_hccl_modes(environ),
        *_rank_table(environ),
        *network_findings(environ, host),
        *interface_findings(environ, host.interfaces),
    ]


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report shows, in order."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_FAMILIES) or name in _OTHERS
    }


def _cann(environ: Mapping[str, str]) -> Iterator[Finding]:
    home = environ.get("ASCEND_HOME_PATH")
    if not home:
        yield Fault("ASCEND_HOME_PATH is not set: CANN's set_env.sh was not sourced", SET_ENV)
    elif not Path(home).is_dir():
        yield Fault(f"ASCEND_HOME_PATH={home}: there is no such folder", SET_ENV)
    elif not environ.get("ASCEND_OPP_PATH"):
        yield Fault("ASCEND_OPP_PATH is not set: CANN would not find its operators", SET_ENV)


def _visible_devices(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    if name not in environ:
        return
    value = environ[name]
    ids = value.split(",")
    mend = f"give ascending numbers without spaces, such as {name}=0,1,2,3, or unset it"
    if not value.strip():
        yield Fault(f"{name} is empty: it hides every NPU", mend)
    elif any(character.isspace() for character in value):
        yield Fault(f"{name}={value!r}: CANN reads it only up to the space", mend)
    elif not all(word.isdecimal() for word in ids):
        yield Fault(f"{name}={value!r}: not a list of numbers", mend)
    elif sorted({int(word) for word in ids}) != [int(word) for word in ids]:
        yield Fault(f"{name}={value!r}: CANN takes ascending numbers, each once", mend)


def _out_of_range(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, (lowest, highest) in _RANGES.items():
        value = environ.get(name, str(lowest))
        if not value.isdecimal() or not lowest <= int(value) <= highest:
            yield Fault(
                f"{name}={value!r}: a whole number from {lowest} to {highest} is meant",
                f"unset {name}, or give a number in that range",
            )


def _allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    ours, general = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if ours in environ and general in environ:
        yield Fault(f"{ours} and {general} are both set: torch_npu aborts", f"unset {general}")


def _task_queue(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "TASK_QUEUE_ENABLE"
    if environ.get(name) == "2":
        yield Advice(
            f"{name}=2: what an operator refuses is told later, at some other line",
            f"set {name}=1 until the job runs",
        )
    for setting in (f"{name}=0", "ASCEND_LAUNCH_BLOCKING=1"):
        name, _, value = setting.partition("=")
        if environ.get(name) == value:
            yield Advice(f"{setting}: helps to find faults, and is slow", f"unset {name}")


def _hccl_modes(environ: Mapping[str, str]) -> Iterator[Finding]:
    if environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        yield Fault(
            "HCCL_OP_EXPANSION_MODE=AIV: one communicator only may use it, and a job has one for "
            "each of sp, tp and dp",
            "unset HCCL_OP_EXPANSION_MODE",
        )
    if "HCCL_ALGO" in environ:
        yield Advice(
            f"HCCL_ALGO={environ['HCCL_ALGO']}: its algorithms are not all meant for all-to-all",
            "unset HCCL_ALGO",
        )


def _rank_table(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "RANK_TABLE_FILE"
    if name not in environ:
        return
    path = Path(environ[name])
    if not path.is_file() or path.is_symlink():
        yield Fault(
            f"{name}={path}: it has to be a file, and no symbolic link",
            f"unset {name}: HCCL finds the ranks without it",
        )
