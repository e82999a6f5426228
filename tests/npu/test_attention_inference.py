"""npu_fused_infer_attention_score: values, refusals, and wrong calls that a device accepts."""

import re

import pytest
import torch

from tests.npu.attention_cases import (
    TRIANGLE,
    attention,
    cumulative,
    draw,
    from_layout,
    infer,
    outside,
    qkv,
    scores,
    to_layout,
)

ROUNDING = {"rtol": 0.0, "atol": 0.012}  # of a bfloat16 output around 1
LSE = {"rtol": 0.0, "atol": 1e-4}
LOWEST = torch.finfo(torch.float32).min

# The mask's name, its options, and (queries, keys) -> what it hides.
MASKS = {
    "full": ({}, lambda _q, _k: None),
    "left up": (
        {"sparse_mode": 2, "atten_mask": TRIANGLE},
        lambda q, k: outside(q, k, None, 0, right=False),
    ),
    "right down": (
        {"sparse_mode": 3, "atten_mask": TRIANGLE[None]},
        lambda q, k: outside(q, k, None, 0),
    ),
    "band": (
        {"sparse_mode": 4, "atten_mask": TRIANGLE[None, None], "pre_tokens": 3, "next_tokens": 1},
        lambda q, k: outside(q, k, 3, 1),
    ),
}
PADDED = [("BNSD", "BNSD"), ("BSND", "BSND"), ("BSH", "BSH"), ("BNSD_BSND", "BSND")]
PACKED = [("TND", "TND"), ("NTD_TND", "TND")]


def run(tensors, layout, out_layout=None, **options):
    """A call on [B, N, S, D] tensors: output [B, N, Sq, D] and LSE [B, N, Sq] on the CPU."""
    query, key, _ = tensors
    batch, heads = query.shape[:2]
    inputs = [to_layout(tensor, layout.split("_")[0]) for tensor in tensors]
    given = {"num_heads": heads, "num_key_value_heads": key.shape[1], "scale": 0.2}
    given |= {"input_layout": layout, "softmax_lse_flag": True}
    if "T" in layout:
        given["actual_seq_lengths"] = cumulative(batch, query.shape[2])
        given["actual_seq_lengths_kv"] = cumulative(batch, key.shape[2])
    out, lse = infer(*inputs, **given | options)
    out = from_layout(out.cpu().float(), out_layout or layout, batch, heads)
    lse = from_layout(lse.cpu(), "TND" if "T" in layout else "BNSD", batch, heads)
    return out, lse.squeeze(-1)


def check(results, tensors, hidden):
    out, lse = results
    torch.testing.assert_close(out, attention(*tensors, 0.2, hidden), **ROUNDING)
    torch.testing.assert_close(lse, scores(*tensors[:2], 0.2, hidden).logsumexp(-1), **LSE)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("layout", "out_layout"), PADDED)
def test_padded_values(layout, out_layout, mask, version):
    tensors = qkv(kv_heads=2, queries=6, keys=9)
    options, hides = MASKS[mask]
    check(run(tensors, layout, out_layout, version=version, **options), tensors, hides(6, 9))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mask", ["full", "right down", "band"])
@pytest.mark.parametrize(("layout", "out_layout"), PACKED)
def test_packed_values(layout, out_layout, mask, version):
    tensors = qkv(kv_heads=1, queries=5, keys=8, dim=128)
    options, hides = MASKS[mask]
    check(run(tensors, layout, out_layout, version=version, **options), tensors, hides(5, 8))


def test_one_query_row_takes_another_kernel():
    tensors = qkv(batch=3, queries=1, keys=8)
    hidden = draw(3, 1, 1, 8, seed=5) > 0
    for mask in (None, hidden, hidden[:, 0], hidden[:, 0, 0]):
        found = run(tensors, "BSND", atten_mask=mask)
        check(found, tensors, None if mask is None else hidden)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_written_masks_hide_where_they_are_true(dtype):
    tensors = qkv()
    hidden = draw(2, 1, 7, 7, seed=5) > 0.5
    for mask in (hidden, hidden[:, 0], hidden[:1, 0], hidden[0, 0]):
        check(run(tensors, "BNSD", atten_mask=mask.to(dtype)), tensors, mask.view(-1, 1, 7, 7))
    larger = torch.ones(9, 12, dtype=torch.bool)
    larger[:7, :7] = hidden[0, 0]
    check(run(tensors, "BNSD", atten_mask=larger, sparse_mode=1), tensors, hidden[:1])


