"""`ulysses launch` and `init_mesh` through torch_npu: devices, HCCL groups, HCCL's variables."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_launched_ranks_have_a_device_each_and_hccl_groups(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("parallel: {sp: 2, tp: 1, dp: 1}")
    command = [sys.executable, "-m", "ulysses.launch", "launch", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("HCCL_CONNECT_TIMEOUT", None)
    done = subprocess.run(
        [*command, str(ROOT / "tests/scripts/show_npu_mesh.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: npu:0 hccl sum 3.0 timeout 600",
        "rank 1: npu:1 hccl sum 3.0 timeout 600",
    ]
