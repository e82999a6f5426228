"""The stand-in operators: what they reject, and that each trap the kernel steps around is there."""

import re

import pytest
import torch

from tests import npu_ops
from tests.npu_ops.examples import TRIANGLE, tensors
from ulysses.backends.base import Band
from ulysses.conformance import reference_attention

npu_ops.install()


def infer(*qkv, **options):
    heads = {"num_heads": 4, "input_layout": "BSND", "scale": 0.25}
    return torch.ops.npu.npu_fused_infer_attention_score(*qkv, **heads | options)


def train(*qkv, **options):
    return torch.ops.npu.npu_fusion_attention(*qkv, 4, "BSND", scale=0.25, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sparse_mode": 3}, "attenMask should not be null when sparse_mode is 3."),
        ({"sparse_mode": 5, "atten_mask": TRIANGLE}, "sparse_mode = 5 is out of range."),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE[:6, :6]}, "must be 2048 x 2048"),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE.float()}, "invalid maskType dtype"),
        ({"input_layout": "SBH"}, "layout only support BSH"),
        ({"input_layout": "bsnd"}, "but got bsnd"),
        ({"num_key_value_heads": 3}, "numHeads(4) in key shape do not match"),
        (
            {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": -3, "next_tokens": -3},
            "must not be negative number in band mode",
        ),
    ],
)
def test_the_inference_operator_rejects(options, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        infer(*tensors(), **options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float32}, "can not be DT_FLOAT"),
        ({"dim": 24}, "D should be 32 bytes aligned, but now D = 24."),
        ({"dim": 528}, "now D = 528."),
        ({"kv_heads": 2}, "numHeads(2) in key shape do not match numKeyValueHeads(4) in attr!"),
    ],
)
def test_the_inference_operator_rejects_tensors(changes, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        infer(*tensors(**changes))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_prob": 0.0}, "The keep_prob value must be in range of (0, 1], but got 0.0"),
        ({"sparse_mode": 7}, "The sparse_mode value must be in range of [0,6]"),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE.char()}, "atten_mask must be bool or uint8"),
        ({"sparse_mode": 3, "atten_mask": TRIANGLE[:6, :6]}, "get unsupported atten_mask shape"),
        (
            {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 9, "next_tockens": -6},
            "there is no valid data block.",
        ),
    ],
)
def test_the_training_operator_rejects(options, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        train(*tensors(), **options)


def test_the_inference_operator_has_no_gradient():
    query, key, value = tensors()
    with pytest.raises(NotImplementedError, match="no autograd formula"):
        infer(query.requires_grad_(), key, value)
    with torch.no_grad():
        assert infer(query, key, value)[1].shape == (0,)


def test_the_inference_operator_ignores_the_mode_of_a_single_query():
    query, key, value = tensors(queries=1, keys=9)
    out, _ = infer(query, key, value, sparse_mode=2, atten_mask=TRIANGLE)
    full, _ = reference_attention(query, key, value, band=Band(), scale=0.25)
    assert (out - full).abs().max() < 0.05


def test_the_training_operator_ignores_a_mode_without_a_mask():
    query, key, value = tensors()
    assert torch.equal(train(query, key, value, sparse_mode=3)[0], train(query, key, value)[0])


def test_the_training_operator_overwrites_its_seed():
    patterns = []
    for seed in (7, 8):
        torch.manual_seed(0)
        patterns.append(train(*tensors(), keep_prob=0.5, seed=seed)[0])
    assert torch.equal(*patterns)


def test_a_row_without_keys_is_zero_and_its_statistics_are_not_minus_infinity():
    query, key, value = tensors(queries=6, keys=3)
    options = {"sparse_mode": 3, "atten_mask": TRIANGLE}
    out, lse = infer(query, key, value, **options, softmax_lse_flag=True)
    assert not out[:, :3].any()
    assert torch.equal(lse[0, :, :3], torch.full((4, 3, 1), torch.inf))
    out, largest, total, *_ = train(query, key, value, **options)
    assert not out[:, :3].any()
    assert largest.shape == total.shape == (1, 4, 6, 8)
    assert (largest[0, :, :3] + total[0, :, :3].log()).max() < -3e38


def test_a_gradient_into_the_softmax_statistics_is_dropped():
    query, key, value = tensors()
    out, largest, *_ = train(query.requires_grad_(), key, value)
    (largest.sum() + 0 * out.sum()).backward()
    assert not query.grad.any()


def test_a_mask_that_is_not_inverted_hides_the_wrong_keys():
    query, key, value = tensors()
    expected, _ = reference_attention(query, key, value, band=Band(None, 0), scale=0.25)
    for mask, is_right in ((TRIANGLE, True), (~TRIANGLE, False)):
        out, _ = infer(query, key, value, sparse_mode=3, atten_mask=mask)
        assert ((out - expected).abs().max() < 0.05) == is_right


@pytest.mark.parametrize(("run", "name"), [(infer, "quant_scale1"), (train, "padding_mask")])
def test_what_is_not_written_is_not_guessed(run, name):
    with pytest.raises(NotImplementedError, match=f"with {name}"):
        run(*tensors(), **{name: torch.zeros(1, 4, 6, 6)})
    with pytest.raises(NotImplementedError, match="sparse_mode 1"):
        run(*tensors(), sparse_mode=1, atten_mask=TRIANGLE)
