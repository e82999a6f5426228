"""Programs of fresh processes on NPUs: a published layout under torchrun, and the demo's model."""

from tests.npu.programs import TORCHRUN, ULYSSES, run


def test_40_heads_over_tp_2_and_sp_4_leave_5_a_rank() -> None:
    """The layout in which a head count from before the exchange, 20, is not the 5 of the call."""
    words = ["tests/scripts/attend_in_tp_and_sp.py", "configs/wan2.2_t2v_a14b.yaml", "37"]
    code, printed = run([*TORCHRUN, "--nproc-per-node", "8", *words])
    assert code == 0, printed
    assert sorted(line for line in printed.splitlines() if line.startswith("rank ")) == [
        f"rank {rank}: npu:{rank} hccl, 20 heads after tp, 5 after sp, equal" for rank in range(8)
    ]


def test_the_demo_scores_alike_on_npus_and_in_one_process() -> None:
    code, printed = run([*ULYSSES, "demo", "--device", "npu", "--tokens", "24"])
    assert code == 0, printed
    assert "equal to the tolerance" in printed
