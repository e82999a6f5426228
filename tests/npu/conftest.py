"""Tests on simulated NPUs: `make test-npu` runs them in .venv-npu, which has torch_npu."""

import warnings
from importlib.util import find_spec

if find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        # torch_npu's own modules warn while they are imported.
        warnings.simplefilter("ignore")
        import torch
        import torch_npu  # noqa: F401

    if not torch.npu.is_available():
        raise RuntimeError(
            "torch_npu finds no NPU: start pytest through tests/simulated_npu/build.py, "
            "or with `make test-npu`"
        )


def pytest_configure(config):
    # torch_npu asks for a private format and tells that it got the base one.
    config.addinivalue_line(
        "filterwarnings", "ignore:Cannot create tensor with internal format:UserWarning"
    )
