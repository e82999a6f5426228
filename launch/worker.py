"""One launched process: runs the script and, should it raise, sees to a quick and well-told end.

    python -m ulysses.launch.worker [-m] script-or-module arguments...

Peers in a collective learn of a failed rank only when its process is gone, so nothing may hold it
up: not a thread of the script's, not the interpreter's teardown (seconds on a busy machine), not a
process group's destructor. The launcher learns what was raised from the error file whose place
torch's agent says.
"""

import os
import runpy
import sys
import types
from collections.abc import Callable

from ulysses.launch.ending import end_process


def main() -> None:
    """Runs the script or module in sys.argv as `__main__`; returns only if it did not fail."""
    record = _recorder()
    try:
        _run(sys.argv[1:])
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        record(error)
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        end_process(error.code if isinstance(error.code, int) else 1)
    except Exception as error:
        error.__traceback__ = _own_frames(error.__traceback__)
        record(error)
        sys.excepthook(type(error), error, error.__traceback__)
        end_process(1)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # as `python script` has it
        runpy.run_path(words[0], run_name="__main__")


def _own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on."""
    while trace and any(trace.tb_frame.f_globals is vars_ for vars_ in (globals(), vars(runpy))):
        trace = trace.tb_next
    return trace


def _recorder() -> Callable[[BaseException], None]:
    """Leaves an error where torch's agent looks for it; without an agent, nowhere.

    Made before the script runs: imports would take their time when a failed rank has none.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return lambda error: None
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    return get_error_handler().record_exception


if __name__ == "__main__":
    main()
