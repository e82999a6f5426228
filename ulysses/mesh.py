"""The device mesh (dp, sp, tp), with cfg behind dp if asked for, and the groups that carry it.

    mesh = ulysses.init_mesh(sp=4, tp=2)  # under `ulysses launch` or torchrun; dp is what is left
    attn = ulysses.UlyssesAttention(mesh["sp"])

Ranks and sizes come from the mesh itself: `mesh["sp"].get_local_rank()`, `mesh["sp"].size()`.

No environment variable is read here: torch's env:// reads RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and `torch.distributed.get_node_local_rank` reads LOCAL_RANK.
"""

import importlib
import importlib.util
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ulysses.degrees import Degrees, check_cfg, check_count, fit

# In the order in which `detect_device_type` prefers them.
BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def init_mesh(
    *,
    sp: int | None = 1,
    tp: int | None = 1,
    dp: int | None = None,
    cfg: int | None = 1,
    device_type: str | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """The mesh of all ranks with axes (dp, sp, tp), tp innermost.

    sp, tp: ranks along the axis; None is 1. dp: None is what they leave of the world. cfg: 2 gives
    the mesh an axis "cfg" behind dp, of the two branches of a guided diffusion step
    (`ulysses.run_branches`).
    device_type: npu, cuda or cpu; by default that of the process group if one exists, else the
    first that this machine has. timeout: of a collective; by default the backend's.

    Starts the default process group (hccl, nccl or gloo) from the launcher's environment, or for
    this process alone where nothing launched it; a group that exists is used as it is. Every rank
    makes the same call, since groups are made by all ranks together. On an NPU each group runs one
    collective at once: its first use opens connections, which must not happen in mid-run.

    Raises TypeError or ValueError, on every rank alike, for a degree that is no whole number of at
    least 1, degrees that don't fit the world, or a device type that the existing group can't serve.
    """
    sp = check_count("sp", 1 if sp is None else sp)
    tp = check_count("tp", 1 if tp is None else tp)
    cfg = check_cfg("cfg", 1 if cfg is None else cfg)
    if dp is not None:
        check_count("dp", dp)
    if dist.is_initialized():
        device_type = _served_device_type(device_type)
    else:
        device_type = detect_device_type() if device_type is None else device_type
        _start_world(device_type, timeout)
    degrees = fit(dist.get_world_size(), sp=sp, tp=tp, dp=dp, cfg=cfg)
    groups = _groups(degrees, timeout)
    if device_type == "npu":
        _warm_up(groups, device_type)
    sizes = [getattr(degrees, axis) for axis in degrees.axes]
    ranks = torch.arange(degrees.num_ranks, device="cpu").view(sizes)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=degrees.axes)


def detect_device_type() -> str:
    """npu, cuda or cpu: the first that this process can use.

    Raises RuntimeError if torch_npu is installed and can't be imported.
    """
    if _npu_is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _npu_is_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        raise RuntimeError(
            "torch_npu is installed but can't be imported, most often because CANN's set_env.sh "
            "was not sourced; to run without an NPU pass device_type='cpu'"
        ) from error
    return bool(torch.get_device_module("npu").is_available())


def _start_world(device_type: str, timeout: timedelta | None) -> None:
    """Starts the default group, on the device that this process's local rank selects."""
    if device_type not in BACKENDS:
        raise ValueError(f"device_type={device_type!r}: give one of {', '.join(BACKENDS)}")
    _select_device(device_type)
    backend = BACKENDS[device_type]
    try:
        dist.init_process_group(backend, timeout=timeout)
    except ValueError as error:
        # Only without a rank does this process stand alone. A half-set environment stays an error,
        # and should torch word it differently one day, so does a process that stands alone.
        if "RANK expected" not in str(error):
            raise
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs leave it out
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _select_device(device_type: str) -> None:
    """Makes the local rank's device current; without a local rank the current one stays."""
    local_rank = dist.get_node_local_rank(fallback_rank=-1)
    if device_type == "cpu" or local_rank < 0:
        return
    devices = torch.get_device_module(device_type)
    if local_rank >= devices.device_count():
        raise ValueError(
            f"local rank {local_rank} has no device: this node shows {devices.device_count()} of "
            f"type {device_type}; start as many processes, or show more devices"
        )
    devices.set_device(local_rank)


def _served_device_type(device_type: str | None) -> str:
    """The device type of a mesh over the default group that exists."""
    config = dist.get_backend_config()
    served = dict(pair.split(":") for pair in config.split(","))
    if device_type is None:
        for name, backend in BACKENDS.items():
            if served.get(name) == backend:
                return name
    elif device_type in served:
        return device_type
    wanted = device_type or " or ".join(BACKENDS)
    backends = BACKENDS.get(wanted) or " or ".join(BACKENDS.values())
    raise ValueError(
        f"the process group that exists serves {config}, a mesh of {device_type=} needs {wanted}: "
        f"start the group with backend {backends}, or leave that to init_mesh"
    )


def _groups(degrees: Degrees, timeout: timedelta | None) -> list[dist.ProcessGroup]:
    """This rank's group along each axis.

    An axis of all ranks has the default group, and the axes of one rank share a group of this rank
    alone, which needs no other rank: making one over HCCL can take half a minute.
    """
    world = dist.group.WORLD
    assert world is not None
    found = {degrees.num_ranks: world}
    groups = []
    for axis in degrees.axes:
        size = getattr(degrees, axis)
        if size == 1 and size not in found:
            found[size] = dist.new_group(
                [dist.get_rank()], timeout=timeout, use_local_synchronization=True
            )
        if size in found:
            groups.append(found[size])
        else:
            groups.append(dist.new_subgroups_by_enumeration(degrees.groups(axis), timeout)[0])
    return groups


def _warm_up(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """One small collective in every group of more than one rank, in the same order on all ranks."""
    for group in dict.fromkeys(groups):
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)
