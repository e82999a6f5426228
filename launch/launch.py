"""Run a script on sp * tp * dp processes, as a configuration asks.

Each process finds the configuration with `ulysses.launch.current_config()`, and its place with
`ulysses.init_mesh`. torch.distributed.run starts the processes and watches over them.
"""

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from ulysses.config import Config, load_config
from ulysses.degrees import Degrees, check_count
from ulysses.launch.ending import end_process
from ulysses.launch.environment import CONNECT_TIMEOUT, added_variables, usable_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulysses launch`; several nodes each run it with the same ones."""
    add = parser.add_argument
    parser.usage = "%(prog)s --config FILE [options] [-m] SCRIPT [arguments of the script]"
    parser.epilog = (
        "dp * cfg * sp * tp is the number of processes on all nodes. tp has to divide num_heads, "
        "and num_kv_heads unless kv_replication is true; sp may be any number."
    )
    add("--config", required=True, type=Path, metavar="FILE", help="the YAML configuration")
    add("--nproc", type=int, metavar="N", help="processes on this node; default: sp*tp*dp / nodes")
    add("--nnodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    add("--node-rank", type=int, metavar="R", help="this node's place; default: found out together")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where several nodes meet, the same on all")
    add("--rdzv-id", default="ulysses", metavar="NAME", help="the job's name at the endpoint")
    add(
        "--connect-timeout",
        type=int,
        default=CONNECT_TIMEOUT,
        metavar="S",
        help="HCCL_CONNECT_TIMEOUT on NPUs unless set, 120 to 7200 (default: %(default)s)",
    )
    add("--log-dir", metavar="DIR", help="also write each process's output to a file here")
    add("--dry-run", action="store_true", help="show what would run, start nothing")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    add("script", metavar="SCRIPT")
    add("arguments", nargs=argparse.REMAINDER, metavar="...")


def run(arguments: argparse.Namespace) -> int:
    """Returns 2 if nothing could start; else ends with the code of the rank that failed first."""
    try:
        config = load_config(arguments.config)
        _check_backend(config.attention.backend)
        degrees = degrees_asked(config, num_nodes=arguments.nnodes, per_node=arguments.nproc)
        words = torchrun_words(arguments, degrees)
    except (ValueError, TypeError, OSError) as error:
        print(f"ulysses launch: error: {error}", file=sys.stderr)
        return 2
    added = added_variables(
        os.environ,
        config=arguments.config,
        num_local_ranks=degrees.num_ranks // arguments.nnodes,
        num_cores=usable_cores(),
        npu=find_spec("torch_npu") is not None,
        connect_timeout=arguments.connect_timeout,
    )
    print(f"ulysses launch: {config.explain(degrees)}", file=sys.stderr, flush=True)
    if arguments.dry_run:
        variables = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        print(" ".join([*variables, "torchrun", shlex.join(words)]))
        return 0
    os.environ.update(added)

    from ulysses.launch.agent import run_torchrun  # loads torch: not before all is checked

    return end_process(run_torchrun(words, degrees.num_ranks))


def _check_backend(name: str) -> None:
    if name == "auto":
        return
    from ulysses.backends.registry import backend_names  # loads torch

    if name not in (known := backend_names()):
        raise ValueError(
            f"attention.backend={name!r} is not known: give {', '.join(known)} or auto"
        )


def degrees_asked(config: Config, *, num_nodes: int, per_node: int | None) -> Degrees:
    """The degrees of the world to start: `per_node` processes a node, or the degrees' product.

    Raises ValueError or TypeError if the processes, the nodes and the degrees don't fit together.
    """
    check_count("--nnodes", num_nodes)
    if per_node is not None:
        return config.resolve(num_nodes * check_count("--nproc", per_node))
    if (rest := config.takes_the_rest()) in ("sp", "tp"):
        raise ValueError(
            f"parallel.{rest} is auto: say with --nproc how many processes a node runs"
        )
    num_ranks = config.parallel.cfg
    for degree in (config.parallel.sp, config.parallel.tp, config.parallel.dp):
        num_ranks *= 1 if degree == "auto" else degree
    if num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} processes (sp*tp*dp*cfg) can't be shared out evenly over --nnodes "
            f"{num_nodes}"
        )
    return config.resolve(num_ranks)


def torchrun_words(arguments: argparse.Namespace, degrees: Degrees) -> list[str]:
    """torchrun's command line.

    Raises ValueError or FileNotFoundError if the nodes can't meet or there is no such script.
    """
    if not arguments.module and not Path(arguments.script).is_file():
        raise FileNotFoundError(f"no script {arguments.script}; for a module put -m before it")
    words = ["--nproc-per-node", str(degrees.num_ranks // arguments.nnodes)]
    if arguments.nnodes == 1:
        words += ["--standalone"]
    elif arguments.rdzv_endpoint is None:
        raise ValueError("several nodes need --rdzv-endpoint HOST:PORT, the same on all of them")
    else:
        words += ["--nnodes", str(arguments.nnodes), "--rdzv-id", arguments.rdzv_id]
        words += ["--rdzv-endpoint", arguments.rdzv_endpoint]
        if arguments.node_rank is None:
            words += ["--rdzv-backend", "c10d"]
        else:
            words += ["--rdzv-backend", "static", "--node-rank", str(arguments.node_rank)]
    if arguments.log_dir is not None:
        words += ["--log-dir", arguments.log_dir, "--tee", "3"]
    words += ["--module", "ulysses.launch.worker", *["-m"] * arguments.module]
    return [*words, arguments.script, *arguments.arguments]
