"""torchrun in this process, and a report that begins with the rank that failed first."""

import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run_torchrun(words: list[str], num_ranks: int) -> int:
    """Runs torchrun with these words; returns an exit code.

    A rank that fails ends the others; its code is returned and its traceback comes last on stderr.
    """
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as failed:
        failures = sorted(failed.failures.items(), key=lambda item: _moment(item[1]))
        print(report(failures, num_ranks), file=sys.stderr, flush=True)
        return _shell_code(failures[0][1].exitcode)
    except SignalException as error:
        return _shell_code(-error.sigval)
    return 0


def report(failures: list[tuple[int, ProcessFailure]], num_ranks: int) -> str:
    """What to tell of (rank, failure) in the order in which they happened."""
    lines = [f"rank {rank}: {_summary(failure)}" for rank, failure in failures[1:]]
    rank, failure = failures[0]
    lines.append(f"\nulysses launch: rank {rank} of {num_ranks} failed first: {_summary(failure)}")
    if recorded := _recorded(failure):
        lines.append(recorded["extraInfo"]["py_callstack"].rstrip())
    return "\n".join(lines)


def _summary(failure: ProcessFailure) -> str:
    """One line: what was raised, or how the process ended."""
    if recorded := _recorded(failure):
        return str(recorded["message"]).partition("\n")[0]
    if failure.exitcode < 0:
        return f"ended by {failure.signal_name()}"
    return f"exit code {failure.exitcode}"


def _recorded(failure: ProcessFailure) -> dict[str, Any] | None:
    """What the process's error handler wrote, if it came to that; torch annotates it as str."""
    message: object = failure.message
    return message if isinstance(message, dict) else None


def _moment(failure: ProcessFailure) -> tuple[bool, float]:
    """Sorts failures by time; torch's own stamps are whole seconds, in which a whole group dies.

    A rank that wrote what it raised comes before those that were ended.
    """
    path = Path(failure.error_file)
    if path.is_file():
        return (False, path.stat().st_mtime_ns)
    return (True, failure.timestamp)


def _shell_code(code: int) -> int:
    """A process's exit code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 + signal.Signals(-code).value
