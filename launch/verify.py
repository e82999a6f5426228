"""Compare a module over N ranks with one process: outputs, loss, every gradient, who sees a token.

Starts N processes; each makes the module, wraps it and runs it on inputs drawn to the given shapes.
Exit code 0: the same function; 1: it differs; 2: it could not be compared.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ulysses.degrees import check_count
from ulysses.launch.environment import usable_cores
from ulysses.verify_report import Report, show

REQUEST, REPORT = "request", "report"  # files between the command and its processes

EXAMPLE = (
    "example: ulysses verify my.models:make_llama --sp 4 --length 50 "
    "--input input_ids=2,S:32000 --input position_ids=1,S:positions"
)


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the module's forward; its sequence's dim is None where no S was given."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "normal", "positions", or a whole number for integers below it
    dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compare, and how."""

    factory: str
    inputs: tuple[Input, ...]
    sp: int
    options: dict[str, list[str] | str]  # of wrap or parallelize
    parallelize: bool
    dtype: str
    tolerance: float | None
    token: int | None
    seed: int
    device_type: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulysses verify`."""
    add = parser.add_argument
    parser.epilog = EXAMPLE
    add("factory", metavar="MODULE:FACTORY", help="import path of what makes the nn.Module")
    add("--sp", type=int, default=2, metavar="N", help="ranks that share the sequence (default: 2)")
    add("--length", type=int, default=50, metavar="N", help="tokens, S in a shape (default: 50)")
    add(
        "--input",
        action="append",
        required=True,
        metavar="NAME=SHAPE[:KIND]",
        help="argument of forward, once for each: sizes with commas, S for the sequence; KIND is N "
        "for integers below N, or positions for 0, 1, ... (default: normal floats)",
    )
    add("--parallelize", action="store_true", help="ulysses.parallelize on whole inputs, not wrap")
    add("--region", metavar="NAME", help="as --parallelize, of this stack of layers")
    for name, text in (
        ("replicated", "attention whose keys are whole on every rank"),
        ("local", "attention that does not run along the sequence"),
        ("handled", "layers that mix tokens otherwise and are right all the same"),
    ):
        add(f"--{name}", action="append", default=[], metavar="NAME", help=text)
    add("--dtype", choices=("float64", "float32", "bfloat16"), default="float64")
    add("--tolerance", type=float, metavar="X", help="relative to the largest (default: by dtype)")
    add("--token", type=int, metavar="T", help="the token to change (default: the middle one)")
    add("--seed", type=int, default=0, help="of weights and inputs (default: 0)")
    add("--all", action="store_true", help="list every gradient, not only those that differ")
    add("--device", choices=("cpu", "npu", "cuda"), default="cpu", help="(default: cpu)")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, 1 if the module differs, or 2 if it could not be compared."""
    try:
        request = request_of(arguments)
    except (TypeError, ValueError) as error:
        return _refuse(str(error))
    report = _run_ranks(request)
    if isinstance(report, int):
        return report
    show(report, Console(), every=arguments.all)
    return 0 if report.agrees else 1


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options ask for; raises ValueError or TypeError for what can't be run."""
    module, _, factory = arguments.factory.partition(":")
    if not module or not factory:
        raise ValueError(f"{arguments.factory}: give package.module:factory")
    length = check_count("--length", arguments.length)
    inputs = tuple(parse_input(text, length) for text in arguments.input)
    if all(item.dim is None for item in inputs):
        raise ValueError(
            "no --input has S in its shape: write S for the sequence's size, as 2,S,64"
        )
    if arguments.token is not None and not 0 <= arguments.token < length:
        raise ValueError(f"--token {arguments.token}: must lie in 0..{length - 1}")
    names = ("replicated", "local", "handled", "region")
    options = {name: given for name in names if (given := getattr(arguments, name))}
    return Request(
        factory=arguments.factory,
        inputs=inputs,
        sp=check_count("--sp", arguments.sp),
        options=options,
        parallelize=arguments.parallelize or arguments.region is not None,
        dtype=arguments.dtype,
        tolerance=arguments.tolerance,
        token=arguments.token,
        seed=arguments.seed,
        device_type=arguments.device,
    )


def parse_input(text: str, length: int) -> Input:
    """`hidden=2,S,64`, `input_ids=2,S:32000`, `position_ids=1,S:positions`."""
    name, _, rest = text.partition("=")
    shape, _, kind = rest.partition(":")
    sizes = shape.split(",")
    kind = kind or "normal"
    if (
        not name.isidentifier()
        or sizes.count("S") > 1
        or not all(size == "S" or size.isdecimal() for size in sizes)
        or not (kind in ("normal", "positions") or (kind.isdecimal() and int(kind)))
        or (kind == "positions" and "S" not in sizes)
    ):
        raise ValueError(
            f"--input {text}: give NAME=SHAPE[:KIND], such as hidden=2,S,64 or input_ids=2,S:32000 "
            "(integers below 32000) or position_ids=1,S:positions"
        )
    return Input(
        name=name,
        shape=tuple(length if size == "S" else int(size) for size in sizes),
        kind=kind,
        dim=sizes.index("S") if "S" in sizes else None,
    )


def _refuse(reason: str) -> int:
    print(f"ulysses verify: error: {reason}", file=sys.stderr)
    return 2


def _run_ranks(request: Request) -> Report | int:
    """The report, or 2 if a process failed, which has been told by then."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // request.sp)))
    from ulysses.launch.agent import run_torchrun  # loads torch: not before all is checked

    with TemporaryDirectory(prefix="ulysses-verify-") as folder:
        Path(folder, REQUEST).write_bytes(pickle.dumps(request))
        words = ["--nproc-per-node", str(request.sp), "--standalone"]
        words += ["--module", "ulysses.launch.worker", "-m", "ulysses.launch.verify_rank", folder]
        if run_torchrun(words, request.sp):
            return 2
        report: Report = pickle.loads(Path(folder, REPORT).read_bytes())
    return report
