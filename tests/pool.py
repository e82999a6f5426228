"""Standing workers that run a test's function on every rank.

A pool's processes are forked once from a server that has torch loaded, keep their process group,
and serve one call after another: 2 ms per test where fresh processes take seconds. A call sends a
module-level function and its arguments by pickle and returns what each rank returned.

What goes wrong on a rank comes back as a `WorkerError` with the traceback of every rank that raised
and, for a rank that hangs, the place where it stands. A pool whose workers may be out of step
afterwards is retired; the next call starts a fresh one.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0
PRELOADED = ("torch.distributed.tensor", "einops", "pytest")
GRACE = 3.0  # seconds that the other ranks get to answer once one has raised


class WorkerError(Exception):
    """One rank or more raised, died or did not answer in time.

    `errors` maps each such rank to its exception's type name and message; the type name of a rank
    that gave no answer is `NoAnswer`. The message holds every such rank's traceback.
    """

    def __init__(self, num_ranks: int, failures: dict[int, "Failure"]) -> None:
        self.errors = {rank: (failure.kind, failure.text) for rank, failure in failures.items()}
        parts = [f"--- rank {rank} ---\n{failure.trace}" for rank, failure in failures.items()]
        super().__init__(f"{len(failures)} of {num_ranks} ranks failed\n" + "\n".join(parts))


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank says, or what is said of it, when it has no result."""

    kind: str
    text: str
    trace: str


@dataclasses.dataclass(frozen=True)
class _Group:
    """A worker's place in the default process group."""

    backend: str
    rank: int
    num_ranks: int


@dataclasses.dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection


def start_server(modules: Collection[str] = ()) -> None:
    """Starts what workers are forked from, unless it runs; nobody waits for it to load `modules`.

    The workers have what it has loaded: imported once, not in each of them.
    """
    multiprocessing.forkserver.set_forkserver_preload([*PRELOADED, *modules])
    # No team of threads, which would be missed by what is forked.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()


class WorkerPool:
    """`num_ranks` processes with one group, started on the first call and after a failure.

    `backend` must carry CPU tensors; `environment` is set in the workers before they do anything.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        backend: str = "gloo",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._environment = dict(environment or {})
        self._workers: list[_Worker] = []
        self._folder = ""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Any]:
        """Returns `function(rank, num_ranks, *args, **kwargs)` of every rank, in rank order.

        `function` stands at a module's top level. Every call starts from the same random seed and
        under the warning filters of the calling test. `timeout` is in seconds.

        Raises WorkerError, after every rank has answered or `timeout` is over; once a rank has
        raised, the others get only a few seconds.
        """
        task = pickle.dumps((function, args, kwargs, list(warnings.filters)))
        if not self._workers:
            self._start()
        answers = self._call(task, timeout)
        failures = {r: answer for r, answer in answers.items() if isinstance(answer, Failure)}
        if failures:
            if not self._in_step(failures):
                self.close()
            raise WorkerError(self.num_ranks, failures)
        return [answers[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        start_server()
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.mkdtemp(prefix="ulysses-pool-")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            group = _Group(self._backend, rank, self.num_ranks)
            _stack_path(self._folder, rank).touch()  # to read, of a worker that does not get so far
            process = context.Process(
                target=_serve, args=(group, theirs, self._folder, self._environment), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        self.run(_ready, timeout=START_TIMEOUT)

    def _call(self, task: bytes, timeout: float) -> dict[int, Any]:
        """Every rank's result or Failure."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # it died: reading its answer says so
                worker.connection.send_bytes(task)
        answers: dict[int, Any] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        start = time.monotonic()
        deadline = start + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in waiting.values():
            answers[rank] = self._hanging(rank, time.monotonic() - start)
        return dict(sorted(answers.items()))

    def _receive(self, rank: int) -> Any:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join()
            text = f"the process ended with exit code {worker.process.exitcode}"
            return Failure("NoAnswer", text, text)

    def _hanging(self, rank: int, seconds: float) -> Failure:
        """Asks a silent rank where it stands."""
        path = _stack_path(self._folder, rank)
        pid = self._workers[rank].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not (stack := path.read_text()).endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.01)
        text = f"no answer after {seconds:.1f} s"
        return Failure("NoAnswer", text, f"{text}; it stands at\n{stack}")

    def _in_step(self, failures: dict[int, Failure]) -> bool:
        """Whether all ranks raised alike and can still meet in a collective."""
        kinds = {failure.kind for failure in failures.values()}
        if len(failures) < self.num_ranks or len(kinds) > 1 or "NoAnswer" in kinds:
            return False
        answers = self._call(pickle.dumps((_meet, (), {}, [])), GRACE)
        return list(answers.values()) == [self.num_ranks] * self.num_ranks


def _ready(rank: int, num_ranks: int) -> None:
    """Does nothing: its answer says that the worker is up."""


def _meet(rank: int, num_ranks: int) -> int:
    """Counts the ranks that come, over the default group."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return int(count)


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-of-rank-{rank}"


def _serve(
    group: _Group, connection: Connection, folder: str, environment: Mapping[str, str]
) -> None:
    """A worker's life: join the group, then answer calls until the pool closes the connection."""
    # Locks of a forking process need no tracker, which would miss the release of a killed worker's.
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # or each full collection would walk, and so copy, all that the server has loaded
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's to handle
    with _stack_path(folder, group.rank).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            # Gloo asks the host name for an address, which a container may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            group.backend,
            init_method=f"file://{folder}/store",
            rank=group.rank,
            world_size=group.num_ranks,
            timeout=datetime.timedelta(seconds=START_TIMEOUT),
        )
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                answer = _answer(group.rank, group.num_ranks, connection.recv_bytes())
                connection.send_bytes(answer)


def _answer(rank: int, num_ranks: int, task: bytes) -> bytes:
    """The pickled result of one call, or its pickled Failure."""
    torch.manual_seed(0)
    try:
        function, args, kwargs, filters = pickle.loads(task)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters = filters
            return pickle.dumps(function(rank, num_ranks, *args, **kwargs))
    except Exception as error:
        return pickle.dumps(Failure(type(error).__name__, str(error), _trace(error)))


def _trace(error: Exception) -> str:
    """The traceback below this file's own frame."""
    frames: types.TracebackType | None = error.__traceback__
    return "".join(traceback.format_exception(error.with_traceback(frames and frames.tb_next)))