def test_lengths_of_each_batch_entry():
    tensors = qkv(queries=6, keys=9)
    options = {"actual_seq_lengths": [4, 6], "actual_seq_lengths_kv": [5]}
    out, lse = run(tensors, "BSND", **options)
    reference = attention(*tensors, 0.2, torch.arange(9) >= 5)
    reference[0, :, 4:] = 0
    torch.testing.assert_close(out, reference, **ROUNDING)
    assert torch.isposinf(lse[0, :, 4:]).all()
    assert torch.isfinite(lse[0, :, :4]).all()


def test_packed_entries_of_different_lengths():
    query, key, value = (draw(9, 2, 64, seed=seed) for seed in (1, 2, 3))
    options = {"num_heads": 2, "input_layout": "TND", "scale": 0.2, "softmax_lse_flag": True}
    lengths = {"actual_seq_lengths": [2, 2, 9], "actual_seq_lengths_kv": [4, 4, 9]}
    out, lse = infer(query, key, value, **options, **lengths)
    assert lse.shape == (9, 2, 1)
    for rows, keys in ((slice(0, 2), slice(0, 4)), (slice(2, 9), slice(4, 9))):
        entry = [t.transpose(0, 1)[None] for t in (query[rows], key[keys], value[keys])]
        found = out.cpu().float()[rows].transpose(0, 1)[None]
        torch.testing.assert_close(found, attention(*entry, 0.2), **ROUNDING)


def test_packed_calls_take_the_key_heads_from_key():
    tensors = qkv(kv_heads=2, dim=64)
    check(run(tensors, "TND", num_key_value_heads=0), tensors, None)
    check(run(tensors, "TND", num_key_value_heads=3), tensors, None)


def test_no_keys_give_zeros():
    out, lse = run(qkv(keys=0), "BNSD")
    assert not out.any()
    assert torch.isposinf(lse).all()


def test_pse_shift_is_added_to_the_scaled_scores():
    query, key, value = qkv()
    shift = draw(1, 4, 7, 8, seed=5)
    out, _ = run((query, key, value), "BNSD", pse_shift=shift)
    weights = (scores(query, key, 0.2) + shift[..., :7].float()).softmax(-1)
    torch.testing.assert_close(out, weights @ value.float(), **ROUNDING)


def test_no_lse_is_an_empty_tensor():
    *_, lse = infer(*qkv(), num_heads=4, input_layout="BNSD")
    assert lse.shape == (0,)


# --- refusals ---------------------------------------------------------------------------------

# What differs from a good call on 4 heads of dim 16, [2, 4, 7, 16]; and a part of CANN's text.
REFUSED = {
    "heads": ({"num_heads": 20}, "[CheckQShape] query layout is BNSD, shape [2, 4, 7, 16] should "
              "be equal to [2, 20, 7, 16]"),
    "heads bsnd": ({"input_layout": "BSND", "num_heads": 20},
                   "[CheckQShape] query layout is BSND, shape [2, 7, 4, 16] should be equal to "
                   "[2, 7, 20, 16]"),
    "heads tnd": ({"input_layout": "TND", "num_heads": 3, "tensors": {"dim": 64}},
                  "[CheckQShape] query layout is TND, shape [14, 4, 64] should be equal to "
                  "[14, 3, 64]"),
    "hidden": ({"input_layout": "BSH", "num_heads": 3}, "must be a multiple of numHeads(3)!"),
    "grouped": ({"tensors": {"kv_heads": 2}},
                "numHeads(2) in key shape do not match numKeyValueHeads(4) in attr!"),
    "kv heads": ({"num_key_value_heads": 3, "tensors": {"kv_heads": 3}},
                 "numHeads(4) must be divisible by numKeyValueHeads(3)!"),
    "many heads": ({"num_heads": 257, "tensors": {"heads": 257, "queries": 2, "keys": 2}},
                   "the query's heads num(257) should not be more than 256!"),
    "large group": ({"num_heads": 65, "num_key_value_heads": 1,
                     "tensors": {"heads": 65, "kv_heads": 1}},
                    "numHeads / numKeyValueHeads = 65, cannot be larger than 64"),
    "float32": ({"tensors": {"dtype": torch.float32}}, "can not be DT_FLOAT"),
    "dim": ({"tensors": {"dim": 24}}, "D should be 16 elements aligned when with FP16/BF16 dtype!"),
    "large dim": ({"tensors": {"dim": 528}}, "D should be less than or equal to 512 of Q/KV shape! "
                  "but now D = 528."),
    "layout": ({"input_layout": "BSND_NBSD"}, "invalid input layout:BSND_NBSD."),
    "mask type": ({"atten_mask": torch.zeros(7, 7)},
                  "Invalid attention mask datatype! Only support BOOL, INT8 and UINT8"),
    "no mask": ({"sparse_mode": 3}, "attenMask should not be null when sparse_mode is 3."),
    "all mask": ({"sparse_mode": 1}, "attenMask should not be null when sparse_mode is 1."),
    "mode": ({"sparse_mode": 5, "atten_mask": TRIANGLE}, "sparse_mode = 5 is out of range."),
    "tile": ({"sparse_mode": 2, "atten_mask": TRIANGLE[:7, :7]},
             "attenMask shape must be (2048, 2048) or (1, 2048, 2048) or (1, 1, 2048, 2048) when "
             "sparse mode = 2"),
    "small mask": ({"atten_mask": TRIANGLE[:7, :6]},
                   "attenMask batch(1) must be 1 or 2, attenMask Q_S(7) must be larger than sQ(7), "
                   "attenMask KV_S(6) must be larger than sK(7), please check"),
    "row mask": ({"atten_mask": TRIANGLE[:1, :7].expand(2, 1, 1, 7)}, "attenMask Q_S(1)"),
    "mask batch": ({"atten_mask": TRIANGLE[:7, :7].expand(3, 7, 7)}, "attenMask batch(3)"),
    "band": ({"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": -1, "next_tokens": -1},
             "preTokens and nextTokens must not be negative number in band mode"),
    "length": ({"actual_seq_lengths": [8, 7]},
               "The query's actual sequence lengths[0](8) must be in range[0, 7]!"),
    "kv length": ({"actual_seq_lengths_kv": [7, -1]},
                  "The key/value's actual sequence lengths[1](-1) must be in range[0, 7]!"),
    "number of lengths": ({"actual_seq_lengths": [7, 7], "tensors": {"batch": 3}},
                          "must equal to 1 or greater than or equal to batch size(3)!"),
    "pse": ({"pse_shift": torch.zeros(1, 1, 1, 7, dtype=torch.bfloat16)},
            "pse shift shape must be [1 or 2, 4, >=7, >=7], but now it is [1, 1, 1, 7]"),
    "one row": ({"input_layout": "BNSD_BSND", "tensors": {"queries": 1}},
                "BNSD_BSND layout is not supported when S is 1!"),
    "one row mask": ({"atten_mask": TRIANGLE[:1, :7], "tensors": {"queries": 1}},
                     "batchSize[1] of atten_mask must be equal to batchSize[2] of query."),
}  # fmt: skip

