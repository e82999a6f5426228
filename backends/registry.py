"""Local kernels by name: ours from one table, other packages' from their entry points.

A kernel is loaded when it is first asked for, so that an optional package is imported only by who
uses it. An entry point in the group "ulysses.backends" names a class without constructor arguments
or an object; either satisfies `LocalAttention`, and is then used exactly as ours are.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import pkgutil
from collections.abc import Iterable

import torch

from ulysses.backends.base import LocalAttention

_GROUP = "ulysses.backends"
_KERNELS = {
    "ascend": "ulysses.backends.ascend:AscendAttention",
    "sdpa": "ulysses.backends.sdpa:SdpaAttention",
}
_BY_DEVICE_TYPE = {"cpu": "sdpa", "cuda": "sdpa", "npu": "ascend"}
_log = logging.getLogger(__name__)


def backend_names() -> tuple[str, ...]:
    """Every name that `get_backend` knows, `auto` apart."""
    return tuple(sorted({*_KERNELS, *(point.name for point in _entry_points())}))


def get_backend(backend: str | LocalAttention, device_type: str) -> LocalAttention:
    """The kernel of that name, the one for `device_type` for "auto", or the object itself.

    Raises:
        ValueError: the name is unknown, or "auto" has no kernel for this device type.
        TypeError: it is neither a name nor a LocalAttention.
        ImportError: the kernel needs a package that is not installed.
        RuntimeError: "auto" on device type npu, and no NPU can be used.
    """
    if not isinstance(backend, str):
        return _checked(backend, "backend")
    if backend == "auto":
        backend = _for_device(device_type)
    return _load(backend)


def npu_is_available() -> bool:
    """Whether an NPU can be used: torch_npu may import, and name its device, without one."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


@functools.cache  # so that the choice is logged once
def _for_device(device_type: str) -> str:
    if device_type not in _BY_DEVICE_TYPE:
        raise ValueError(
            f"backend='auto', device type {device_type!r}: a kernel is chosen for "
            f"{_quoted(_BY_DEVICE_TYPE)} only; pass backend= one of {_quoted(backend_names())}"
        )
    if device_type == "npu" and not npu_is_available():
        raise RuntimeError(
            "backend='auto', device type 'npu': torch.npu.is_available() is false, so no NPU can "
            "be used here; install torch_npu, source CANN's set_env.sh, and see `npu-smi info`"
        )
    backend = _BY_DEVICE_TYPE[device_type]
    _log.info("backend='auto' on device type %r is %r", device_type, backend)
    return backend


@functools.cache
def _load(name: str) -> LocalAttention:
    """One object a name: a kernel keeps nothing between calls but constants worth sharing."""
    if name in _KERNELS:
        found = pkgutil.resolve_name(_KERNELS[name])
    else:
        points = [point for point in _entry_points() if point.name == name]
        if not points:
            raise ValueError(
                f"backend={name!r}: no such kernel; known are {_quoted(('auto', *backend_names()))}"
                f". Pass one of these, or a LocalAttention object, or install a package that names "
                f"its kernel in the entry point group {_GROUP!r}"
            )
        found = points[0].load()
    return _checked(found() if inspect.isclass(found) else found, f"backend={name!r}")


def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=_GROUP)


def _checked(kernel: object, what: str) -> LocalAttention:
    if inspect.isclass(kernel) or not isinstance(kernel, LocalAttention):
        raise TypeError(
            f"{what} is {kernel!r}: it must be one of {_quoted(('auto', *backend_names()))} or an "
            "object with what ulysses.backends.base.LocalAttention lists"
        )
    return kernel


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
