"""Tests on NPUs, which `make test-npu` simulates; any other run of pytest leaves them out."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.pool import WorkerPool

if "SIMNPU_HOME" in os.environ:
    with warnings.catch_warnings():
        # torch_npu's own modules warn while they are imported.
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Lets torch_npu say, once in a process, that it keeps no layout of its own."""
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")


def npu_pool(num_ranks: int, **environment: str) -> WorkerPool:
    """Workers whose default group is gloo for CPU and hccl for NPU tensors."""
    return WorkerPool(num_ranks, backend="cpu:gloo,npu:hccl", environment=environment)


@pytest.fixture(scope="session")
def npus() -> Iterator[Callable[[int], WorkerPool]]:
    """`npus(num_ranks).run(function, *args)`, streams being synchronous."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda num_ranks: stack.enter_context(npu_pool(num_ranks)))


@pytest.fixture(scope="session")
def asynchronous_npus() -> Iterator[Callable[[int], WorkerPool]]:
    """The same with a thread for each stream, and collectives that start 300 ms late."""
    settings = {"SIMNPU_ASYNC": "1", "SIMNPU_HCCL_DELAY_MS": "300"}
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda num_ranks: stack.enter_context(npu_pool(num_ranks, **settings))
        )
