"""What every test may ask for."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Last, so that an installed ulysses wins where pytest runs with `-o pythonpath=`: the tests
# themselves have to be importable, here and in the pool's workers.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.pool import PRELOADED, WorkerPool


def pytest_collection_finish(session: pytest.Session) -> None:
    """Workers fork with what their tests' modules name in PRELOADED: imported once, not in each."""
    for module in {item.getparent(pytest.Module).obj for item in session.items}:
        PRELOADED.extend(getattr(module, "PRELOADED", ()))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], WorkerPool]]:
    """`pool(num_ranks).run(function, *args)`: the function's result on every rank."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool_of(num_ranks: int) -> WorkerPool:
            return stack.enter_context(WorkerPool(num_ranks))

        yield pool_of
