"""What stands for torchrun where a test is about the ranks, not about starting them.

A rank is forked from the server of tests/pool.py, which has torch loaded: that saves each of them
the seconds for its imports. `test_launch` has torchrun itself start them.
"""

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Mapping

import torch
from torch.distributed import run as torchrun

from tests.pool import START_TIMEOUT, start_server


def run_forked(words: list[str], num_ranks: int) -> int:
    """As `ulysses.launch.agent.run_torchrun`: the first exit code that is not 0, or 0."""
    told = torchrun.parse_args(words)
    assert told.standalone
    assert told.module
    assert int(told.nproc_per_node) == num_ranks
    start_server()
    context = multiprocessing.get_context("forkserver")
    argv = [told.training_script, *told.training_script_args]
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    ranks = [
        context.Process(target=_rank, args=(rank, num_ranks, environment, argv))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(START_TIMEOUT)
        process.kill()
        process.join()
    return next((process.exitcode or 0 for process in ranks if process.exitcode), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(rank: int, num_ranks: int, environment: Mapping[str, str], argv: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = argv
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)  # by the server
    # The server's own output is the terminal's; torchrun's ranks would write to the test's.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
