"""Programs of fresh processes on NPUs: a published layout under torchrun, and the demo's model."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str]) -> str:
    """What a program says; its complaint where it fails."""
    # torch_npu warns below 300, and the processes need this checkout.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_40_heads_over_tp_2_and_sp_4_leave_5_a_rank() -> None:
    """The layout in which a head count from before the exchange, 20, is not the 5 of the call."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8"]
    script = [str(ROOT / "tests/scripts/attend_in_tp_and_sp.py")]
    config = str(ROOT / "configs/wan2.2_t2v_a14b.yaml")
    out = run([*torchrun, "--standalone", *script, config, "37"])
    assert sorted(line for line in out.splitlines() if line.startswith("rank ")) == [
        f"rank {rank}: npu:{rank} hccl, 20 heads after tp, 5 after sp, equal" for rank in range(8)
    ]


def test_the_demo_scores_alike_on_npus_and_in_one_process() -> None:
    out = run([sys.executable, "-m", "ulysses.launch", "demo", "--device", "npu", "--tokens", "24"])
    assert "equal to the tolerance" in out