PACKED_REFUSED = {
    "type": ({"tensors": {"dtype": torch.float16}}, "inputDataType should be bf16"),
    "dim": ({"tensors": {"dim": 32}}, "must be same equal 192/128/64"),
    "mode": ({"sparse_mode": 2, "atten_mask": TRIANGLE},
             "When Layout is TND, sparseMode only support 0,3 or 4, but sparseMode = 2"),
    "mask": ({"atten_mask": TRIANGLE[:7, :7]},
             "When Layout is TND, sparseMode = 0 not support attentionMask."),
    "no lengths": ({"actual_seq_lengths": None},
                   "actualSequenceLengthQ is required, but now is nullptr!"),
    "leading zero": ({"actual_seq_lengths": [0, 7, 14]}, "the length of actualSequenceLengthQ(3)"),
    "sum": ({"actual_seq_lengths": [7, 13]},
            "queryT(14) must be equal to the last element of actualSequenceLengthQ(13)"),
    "key sum": ({"actual_seq_lengths_kv": [7, 13]}, "must be equal to the last element"),
    "decreasing": ({"actual_seq_lengths": [15, 14]}, "must be not decreasing, but it's not at 1"),
    "rows": ({"sparse_mode": 3, "atten_mask": TRIANGLE, "actual_seq_lengths": [8, 14]},
             "When layout is TND and sparse = 3 ,Batch[0], need s1[8] <= s2[7]."),
    "kv heads": ({"tensors": {"kv_heads": 3}}, "should be a multiple of keyN(3)."),
}  # fmt: skip


def refuse(changes, text, **defaults):
    changes = dict(changes)
    tensors = qkv(**{"dim": 64 if "T" in defaults.get("input_layout", "") else 16}
                  | changes.pop("tensors", {}))  # fmt: skip
    options = {"num_heads": 4, "input_layout": "BNSD"} | defaults | changes
    inputs = [to_layout(tensor, options["input_layout"].split("_")[0]) for tensor in tensors]
    if options["input_layout"] == "TND":
        options = {
            "actual_seq_lengths": [7, 14], "actual_seq_lengths_kv": [7, 14]
        } | options  # fmt: skip
    for version in (1, 2):
        with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
            infer(*inputs, version=version, **options)
        assert f"aclnnFusedInferAttentionScoreV{2 + version} failed" in str(caught.value)
        assert "error code is 561002" in str(caught.value)


