"""The Ascend kernel on torch_npu's operators, which run here on CPU (tests/npu_ops)."""

import copy
import re
import sys

import pytest
import torch

from tests import npu_ops
from tests.npu_ops.examples import TRIANGLE, Recorder, attend, problem, tensors
from ulysses.backends import Band, Dropout, ascend_operators
from ulysses.backends.ascend import AscendAttention
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.conformance import CASES, reference_attention
from ulysses.conformance_checks import Subject
from ulysses.conformance_dropout import check_dropout
from ulysses.conformance_pieces import check_pieces
from ulysses.testing import check_backend

CPU = torch.device("cpu")
npu_ops.install()


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_ascend_passes_the_kit():
    report = check_backend("ascend")
    num_checks = 2 * len(CASES) + 7
    assert len(report.passed) == 3 * num_checks
    assert len(report.refused) == num_checks
    assert all(name.startswith("float64") for name, _ in report.refused)


@pytest.mark.parametrize("version", npu_ops.SCHEMAS)
def test_every_recorded_version_takes_our_calls(version):
    """Argument lists differ between versions, and not in the order of their numbers."""
    namespace = f"npu_{version.replace('.', '_')}"
    npu_ops.install(namespace, version)
    subject = Subject(AscendAttention(namespace), CPU, torch.bfloat16)
    for case in CASES:
        if case.name in (
            "grouped heads",
            "causal window",
            "memory SBHD",
            "float mask, window",
            "sinks",
        ):
            subject.check_forward(case)
            subject.check_backward(case)
    subject.check_log_sum_exp()
    check_dropout(subject)
    check_pieces(subject)


def test_recorded_schemas_are_those_that_the_wheels_were_seen_to_have():
    """The drift that matters here: FA's arguments, and what its gradient returns."""
    counts = {}
    for version, schemas in npu_ops.SCHEMAS.items():
        parsed = {name: torch._C.parse_schema(f"npu::{text}") for name, text in schemas.items()}
        counts[version] = (
            len(parsed[INFERENCE].arguments),
            len(parsed[TRAINING].arguments),
            len(parsed[f"{TRAINING}_grad"].returns),
        )
    assert counts == {
        "2.7.1": (40, 20, 4),
        "2.9.1": (40, 24, 5),
        "2.13.0": (40, 24, 5),
        "2.14.0": (40, 24, 5),
    }


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (20, 20), (40, 8), (5, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_the_operator_is_told_the_head_counts_of_its_tensors(heads, kv_heads, grad):
    query, key, value = tensors(heads=heads, kv_heads=kv_heads)
    _, name, arguments = attend(query.requires_grad_(grad), key, value)
    if grad:
        assert (name, arguments["head_num"]) == (TRAINING, heads)
    else:
        assert (name, arguments["num_heads"]) == (INFERENCE, heads)
        assert arguments["num_key_value_heads"] == kv_heads


def test_the_kernel_keeps_nothing_but_a_constant_between_calls():
    kernel = AscendAttention()
    for heads in (20, 5, 20):
        kernel(*tensors(heads=heads), band=Band(None, 0), scale=0.25)
    assert set(vars(kernel)) == {"_namespace", "_triangles"}
    assert list(kernel._triangles) == [CPU]
    assert torch.equal(kernel._triangles[CPU], TRIANGLE)


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_a_cached_head_count_is_an_error_in_the_layouts_that_we_use(layout):
    """40 heads at tp=2, sp=4: a count of 20 kept from before the exchange, and 5 heads after it."""
    q, k, v = tensors(heads=5)
    if layout == "BNSD":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    cached = {"input_layout": layout, "scale": 0.25}
    with pytest.raises(RuntimeError) as infer_error:
        torch.ops.npu.npu_fused_infer_attention_score(
            q, k, v, num_heads=20, num_key_value_heads=20, **cached
        )
    assert "error code is 561002" in str(infer_error.value)
    assert "numHeads(5) in query shape must be equal to numHeads(20) in attr!" in str(
        infer_error.value
    )
    with pytest.raises(RuntimeError, match=re.escape("head_num is [20], but got query dim1 [5].")):
        torch.ops.npu.npu_fusion_attention(q, k, v, 20, **cached)


@pytest.mark.parametrize("name", [INFERENCE, TRAINING])
def test_a_cached_head_count_would_be_silently_wrong_in_bsh(name):
    """Nothing is there to compare 20 with: 5 heads of 128 are taken for 20 of 32."""
    q, k, v = tensors(heads=5, dim=128)
    flat = [tensor.flatten(2) for tensor in (q, k, v)]
    expected, _ = reference_attention(q, k, v, band=Band(), scale=0.25)

    def error(heads):
        counts = (
            {"num_heads": heads, "num_key_value_heads": heads}
            if name == INFERENCE
            else {"head_num": heads}
        )
        out = getattr(torch.ops.npu, name)(*flat, **counts, input_layout="BSH", scale=0.25)[0]
        return (out.unflatten(2, (5, 128)) - expected).abs().max().item()

    assert error(5) < 0.05
    assert error(20) > 0.5


def test_a_layout_that_hides_the_heads_is_never_used():
    layouts = set()
    for case in CASES:
        for grad in (False, True):
            query, key, value = case.tensors(torch.bfloat16, CPU)
            with Recorder() as recorder:
                AscendAttention()(
                    query.requires_grad_(grad), key, value, band=case.band, scale=0.25
                )
            layouts |= {arguments["input_layout"] for _, arguments in recorder.calls}
    assert layouts == {"BSND", "BNSD"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device_type": "cuda"}, "device type 'cuda': npu_fused_infer_attention_score has no ker"),
        ({"device_type": "npu"}, "move the tensors to 'npu', or pass backend='sdpa'"),
        ({"dtype": torch.float64}, "dtype=torch.float64: the Ascend operators take torch.float16"),
        ({"num_heads": 300, "num_kv_heads": 300}, "num_heads=300 on one rank: .* at most 256;"),
        ({"head_dim": 520}, "head_dim=520, value_dim=16: .* at most 512"),
        ({"value_dim": 513, "requires_grad": True}, "value_dim=513: npu_fusion_attention takes"),
        ({"batch": 70_000}, "batch=70000: .* at most 65536"),
        ({"num_keys": 2**20 + 1, "requires_grad": True}, "num_keys=1048577: .* most 1048576 rows"),
        ({"num_queries": 20_971_521}, "num_queries=20971521, .* at most 20971520 rows"),
        ({"dropout_p": 1.0}, "dropout_p=1.0: npu_fusion_attention takes 0 <= dropout_p < 1"),
    ],
)
def test_what_the_operator_would_reject_is_refused_beforehand(changes, text):
    assert re.search(text, AscendAttention().unsupported(problem(**changes)))


