"""The registry of kernels: by name, by device, by entry point, and as objects."""

import logging
from pathlib import Path

import pytest
import torch

from ulysses.backends import (
    LocalAttention,
    backend_names,
    get_backend,
    registry,
)
from ulysses.backends.sdpa import SdpaAttention
from ulysses.conformance import CASES
from ulysses.testing import check_backend

_CASES = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _undecided():
    """`auto` is decided, and logged, once a process; here, once a test."""
    registry._for_device.cache_clear()
    yield
    registry._for_device.cache_clear()


def test_names_resolve_to_kernels(caplog):
    assert backend_names() == ("ascend", "sdpa")
    kernel = get_backend("sdpa", "cpu")
    assert isinstance(kernel, LocalAttention)
    with caplog.at_level(logging.INFO, logger="ulysses.backends.registry"):
        assert get_backend("auto", "cpu") is get_backend("auto", "cuda") is kernel
        get_backend("auto", "cpu")
    assert caplog.text.count("backend='auto' on device type 'cpu' is 'sdpa'") == 1


def test_an_object_is_used_as_it_is():
    kernel = SdpaAttention()
    assert get_backend(kernel, "cpu") is kernel


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"backend='foo'.*'auto', 'ascend', 'sdpa'.*entry point"):
        get_backend("foo", "cpu")


@pytest.mark.parametrize("wrong", [SdpaAttention, 3, None, lambda query: query])
def test_what_is_no_kernel_is_refused(wrong):
    with pytest.raises(TypeError, match="'auto', 'ascend', 'sdpa' or an object"):
        get_backend(wrong, "cpu")


def test_auto_chooses_for_known_devices_only():
    with pytest.raises(ValueError, match=r"device type 'xpu'.*'cpu', 'cuda', 'npu'"):
        get_backend("auto", "xpu")


@pytest.mark.parametrize("available", [False, True])
def test_auto_on_npu_asks_whether_a_device_can_be_used(monkeypatch, available):
    """torch_npu imports and names its device on a machine without one."""

    class Npu:
        is_available = staticmethod(lambda: available)

    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    monkeypatch.setattr("ulysses.backends.registry._load", lambda name: f"the {name} kernel")
    if available:
        assert get_backend("auto", "npu") == "the ascend kernel"
    else:
        with pytest.raises(RuntimeError, match=r"torch\.npu\.is_available\(\) is false"):
            get_backend("auto", "npu")


class ThirdParty(SdpaAttention):
    name = "third"


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch):
    """A package's metadata on the path, as pip leaves it, whose kernel is the class above."""
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    target = f"{ThirdParty.__module__}:ThirdParty"
    (info / "entry_points.txt").write_text(f"[ulysses.backends]\nthird = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("third_party")
def test_another_packages_kernel_is_found_by_its_name():
    kernel = get_backend("third", "cpu")
    assert isinstance(kernel, ThirdParty)
    assert backend_names() == ("ascend", "sdpa", "third")
    assert check_backend("third", dtypes=(torch.float32,)).backend == "third"
    with pytest.raises(ValueError, match="'sdpa', 'third'"):
        get_backend("fourth", "cpu")
