"""`ulysses doctor` on simulated NPUs: right as they are, and each planted fault named."""

from tests.npu.programs import ULYSSES, run


def doctor(num_ranks: int, **variables: str) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    return run([*ULYSSES, "doctor", "--nproc", str(num_ranks)], **variables)


def test_the_simulation_passes() -> None:
    code, printed = doctor(2)
    assert code == 0, printed
    assert "Ascend910" in printed
    assert "To be trusted: 2 x npu, kernels and all-to-all are right." in printed


def test_both_faults_are_named_on_three_devices() -> None:
    code, printed = doctor(3, SIMNPU_FAULT="uniform_average,alltoall_zeros")
    assert code == 1, printed
    for operator in ("npu_fused_infer_attention_score", "npu_fusion_attention"):
        assert f"WRONG: {operator} fails" in printed
    assert "output is the plain average of the values: scores have no effect" in printed
    assert "all-to-all, even, 4 KiB, among 3 processes: rank 0 received zeros from" in printed
    assert "NOT to be trusted" in printed


def test_without_set_env_that_is_what_is_said() -> None:
    cann = {"ASCEND_HOME_PATH": "", "ASCEND_OPP_PATH": "", "LD_LIBRARY_PATH": ""}
    code, printed = doctor(1, **cann)
    assert code == 1, printed
    assert "WRONG: ASCEND_HOME_PATH is not set: CANN's set_env.sh was not sourced" in printed
    assert "WRONG: torch does not import: " in printed
