"""Programs of fresh processes, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ULYSSES = [sys.executable, "-m", "ulysses.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Alone they take a tenth of that; the machine may have two cores, and others to serve.
_PATIENCE = 280


def run(words: list[str], **variables: str | None) -> tuple[int, str]:
    """The exit code, and stdout before stderr; `variables` change the environment, None unsets.

    A program that takes too long is asked to end, so that a launcher ends its ranks.
    """
    environment: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    process = subprocess.Popen(
        words,
        env={name: value for name, value in environment.items() if value is not None},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            out, complaints = process.communicate(timeout=_PATIENCE)
        finally:
            process.terminate()
    return process.returncode, out + complaints
