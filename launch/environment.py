"""What a launched process finds in its environment: the only place that reads or sets variables."""

import os
from collections.abc import Mapping
from pathlib import Path

from ulysses.config import Config, load_config
from ulysses.degrees import Degrees

CONFIG_VARIABLE = "ULYSSES_CONFIG"

# Seconds that HCCL waits for a peer's connection, by default 120: less than ranks may differ while
# they load weights and compile. CANN takes 120 to 7200; init_process_group's timeout does not
# govern it.
CONNECT_TIMEOUT = 600
CONNECT_TIMEOUT_RANGE = (120, 7200)


def current_config() -> Config:
    """The configuration that `ulysses launch` was given, in a process that it started.

    Raises RuntimeError in any other process.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise RuntimeError(
            f"{CONFIG_VARIABLE} is not set: start the script with `ulysses launch --config FILE`, "
            "or read a file with ulysses.load_config"
        )
    return load_config(path)


def current_degrees() -> Degrees:
    """dp, cfg, sp and tp of the running job, every `auto` settled: what `ulysses.init_mesh` takes.

    Raises RuntimeError in a process that `ulysses launch` did not start.
    """
    return current_config().resolve(int(os.environ["WORLD_SIZE"]))


def added_variables(
    environ: Mapping[str, str],
    *,
    config: Path,
    num_local_ranks: int,
    num_cores: int,
    npu: bool,
    connect_timeout: int = CONNECT_TIMEOUT,
) -> dict[str, str]:
    """What to add to `environ` for every process of a node; a value that the user set stays.

    connect_timeout: seconds, brought into the range that CANN takes.
    """
    shortest, longest = CONNECT_TIMEOUT_RANGE
    defaults = {"OMP_NUM_THREADS": max(1, num_cores // num_local_ranks)}
    if npu:
        defaults["HCCL_CONNECT_TIMEOUT"] = min(max(connect_timeout, shortest), longest)
    added = {name: str(value) for name, value in defaults.items() if name not in environ}
    return {CONFIG_VARIABLE: str(config.resolve()), **added}


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
