"""The conformance kit on the Ascend kernel, through torch_npu's own operators."""

import pytest
import torch

from ulysses.backends import get_backend
from ulysses.conformance import CASES
from ulysses.testing import check_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ascend_passes_the_kit(dtype: torch.dtype) -> None:
    report = check_backend("ascend", device="npu", dtypes=(dtype,))
    assert len(report.passed) == 2 * len(CASES) + 7
    assert not report.refused


def test_auto_is_ascend() -> None:
    assert get_backend("auto", "npu") is get_backend("ascend", "npu")
