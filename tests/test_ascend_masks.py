"""What the Ascend kernel makes of masks, ALiBi and sinks for the operators (tests/npu_ops)."""

import pytest
import torch

from tests import npu_ops
from tests.npu_ops.examples import TRIANGLE, attend, problem, tensors
from ulysses.backends import Band
from ulysses.backends.ascend import AscendAttention
from ulysses.backends.ascend_limits import choose_operator, needs_float32
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.base import Alibi

UNBOUNDED = 2147483647
npu_ops.install()


def inputs(*, grad, batch=3, queries=6):
    query, key, value = tensors(batch=batch, queries=queries, keys=9, heads=4, kv_heads=2)
    return query.requires_grad_(grad), key, value


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ((1, 1, 1, 9), (1, 1, 6, 9)),
        ((1, 1, 6, 9), (1, 1, 6, 9)),
        ((3, 1, 1, 9), (3, 1, 6, 9)),
        ((3, 1, 6, 1), (3, 1, 6, 9)),
        ((3, 1, 6, 9), (3, 1, 6, 9)),
        ((1, 4, 6, 9), (3, 4, 6, 9)),
        ((3, 4, 1, 9), (3, 4, 6, 9)),
    ],
)
def test_a_mask_is_inverted_and_written_out_in_a_shape_that_is_taken(given, passed, grad):
    """Nothing broadcasts; a mask for each head goes to the operator that reads all of them."""
    mask = torch.rand(given, generator=torch.Generator().manual_seed(0)) < 0.6
    _, name, arguments = attend(*inputs(grad=grad), mask=mask)
    assert name == (TRAINING if grad or given[1] > 1 else INFERENCE)
    assert torch.equal(arguments["atten_mask"], ~mask.expand(passed))
    assert arguments["atten_mask"].is_contiguous()
    assert arguments["sparse_mode"] == 0
    assert arguments["inner_precise"] == 2
    tokens = {value for name, value in arguments.items() if name.startswith(("pre_t", "next_t"))}
    assert tokens == {UNBOUNDED}


@pytest.mark.parametrize("grad", [False, True])
def test_a_band_goes_into_the_mask(grad):
    padding = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    padding[1, ..., 7:] = False
    band = Band(None, 3)
    _, _, arguments = attend(*inputs(grad=grad), band, mask=padding)
    visible = band.mask(6, 9, torch.device("cpu")) & padding
    assert torch.equal(arguments["atten_mask"], ~visible)


def test_the_kernel_of_one_query_gets_a_row_for_each_batch_entry():
    mask = torch.arange(9).view(1, 1, 1, 9) % 2 == 0
    _, _, arguments = attend(*inputs(grad=False, queries=1), Band(2, 6), mask=mask)
    assert torch.equal(arguments["atten_mask"], ~mask[..., 2:7].expand(3, 1, 1, 5))


@pytest.mark.parametrize(("grad", "name", "over"), [(False, "pse_shift", 1.0), (True, "pse", 0.25)])
def test_a_float_mask_is_a_bias_in_each_operators_own_way(grad, name, over):
    """One adds it to the scaled scores, the other scales it with them; -inf hides instead."""
    mask = torch.randn(1, 1, 6, 9, generator=torch.Generator().manual_seed(0))
    hidden = mask > 1
    mask = mask.masked_fill(hidden, -torch.inf).bfloat16()
    out, _, arguments = attend(*inputs(grad=grad), mask=mask)
    assert torch.equal(arguments["atten_mask"], hidden)
    expected = mask.float().masked_fill(hidden, 0.0) / over
    assert torch.equal(arguments[name].float(), expected.expand(1, 4, 6, 9))
    assert arguments[name].is_contiguous()
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"mask_dtype": torch.bfloat16}, True),
        ({"mask_dtype": torch.bool, "requires_grad": True}, True),
        ({"mask_dtype": torch.float32}, False),
        ({"mask_dtype": torch.bfloat16, "requires_grad": True}, False),
        ({"mask_dtype": torch.bfloat16, "mask_shape": (1, 4, 8, 8)}, False),
        ({"mask_dtype": torch.bfloat16, "dropout_p": 0.1}, False),
        ({"mask_dtype": torch.bfloat16, "alibi": True}, False),
        ({"mask_dtype": torch.float32, "dtype": torch.float32, "requires_grad": True}, True),
    ],
)
def test_a_bias_that_would_be_rounded_is_added_in_float32(changes, exact):
    asked = problem(**{"mask_shape": (1, 1, 8, 8)} | changes)
    assert needs_float32(asked) == (not exact)
    assert exact or choose_operator(asked) == TRAINING


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_biases_keep_their_digits(dtype, grad):
    mask = torch.linspace(-103, -100, 9).to(dtype).view(1, 1, 1, 9)
    query, key, value = inputs(grad=grad)
    out = attend(query, key, value, mask=mask)[0]
    near = attend(query, key, value, mask=mask.float() + 100)[0]
    assert (out - near).abs().max() <= 0.01


@pytest.mark.parametrize(("dtype", "grad"), [(torch.float16, True), (torch.bfloat16, True)])
def test_numbers_that_stand_for_minus_infinity_stay_finite(dtype, grad):
    """A mask of the most negative number, in place of -inf, would overflow when it is unscaled."""
    query, key, value = (tensor.to(dtype) for tensor in tensors(queries=2, keys=3))
    mask = torch.zeros(1, 1, 1, 3, dtype=dtype)
    mask[..., 1] = torch.finfo(dtype).min
    out, _, arguments = attend(query.requires_grad_(grad), key, value, mask=mask)
    assert arguments["pse"].isfinite().all()
    others = [0, 2]
    alone = attend(query, key[:, others], value[:, others])[0]
    torch.testing.assert_close(out, alone)


@pytest.mark.parametrize("grad", [False, True])
def test_alibi_keeps_the_sparse_mode_of_its_band(grad):
    slopes = 0.5 ** torch.arange(1, 5)
    alibi = Alibi(slopes, distance=2)
    _, _, arguments = attend(*inputs(grad=grad), Band(None, 3), alibi=alibi)
    assert arguments["sparse_mode"] == 3
    assert torch.equal(arguments["atten_mask"], TRIANGLE)
    assert torch.equal(arguments["pse"], alibi.bias(range(6), range(9)) / 0.25)


def test_a_batch_is_run_as_heads_only_where_its_entries_share_the_mask():
    query, key, value = (
        tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs(grad=False)
    )
    shared, own = torch.ones(1, 1, 6, 9).bool(), torch.ones(3, 1, 6, 9).bool()
    assert tuple(attend(query, key, value, mask=shared)[2]["query"].shape) == (1, 6, 12, 16)
    assert tuple(attend(query, key, value, mask=own)[2]["query"].shape) == (3, 6, 4, 16)
    biased = attend(query, key, value, mask=shared.float())[2]
    assert tuple(biased["query"].shape) == (3, 6, 4, 16)


def test_rows_that_a_mask_empties_are_zero_whatever_the_operator_says():
    mask = torch.ones(3, 1, 6, 9, dtype=torch.bool)
    mask[1, :, 4] = False
    query, key, value = inputs(grad=True)
    out, lse = AscendAttention().attend_with_lse(
        query, key, value, band=Band(), scale=0.25, mask=mask
    )
    out.float().square().sum().backward()
    assert not out[1, 4].any()
    assert not query.grad[1, 4].any()
    assert torch.equal(lse == -torch.inf, ~mask.any(-1).transpose(1, 2).expand(3, 6, 4))
