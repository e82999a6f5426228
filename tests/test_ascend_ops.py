"""The Ascend kernel on torch_npu's operators, which run here on CPU (tests/npu_ops)."""

import copy
import re
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests import npu_ops
from tests.npu_ops.arithmetic import hidden_keys
from tests.npu_ops.examples import TRIANGLE, tensors
from ulysses.backends import ascend_operators
from ulysses.backends.ascend import AscendAttention
from ulysses.backends.ascend_limits import choose_operator
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.ascend_sparse import rows_with_keys, sparse_arguments
from ulysses.backends.base import Band, Dropout, Problem
from ulysses.conformance import CASES, reference_attention
from ulysses.conformance_checks import Subject
from ulysses.conformance_dropout import check_dropout
from ulysses.testing import check_backend

CPU = torch.device("cpu")
FULL = Band()
npu_ops.install()


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Recorder(TorchFunctionMode):
    """Notes each call of the operators: (name, arguments by name)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "npu":
            names = (argument.name for argument in func._schema.arguments)
            bound = dict(zip(names, args, strict=False)) | kwargs
            self.calls.append((func._schema.name.partition("::")[2], bound))
        return func(*args, **kwargs)


def attend(query, key, value, band=FULL, **options):
    """One call of a fresh kernel: (output, the operator's name, its arguments)."""
    with Recorder() as recorder:
        out = AscendAttention()(query, key, value, band=band, scale=0.25, **options)
    ((name, arguments),) = recorder.calls
    return out, name, arguments


def test_ascend_passes_the_kit():
    report = check_backend("ascend")
    assert len(report.passed) == 3 * (2 * len(CASES) + 6)
    assert {name.partition(",")[0] for name, _ in report.refused} == {"float64"}


@pytest.mark.parametrize("version", npu_ops.SCHEMAS)
def test_every_recorded_version_takes_our_calls(version):
    """Argument lists differ between versions, and not in the order of their numbers."""
    namespace = f"npu_{version.replace('.', '_')}"
    npu_ops.install(namespace, version)
    subject = Subject(AscendAttention(namespace), CPU, torch.bfloat16)
    for case in CASES:
        if case.name in ("grouped heads", "causal window", "memory SBHD"):
            subject.check_forward(case)
            subject.check_backward(case)
    subject.check_log_sum_exp()
    check_dropout(subject)


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


# Head counts: what this project was started for.


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


# Which operator, which layout, which mode.


def problem(**changes) -> Problem:
    options = {
        "batch": 1,
        "num_queries": 8,
        "num_keys": 8,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "value_dim": 16,
        "dtype": torch.bfloat16,
        "device_type": "cpu",
        "requires_grad": False,
    }
    return Problem(**options | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, INFERENCE),
        ({"dtype": torch.float16}, INFERENCE),
        ({"dtype": torch.float32}, TRAINING),
        ({"requires_grad": True}, TRAINING),
        ({"dropout_p": 0.1}, TRAINING),
        ({"num_heads": 64, "num_kv_heads": 1}, INFERENCE),
        ({"num_heads": 65, "num_kv_heads": 1}, TRAINING),
        ({"num_keys": 262_145}, INFERENCE),
        ({"num_keys": 262_145, "num_queries": 1}, TRAINING),
    ],
)
def test_inference_runs_the_inference_operator_where_it_gives_the_answer(changes, name):
    assert choose_operator(problem(**changes)) == name


def test_a_gradient_that_is_disabled_asks_for_none():
    query, key, value = tensors()
    with torch.no_grad():
        assert attend(query.requires_grad_(), key, value)[1] == INFERENCE
    assert attend(query, key, value.requires_grad_())[1] == TRAINING
    assert attend(query.detach(), key, value.detach(), dropout=Dropout(p=0.1, seed=1))[1] == (
        TRAINING
    )


@pytest.mark.parametrize(
    ("order", "layout"), [((0, 1, 2, 3), "BSND"), ((1, 0, 2, 3), "BSND"), ((0, 2, 1, 3), "BNSD")]
)
def test_rows_that_lie_in_order_are_not_copied(order, layout):
    """[B, S, H, D], what the exchange delivers ([S, B, H, D]), and [B, H, S, D]."""
    inverse = sorted(range(4), key=order.__getitem__)
    given = [
        tensor.permute(order).contiguous().permute(inverse)
        for tensor in tensors(batch=3, kv_heads=2, keys=9)
    ]
    out, _, arguments = attend(*given)
    assert arguments["input_layout"] == layout
    for name, tensor in zip(("query", "key", "value"), given, strict=True):
        assert arguments[name].data_ptr() == tensor.data_ptr()
    assert out.permute(order).is_contiguous()


