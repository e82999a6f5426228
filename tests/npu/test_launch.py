"""`ulysses launch` and `init_mesh` through torch_npu: devices, HCCL groups, HCCL's variables."""

from pathlib import Path

from tests.npu.programs import ULYSSES, run


def test_launched_ranks_have_a_device_each_and_hccl_groups(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("parallel: {sp: 2, tp: 1, dp: 1}")
    words = ["launch", "--config", str(config), "tests/scripts/show_npu_mesh.py"]
    code, printed = run([*ULYSSES, *words], HCCL_CONNECT_TIMEOUT=None)
    assert code == 0, printed
    assert sorted(line for line in printed.splitlines() if line.startswith("rank ")) == [
        "rank 0: npu:0 hccl sum 3.0 timeout 600",
        "rank 1: npu:1 hccl sum 3.0 timeout 600",
    ]