def test_a_refused_problem_is_refused_in_the_call_too():
    with pytest.raises(ValueError, match=r"dtype=torch\.float64"):
        AscendAttention()(*tensors(dtype=torch.float64), band=Band(), scale=1.0)


def test_no_band_needs_a_mask_of_its_own():
    kernel = AscendAttention()
    assert not any(
        kernel.materialises(problem(band=case.band, num_queries=9, num_keys=5)) for case in CASES
    )
    assert kernel.materialises(problem(mask_shape=(1, 1, 1, 8), mask_dtype=torch.bool))
    assert kernel.materialises(problem(alibi=True))


def test_the_log_sum_exp_has_no_gradient():
    """The operator's formula would drop one without a word."""
    query, key, value = tensors()
    out, lse = AscendAttention().attend_with_lse(
        query.requires_grad_(), key, value, band=Band(None, -2), scale=0.25
    )
    assert out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(lse[:, :2], torch.full((1, 2, 4), -torch.inf))


def test_the_triangle_serves_training_after_inference():
    kernel = AscendAttention()
    with torch.inference_mode():
        kernel(*tensors(), band=Band(None, 0), scale=0.25)
    query, key, value = tensors()
    kernel(query.requires_grad_(), key, value, band=Band(None, 0), scale=0.25).sum().backward()
    assert query.grad is not None


def test_a_copy_of_the_kernel_works():
    kernel = AscendAttention()
    kernel(*tensors(), band=Band(None, 0), scale=0.25)
    out = copy.deepcopy(kernel)(*tensors(), band=Band(None, 0), scale=0.25)
    assert torch.equal(out, kernel(*tensors(), band=Band(None, 0), scale=0.25))


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ascend_operators, "TRAINING", "an_operator_that_nobody_registered")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ImportError, match=r"needs torch_npu.*install ulysses\[npu\].*set_env\.sh"):
        AscendAttention()


def test_the_operators_seed_argument_is_not_trusted():
    """It is documented, and overwritten by the default generator, so that is what we set."""
    dropout = Dropout(p=0.5, seed=7)
    assert "seed" not in attend(*tensors(), dropout=dropout)[2]