def test_a_batch_that_would_make_too_many_heads_is_copied_instead():
    query, key, value = (
        tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for tensor in tensors(batch=65, heads=4, queries=2, keys=2)
    )
    out, _, arguments = attend(query, key, value)
    assert tuple(arguments["query"].shape) == (65, 2, 4, 16)
    assert (
        out - reference_attention(query, key, value, band=Band(), scale=0.25)[0]
    ).abs().max() < (0.05)


def test_rows_too_wide_for_bsnd_are_run_as_bnsd():
    """N * D of one row has to stay under 65,535 in BSND."""
    assert attend(*tensors(queries=2, keys=2, heads=128, dim=512))[2]["input_layout"] == "BNSD"
    assert attend(*tensors(queries=2, keys=2, heads=127, dim=512))[2]["input_layout"] == "BSND"


@pytest.mark.parametrize(
    ("band", "queries", "keys", "expected"),
    [
        (Band(), 5, 9, 0),
        (Band(-50, 50), 5, 9, 0),
        (Band(None, 0), 9, 9, 3),
        (Band(None, 4), 5, 9, 3),
        (Band(None, 0), 5, 9, 2),
        (Band(None, 2), 5, 9, 4),
        (Band(-2, 0), 9, 9, 4),
        (Band(2, 4), 5, 9, 4),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_band_is_a_sparse_mode_and_never_a_mask_of_its_own(band, queries, keys, expected, grad):
    query, key, value = tensors(queries=queries, keys=keys)
    _, _, arguments = attend(query.requires_grad_(grad), key, value, band)
    assert arguments.get("sparse_mode", 0) == expected
    mask = arguments.get("atten_mask")
    assert mask is None if expected == 0 else torch.equal(mask, TRIANGLE)


def test_every_small_band_shows_what_its_mask_shows():
    sides = [None, *range(-6, 7)]
    for queries, keys in [(2, 2), (2, 5), (5, 2), (5, 5), (4, 6), (6, 3)]:
        for lower in sides:
            for upper in sides:
                band = Band(lower, upper)
                visible = band.mask(queries, keys, CPU)
                rows = visible.any(1).nonzero().flatten().tolist()
                assert list(rows_with_keys(band, queries, keys)) == rows
                if not rows:
                    continue
                arguments = sparse_arguments(band, queries, keys)
                assert arguments.has_empty_rows == (len(rows) < queries)
                hidden = hidden_keys(
                    arguments.mode,
                    arguments.pre_tokens,
                    arguments.next_tokens,
                    TRIANGLE if arguments.mode else None,
                    queries,
                    keys,
                )
                assert visible.all() if hidden is None else torch.equal(hidden, ~visible)


def test_one_query_is_given_only_the_keys_that_it_sees():
    """The inference operator ignores sparse modes when there is one query."""
    query, key, value = tensors(queries=1, keys=9)
    assert attend(query, key, value, Band(2, 5))[2]["key"].shape[1] == 4


def test_head_dims_are_padded_with_zeros_only_where_the_operator_needs_it():
    query, key, value = tensors(dim=20)
    _, _, arguments = attend(query, key, value[..., :5])
    assert [arguments[name].shape[3] for name in ("query", "key", "value")] == [32, 32, 32]
    _, _, arguments = attend(query.requires_grad_(), key, value[..., :5])
    assert [arguments[name].shape[3] for name in ("query", "key", "value")] == [20, 20, 5]
    _, _, arguments = attend(query[..., :5], key[..., :5], value)
    assert [arguments[name].shape[3] for name in ("query", "key", "value")] == [20, 20, 20]


# Refusals, and what surrounds the calls.


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


def test_no_problem_needs_a_mask_of_its_own():
    kernel = AscendAttention()
    assert not any(
        kernel.materialises(problem(band=case.band, num_queries=9, num_keys=5)) for case in CASES
    )


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