@pytest.mark.parametrize("rule", REFUSED)
def test_refuses(rule):
    refuse(*REFUSED[rule])


@pytest.mark.parametrize("layout", ["SBH", "SH", "bsnd"])
def test_op_plugin_refuses_layouts(layout):
    for version in (1, 2):
        with pytest.raises(RuntimeError, match="layout only support BSH, BSND"):
            infer(*qkv(), version=version, num_heads=4, input_layout=layout)


@pytest.mark.parametrize("rule", PACKED_REFUSED)
def test_refuses_packed(rule):
    refuse(*PACKED_REFUSED[rule], input_layout="TND")


def test_a_refused_call_leaves_the_stream_as_it_was():
    test_refuses("heads")
    tensors = qkv()
    check(run(tensors, "BNSD"), tensors, None)


# --- accepted, and wrong as on a device -------------------------------------------------------


def test_a_wrong_head_count_passes_where_the_head_axis_is_hidden():
    tensors = qkv()
    inputs = [to_layout(tensor, "BSH") for tensor in tensors]
    out, _ = infer(*[t.repeat(1, 1, 2) for t in inputs], num_heads=4, input_layout="BSH", scale=0.2)
    wrong = [from_layout(t.repeat(1, 1, 2), "BSH", 2, 4) for t in inputs]  # D' = 32
    expected = to_layout(attention(*wrong, 0.2), "BSH")
    torch.testing.assert_close(out.cpu().float(), expected, **ROUNDING)
    right = [from_layout(t.repeat(1, 1, 2), "BSH", 2, 8) for t in inputs]
    assert not torch.allclose(expected, to_layout(attention(*right, 0.2), "BSH"), atol=0.1)


def test_only_the_first_head_of_a_mask_is_used():
    tensors = qkv()
    hidden = draw(2, 4, 7, 7, seed=5) > 0.5
    check(run(tensors, "BNSD", atten_mask=hidden), tensors, hidden[:, :1])


def test_a_band_is_cut_out_of_a_written_mask():
    tensors = qkv()
    mask = torch.zeros(7, 7, dtype=torch.bool)
    found = run(tensors, "BNSD", atten_mask=mask, pre_tokens=2, next_tokens=1)
    check(found, tensors, outside(7, 7, 2, 1))
    # Without a mask the two are ignored.
    check(run(tensors, "BNSD", pre_tokens=2, next_tokens=1), tensors, None)


@pytest.mark.parametrize("inner_precise", [0, 1, 2, 3])
def test_a_row_that_sees_nothing(inner_precise):
    tensors = qkv()
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[2] = True
    out, lse = run(tensors, "BNSD", atten_mask=hidden, inner_precise=inner_precise)
    if inner_precise < 2:
        average = tensors[2].float().mean(2)
        torch.testing.assert_close(out[:, :, 2], average, **ROUNDING)
        assert (lse[:, :, 2] == LOWEST).all()
    else:
        assert not out[:, :, 2].any()
        assert torch.isposinf(lse[:, :, 2]).all()
    check((out[:, :, 3:], lse[:, :, 3:]), (tensors[0][:, :, 3:], *tensors[1:]), None)


def test_rows_above_a_right_down_diagonal_are_zero():
    out, lse = run(qkv(queries=7, keys=4), "BNSD", sparse_mode=3, atten_mask=TRIANGLE)
    assert not out[:, :, :3].any()
    assert torch.isposinf(lse[:, :, :3]).all()
    assert torch.isfinite(lse[:, :, 3:]).all()


def test_the_content_of_the_compressed_mask_is_not_checked():
    tensors = qkv()
    inverted = run(tensors, "BNSD", sparse_mode=2, atten_mask=~TRIANGLE)
    hidden = ~outside(7, 7, None, 0)
    torch.testing.assert_close(inverted[0], attention(*tensors, 0.2, hidden), **ROUNDING)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_key_and_value_are_read_row_major_whatever_their_strides(which):
    tensors = list(qkv())
    views = [tensor.npu() for tensor in tensors]
    views[which] = tensors[which].transpose(1, 2).contiguous().npu().transpose(1, 2)
    out, _ = infer(*views, num_heads=4, input_layout="BNSD", scale=0.2)
    if which > 0:  # query's strides are honoured
        tensors[which] = tensors[which].transpose(1, 2).reshape(tensors[which].shape)
    torch.testing.assert_close(out.cpu().float(), attention(*tensors, 0.2), **ROUNDING)


def test_a_planted_fault_gives_the_average(monkeypatch):
    monkeypatch.setenv("SIMNPU_FAULT", "uniform_average")
    tensors = qkv()
    out, _ = run(tensors, "BNSD")
    average = tensors[2].float().mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, average, **ROUNDING)
