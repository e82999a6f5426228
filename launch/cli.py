"""The `ulysses` command: finds the subcommand's file and hands over to it.

A subcommand is a module with

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> int           # the exit code

and one line in COMMANDS. The first line of its docstring is its description. Only the module that
is asked for is imported, so that `ulysses --help` answers at once and loads no torch.
"""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

# name: (module, what it does in one line)
COMMANDS = {
    "demo": (
        "ulysses.launch.demo",
        "score a long text with a real model over N ranks, and compare with one process",
    ),
    "doctor": (
        "ulysses.launch.doctor",
        "test this machine's devices, kernels and collectives, and say what to mend",
    ),
    "launch": (
        "ulysses.launch.launch",
        "run a script on as many processes as a configuration asks",
    ),
    "verify": (
        "ulysses.launch.verify",
        "compare a module over N ranks with the same module in one process",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `ulysses COMMAND ...` (`argv`: the words after `ulysses`) and returns its exit code."""
    chosen = _top_parser().parse_args(argv)
    module = importlib.import_module(COMMANDS[chosen.command][0])
    description = (module.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"ulysses {chosen.command}", description=description)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(chosen.arguments))
    return code


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ulysses",
        description="Sequence-parallel attention for PyTorch.",
        epilog=f"commands:\n{listing}\n\n`ulysses COMMAND --help` tells a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: a checkout that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata  # loading it takes longer than all the rest of --help

        try:
            version = metadata.version("ulysses")
        except metadata.PackageNotFoundError:
            version = "(a checkout that is not installed)"
        print(f"ulysses {version}")
        parser.exit()
