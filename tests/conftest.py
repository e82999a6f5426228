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

from tests.forked import run_forked
from tests.pool import WorkerPool, start_server

gc.disable()  # until all is imported: thousands of modules make no garbage


def pytest_configure(config: pytest.Config) -> None:
    """In a run of all tests the workers' server loads them while this process collects them."""
    if config.args_source is config.ArgsSource.TESTPATHS:
        folder = Path(__file__).parent
        paths = [*folder.glob("test_*.py"), *folder.glob("cases/test_*.py")]
        start_server([".".join(p.relative_to(folder.parent).with_suffix("").parts) for p in paths])


def _needs_workers(item: pytest.Item) -> bool:
    return not {"pool", "forking"}.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need workers come last: the server that these are forked from loads meanwhile."""
    items.sort(key=_needs_workers)


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a run of some tests it loads those that need it."""
    if users := [item for item in session.items if _needs_workers(item)]:
        start_server({item.getparent(pytest.Module).obj.__name__ for item in users})
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


@pytest.fixture
def forking(launching: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's ranks are forked with torch loaded, where torchrun would start them."""
    monkeypatch.setattr("ulysses.launch.agent.run_torchrun", run_forked)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(num_ranks).run(function, *args)`: the function's result on every rank."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool_of(num_ranks: int) -> WorkerPool:
            return stack.enter_context(WorkerPool(num_ranks))

        yield pool_of
