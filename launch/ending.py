"""The end of a process that has nothing left to do and is waited for."""

import atexit
import os
import signal
import sys
from typing import NoReturn

EXIT_SECONDS = 2  # for exit handlers


def end_process(code: int) -> NoReturn:
    """Ends this process after its exit handlers, or after EXIT_SECONDS at the latest.

    The interpreter's teardown is left out: with torch loaded it takes seconds on a busy machine,
    and it waits for threads that may never end. The limit is the kernel's, since a timer of
    Python's would wait for an interpreter that is stuck.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
