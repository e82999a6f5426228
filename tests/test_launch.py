"""`ulysses launch`: what it starts, what it refuses, and how a group ends when a rank fails.

Starting processes takes seconds, so two tests do it; the others look at what would be started.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ulysses.config import Config, load_config
from ulysses.launch import agent, current_config, current_degrees
from ulysses.launch.cli import COMMANDS, main
from ulysses.launch.environment import added_variables
from ulysses.launch.launch import degrees_asked

ROOT = Path(__file__).resolve().parents[1]
WAN = ROOT / "configs/wan2.2_t2v_a14b.yaml"
QWEN = ROOT / "configs/qwen3_32b.yaml"
SCRIPT = ROOT / "tests/scripts/fail_on_rank_one.py"
pytestmark = pytest.mark.usefixtures("launching")


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_the_example_runs_on_the_processes_that_the_configuration_asks_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulysses.launch.launch.end_process", lambda code: code)
    text = "parallel: {sp: 2}\nmodel: {num_heads: 3, head_dim: 8, dtype: float64, seq_len: 7}"
    config = written(tmp_path, text)
    assert main(["launch", "--config", str(config), "-m", "ulysses.launch.example"]) == 0
    out, err = capfd.readouterr()
    said = r"dp 1 x sp 2 x tp 1: largest difference from one process \d\.\de[+-]\d\d\n"
    assert re.fullmatch(said, out)
    assert "ulysses launch: 2 ranks = dp 1 x sp 2 x tp 1; dp takes what" in err


def test_a_rank_that_raises_ends_the_group_with_its_traceback_within_5_seconds(
    tmp_path: Path,
) -> None:
    config = written(tmp_path, "parallel: {sp: 2}")
    command = [sys.executable, "-m", "ulysses.launch", "launch", "--config", str(config)]
    lines = []
    with subprocess.Popen(
        [*command, str(SCRIPT), "an", "argument"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        late = threading.Timer(120, launcher.terminate)
        late.start()
        for line in launcher.stderr:
            lines.append((time.time(), line))
        late.cancel()
        out = launcher.stdout.read()
    ended = time.time()
    assert launcher.returncode == 1

    told, _ = lines[-1]
    raised = float(re.findall(r"raised at (\S+)", out)[0])
    assert told - raised < 5
    assert ended - raised < 5
    processes = [int(pid) for pid in re.findall(r"process (\d+)", out)]
    assert len(processes) == 2
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    report = "".join(line for _, line in lines[-5:])
    assert re.sub(r"line \d+", "line N", report) == (
        "ulysses launch: rank 1 of 2 failed first: LookupError: only this rank can see it\n"
        "Traceback (most recent call last):\n"
        f'  File "{SCRIPT}", line N, in <module>\n'
        '    raise LookupError("only this rank can see it")\n'
        "LookupError: only this rank can see it\n"
    )


def dry_run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["launch", "--dry-run", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([WAN, SCRIPT], "--nproc-per-node 8 --standalone"),
        ([QWEN, "--nproc", 16, SCRIPT], "--nproc-per-node 16 --standalone"),
        (
            [WAN, "--nnodes", 2, "--rdzv-endpoint", "a:1", SCRIPT],
            "--nproc-per-node 4 --nnodes 2 --rdzv-id ulysses --rdzv-endpoint a:1 "
            "--rdzv-backend c10d",
        ),
        (
            [QWEN, "--nnodes", 2, "--nproc", 8, "--rdzv-endpoint", "a:1", "--node-rank", 1, SCRIPT],
            "--nproc-per-node 8 --nnodes 2 --rdzv-id ulysses --rdzv-endpoint a:1 "
            "--rdzv-backend static --node-rank 1",
        ),
        (
            [WAN, "--log-dir", "logs", SCRIPT],
            "--nproc-per-node 8 --standalone --log-dir logs --tee 3",
        ),
    ],
)
def test_what_torchrun_is_told(
    capsys: pytest.CaptureFixture[str], words: list[object], expected: str
) -> None:
    out = dry_run(capsys, "--config", *words, "--steps", "10", "--config", "own.yaml")
    assert f"torchrun {expected} --module ulysses.launch.worker {SCRIPT} " in out
    assert out.endswith("fail_on_rank_one.py --steps 10 --config own.yaml\n")
    assert f"ULYSSES_CONFIG={words[0]} " in out


def test_a_module_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(capsys, "--config", WAN, "-m", "my.module", "-m", "x")
    assert out.endswith("--module ulysses.launch.worker -m my.module -m x\n")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "parallel: {sp: 3, tp: 2}",
            ["--nproc", "4"],
            "tp*sp=6 does not divide world 4 (tp=2, sp=3)",
        ),
        ("parallel: {sp: 2, dp: 1}", ["--nproc", "4"], "dp*sp*tp=2 is not world 4 (dp=1, sp=2"),
        ("parallel: {sp: auto}", [], "parallel.sp is auto: say with --nproc how many processes"),
        ("parallel: {sp: 1, dp: 1, tp: auto}", [], "parallel.tp is auto: say with --nproc"),
        ("parallel: {sp: 2}", ["--nproc", "0"], "--nproc=0: give a whole number of at least 1"),
        ("parallel: {sp: 2}", ["--nnodes", "0"], "--nnodes=0: give a whole number of at least 1"),
        (
            "parallel: {sp: 3}",
            ["--nnodes", "2"],
            "3 processes (sp*tp*dp*cfg) can't be shared out evenly",
        ),
        ("parallel: {sp: 2}", ["--nnodes", "2"], "several nodes need --rdzv-endpoint HOST:PORT"),
        ("parallel: {sp_szie: 2}", [], "unknown key 'sp_szie' in parallel"),
        (
            "attention: {backend: foo}",
            [],
            "attention.backend='foo' is not known: give ascend, sdpa",
        ),
        (
            "parallel: {tp: 5}\nmodel: {num_heads: 12, head_dim: 8}",
            [],
            "num_heads=12 is not a multiple of tp=5: tp can be 1, 2, 3, 4, 6 or 12",
        ),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(agent, "run_torchrun", lambda *_: pytest.fail("torchrun was started"))
    config = str(written(tmp_path, text))
    assert main(["launch", "--config", config, *words, str(SCRIPT)]) == 2
    assert f"ulysses launch: error: {message}" in capsys.readouterr().err.replace(f"{config}: ", "")


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--config", str(WAN), "no_such.py"]) == 2
    assert "error: no script no_such.py; for a module put -m before it" in capsys.readouterr().err


def test_an_unknown_option_is_refused_and_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["launch", "--config", str(WAN), "--nprocs:", "4", str(SCRIPT)])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --nprocs:" in capsys.readouterr().err


def test_a_refusal_takes_no_time_and_loads_no_torch(tmp_path: Path) -> None:
    config = written(tmp_path, "parallel: {sp: 3, dp: 1}")
    code = (
        "import sys; from ulysses.launch.cli import main; "
        f"code = main(['launch', '--config', {str(config)!r}, '--nproc', '4', 'x.py']); "
        "sys.exit(100 if 'torch' in sys.modules else code)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 2
    assert time.monotonic() - start < 5


def test_help_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ulysses.launch", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "launch  run a script on as many processes" in done.stdout
    assert not re.search(r"\| +torch\b", done.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_two_functions(name: str) -> None:
    module = importlib.import_module(COMMANDS[name][0])
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_degrees_without_nproc_are_the_product() -> None:
    config = Config.from_mapping({"parallel": {"sp": 2, "tp": 3}})
    degrees = degrees_asked(config, num_nodes=1, per_node=None)
    assert dataclasses.asdict(degrees) == {"dp": 1, "cfg": 1, "sp": 2, "tp": 3}
    assert degrees_asked(config, num_nodes=2, per_node=6).dp == 2


def variables(environ: dict[str, str], **changed: Any) -> dict[str, str]:
    options: dict[str, Any] = {"config": WAN, "num_local_ranks": 8, "num_cores": 64, "npu": True}
    return added_variables(environ, **{**options, **changed})


@pytest.mark.parametrize(
    ("asked", "given"), [(1800, "1800"), (60, "120"), (120, "120"), (10000, "7200")]
)
def test_hccl_connect_timeout_stays_in_its_range(asked: int, given: str) -> None:
    assert variables({}, connect_timeout=asked)["HCCL_CONNECT_TIMEOUT"] == given


def test_variables_that_the_user_set_stay() -> None:
    assert variables({}) == {
        "ULYSSES_CONFIG": str(WAN),
        "OMP_NUM_THREADS": "8",
        "HCCL_CONNECT_TIMEOUT": "600",
    }
    user = {"HCCL_CONNECT_TIMEOUT": "60", "HCCL_EXEC_TIMEOUT": "0", "OMP_NUM_THREADS": "3"}
    assert variables(user) == {"ULYSSES_CONFIG": str(WAN)}


def test_hccl_variables_are_for_npus_only() -> None:
    assert "HCCL_CONNECT_TIMEOUT" not in variables({}, npu=False)
    assert variables({}, num_cores=2)["OMP_NUM_THREADS"] == "1"


def test_a_launched_process_finds_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_CONFIG", str(QWEN))
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert current_config() == load_config(QWEN)
    assert dataclasses.asdict(current_degrees()) == {"dp": 1, "cfg": 1, "sp": 4, "tp": 4}


def test_any_other_process_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ULYSSES_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="ULYSSES_CONFIG is not set: start the script with `uly"):
        current_config()


@pytest.mark.parametrize("module", [False, True])
def test_a_launched_script_sees_what_python_would_show_it(tmp_path: Path, module: bool) -> None:
    (tmp_path / "shown.py").write_text(
        "import json, sys; print(json.dumps([__name__, sys.argv, sys.path[0]]))"
    )
    words = ["-m", "shown"] if module else [str(tmp_path / "shown.py")]
    seen = []
    for prefix in ([], ["-m", "ulysses.launch.worker"]):
        command = [sys.executable, *prefix, *words, "-m", "x y"]
        out = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
        seen.append(json.loads(out.stdout))
    assert seen[0] == seen[1]
    assert seen[0][0] == "__main__"


def test_exit_handlers_get_their_time() -> None:
    code = (
        "import atexit, time; from ulysses.launch import ending; ending.EXIT_SECONDS = 1; "
        "atexit.register(time.sleep, 60); atexit.register(print, 'handled'); ending.end_process(3)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -14
    assert time.monotonic() - start < 10


def failure(folder: Path, local_rank: int, exitcode: int, message: str = "") -> ProcessFailure:
    path = folder / f"{local_rank}.json"
    if message:
        extra = {"py_callstack": f"Traceback of {message}\n", "timestamp": "1700000000"}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(local_rank, pid=1, exitcode=exitcode, error_file=str(path))


def test_the_report_ends_with_the_rank_that_failed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer\nmore"),
        1: failure(tmp_path, 1, 5, "LookupError: the cause"),
        2: failure(tmp_path, 2, -15),
    }
    for rank, moment in ((0, 2_000_000), (1, 1_000_000)):  # a millisecond apart
        os.utime(failures[rank].error_file, ns=(moment, moment))

    def run(_: object) -> None:
        raise agent.ChildFailedError("worker", failures)

    monkeypatch.setattr(agent.torchrun, "run", run)
    assert agent.run_torchrun(["script.py"], 3) == 5
    assert capsys.readouterr().err == (
        "rank 0: RuntimeError: Connection closed by peer\n"
        "rank 2: ended by SIGTERM\n"
        "\nulysses launch: rank 1 of 3 failed first: LookupError: the cause\n"
        "Traceback of LookupError: the cause\n"
    )


def test_a_rank_that_a_signal_ended_gives_the_shell_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> None:
        raise agent.ChildFailedError("worker", {0: failure(tmp_path, 0, -9)})

    monkeypatch.setattr(agent.torchrun, "run", run)
    assert agent.run_torchrun(["script.py"], 1) == 137
    assert "rank 0 of 1 failed first: ended by SIGKILL" in capsys.readouterr().err


def shell(script: str, tmp_path: Path, **variables: str) -> str:
    """What a script of launch/ would run: every program is replaced by one that tells its words."""
    for name, text in (
        ("python", '#!/bin/sh\nfor word; do printf "[%s]" "$word"; done\n'),
        ("srun", '#!/bin/sh\nshift\nSLURM_NODEID=1 exec "$@"\n'),
        ("scontrol", '#!/bin/sh\n[ "$*" = "show hostnames n[0-1]" ] && printf "n0\\nn1\\n"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    command = ["sh", str(ROOT / "launch" / script), "c.yaml", "train.py", "--name", "a b"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=30
    ).stdout


START = "[-m][ulysses.launch][launch][--config][c.yaml]"
SCRIPT_WORDS = "[train.py][--name][a b]"


def test_the_script_for_one_node(tmp_path: Path) -> None:
    assert shell("one_node.sh", tmp_path) == START + SCRIPT_WORDS
    assert shell("one_node.sh", tmp_path, NPROC="4") == f"{START}[--nproc][4]{SCRIPT_WORDS}"


def test_the_script_for_several_nodes(tmp_path: Path) -> None:
    meeting = {"NNODES": "2", "RENDEZVOUS": "n0:1"}
    nodes = f"{START}[--nnodes][2][--rdzv-endpoint][n0:1]"
    assert shell("several_nodes.sh", tmp_path, **meeting) == nodes + SCRIPT_WORDS
    assert shell("several_nodes.sh", tmp_path, **meeting, NODE_RANK="0", NPROC="8", JOB="j") == (
        f"{nodes}[--node-rank][0][--nproc][8][--rdzv-id][j]{SCRIPT_WORDS}"
    )


def test_the_script_for_slurm(tmp_path: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "70123", "SLURM_NNODES": "2"}
    assert shell("slurm.sh", tmp_path, **job) == (
        f"{START}[--nnodes][2][--rdzv-endpoint][n0:20123][--rdzv-id][70123][--node-rank][1]"
        f"{SCRIPT_WORDS}"
    )
