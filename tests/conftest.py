"""What every test may ask for."""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

# Last, so that an installed ulysses wins where pytest runs with `-o pythonpath=`: the tests
# themselves have to be importable, here and in the pool's workers.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.pool import PRELOADED, WorkerPool, start_server

gc.disable()  # until all is imported: thousands of modules make no garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need workers come last: the server that these are forked from loads meanwhile."""
    items.sort(key=_needs_workers)


def _needs_workers(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers fork with what their tests' modules name in PRELOADED: imported once, not in each."""
    for module in {item.getparent(pytest.Module).obj for item in session.items}:
        PRELOADED.extend(getattr(module, "PRELOADED", ()))
    if any(map(_needs_workers, session.items)):
        start_server()
    gc.freeze()  # a full collection walks no more than what the tests have made
    gc.enable()


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes may be started, by a command in this one too, which has torch loaded already.

    They find the same ulysses as this one, installed or not, away from the checkout. What a command
    adds to the environment is gone afterwards.
    """
    monkeypatch.chdir("/")
    path = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        for name in [name for name in os.environ if name.startswith("ULYSSES_")]:
            del os.environ[name]
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(num_ranks).run(function, *args)`: the function's result on every rank."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool_of(num_ranks: int) -> WorkerPool:
            return stack.enter_context(WorkerPool(num_ranks))

        yield pool_of
