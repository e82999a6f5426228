"""UlyssesAttention over NPUs and HCCL: outputs and gradients equal the CPU's."""

from dataclasses import replace

import pytest
import torch

from tests.npu.layer_cases import CASES, GRIDS, Case, differences, operators_called

# Units in the last place of the largest value: of float32 sums, and of bfloat16 as rounded inputs
# of the second product and as results.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
# Each rank waits for the slowest, and the machine may have two cores.
TIMEOUT = 60


def check(npus, num_ranks: int, case: Case, dtype: torch.dtype) -> None:
    for rank, found in enumerate(npus(num_ranks).run(differences, case, dtype, timeout=TIMEOUT)):
        for name, difference in found.items():
            assert difference <= BOUNDS[dtype], (rank, name)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_layer_equals_one_process(npus, num_ranks, name, dtype):
    check(npus, num_ranks, CASES[name], dtype)


@pytest.mark.parametrize("name", ["grouped heads", "causal, grouped, uneven", "key padding"])
def test_the_layer_equals_one_process_over_eight(npus, name):
    check(npus, 8, CASES[name], torch.bfloat16)


@pytest.mark.parametrize("name", ["causal", "causal window", "key padding, causal", "documents"])
@pytest.mark.parametrize(("num_ranks", "grid"), [(n, g) for n, gs in GRIDS.items() for g in gs])
def test_rows_are_split_too(npus, num_ranks, grid, name):
    """Causality of a block of rows counts from its own corner: a band, and seldom mode 3."""
    check(npus, num_ranks, replace(CASES[name], grid=grid), torch.bfloat16)


@pytest.mark.parametrize(("num_ranks", "grid"), [(2, (2, 1)), (4, (2, 2))])
def test_documents_are_one_call(npus, num_ranks, grid):
    """Three of them, and rows behind, on each rank that has rows of more than one."""
    case = replace(CASES["documents"], grid=grid, dims=(64, 64))
    several = 0
    for called in npus(num_ranks).run(operators_called, case, torch.bfloat16, timeout=TIMEOUT):
        layouts = [layout for _, layout in called]
        if "TND" in layouts:
            several += 1
            names = ["npu_fused_infer_attention_score", "npu_fusion_attention"]
            assert called == [(name, "TND") for name in names]
    assert several >= num_ranks / grid[1]
