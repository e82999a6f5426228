"""npu_fusion_attention and its gradient: values, refusals, wrong calls that a device accepts."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from tests.npu.attention_cases import (
    TRIANGLE,
    attention,
    cumulative,
    draw,
    from_layout,
    outside,
    qkv,
    scores,
    to_layout,
    train,
)

EXACT = {"rtol": 0.0, "atol": 1e-5}
LARGEST = torch.finfo(torch.float32).max
WRITTEN = draw(2, 4, 5, 8, seed=5) > 0.5
WRITTEN[..., 0] = False

# The mask's name, its options, and what it hides of 5 queries and 8 keys.
MASKS = {
    "full": ({}, None),
    "left up": ({"sparse_mode": 2, "atten_mask": TRIANGLE}, outside(5, 8, None, 0, right=False)),
    "right down": ({"sparse_mode": 3, "atten_mask": TRIANGLE}, outside(5, 8, None, 0)),
    "band": (
        {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 3, "next_tockens": 1},
        outside(5, 8, 3, 1),
    ),
    "written": ({"atten_mask": WRITTEN[0, 0]}, WRITTEN[0, 0]),
    "every head": ({"atten_mask": WRITTEN.byte()}, WRITTEN),
    "every entry": ({"sparse_mode": 1, "atten_mask": WRITTEN[:, :1]}, WRITTEN[:, :1]),
}
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH", "TND"]


def lengths(layout, batch, queries, keys):
    if layout != "TND":
        return {}
    return {
        "actual_seq_qlen": cumulative(batch, queries),
        "actual_seq_kvlen": cumulative(batch, keys),
    }


def run(tensors, layout, **options):
    """Results and input gradients of a call on [B, N, S, D] tensors, as [B, N, S, D] on the CPU.

    The gradient that flows in is the output of a fixed draw.
    """
    query, key, value = tensors
    (batch, heads, queries, _), kv_heads = query.shape, key.shape[1]
    inputs = [to_layout(tensor, layout).npu().requires_grad_() for tensor in tensors]
    given = {"scale": 0.2} | lengths(layout, batch, queries, key.shape[2])
    out, *rest = train(*inputs, heads, layout, **given | options)
    cotangent = to_layout(draw(*query.shape[:3], value.shape[3], seed=6, dtype=query.dtype), layout)
    out.backward(cotangent.npu())
    gradients = [
        from_layout(tensor.grad.cpu(), layout, batch, n)
        for tensor, n in zip(inputs, (heads, kv_heads, kv_heads), strict=True)
    ]
    return from_layout(out.detach().cpu(), layout, batch, heads), rest, gradients


def expected(tensors, hidden=None, keep=None):
    tensors = [tensor.detach().float().requires_grad_() for tensor in tensors]
    out = attention(*tensors, 0.2, hidden, keep)
    gradients = torch.autograd.grad(out, tensors, draw(*out.shape, seed=6, dtype=torch.float32))
    return out.detach(), gradients


def check(found, reference, **tolerance):
    for ours, theirs in zip((found[0], *found[2]), (reference[0], *reference[1]), strict=True):
        torch.testing.assert_close(ours.float(), theirs, **tolerance or EXACT)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout, mask):
    tensors = qkv(kv_heads=2, queries=5, keys=8, dim=24, dtype=torch.float32)
    options, hidden = MASKS[mask]
    if layout == "TND" and hidden is not None and hidden.dim() > 2:
        with pytest.raises(RuntimeError, match="get unsupported atten_mask shape"):
            run(tensors, layout, **options)
        return
    found = run(tensors, layout, **options)
    check(found, expected(tensors, hidden))
    maximum, total = found[1][:2]
    if layout != "TND":
        assert maximum.shape == total.shape == (2, 4, 5, 8)
        lse = (maximum + total.log())[..., 0].cpu()
        reference = scores(*tensors[:2], 0.2, hidden).logsumexp(-1)
        torch.testing.assert_close(lse, reference, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    tensors = qkv(dtype=dtype)
    check(run(tensors, "BSND"), expected(tensors), rtol=0.0, atol=0.04)


def test_value_may_be_narrower():
    query, key, value = qkv(dtype=torch.float32)
    for layout in LAYOUTS:
        check(run((query, key, value[..., :8]), layout), expected((query, key, value[..., :8])))


@pytest.mark.parametrize("operator", ["npu_fusion_attention_v2", "npu_fusion_attention_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_later_operators(layout, operator):
    tensors = qkv(dtype=torch.float32)
    inputs = [to_layout(tensor, layout).npu().requires_grad_() for tensor in tensors]
    given = lengths(layout, 2, 7, 7)
    if operator.endswith("v3"):
        given = {name: torch.tensor(value) for name, value in given.items()}
    out = getattr(torch_npu, operator)(*inputs, 4, layout, scale=0.2, **given)[0]
    out.backward(to_layout(draw(2, 4, 7, 16, seed=6, dtype=torch.float32), layout).npu())
    gradients = [from_layout(tensor.grad.cpu(), layout, 2, 4) for tensor in inputs]
    check((from_layout(out.detach().cpu(), layout, 2, 4), None, gradients), expected(tensors))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "TND"])
def test_strides_are_honoured(layout):
    tensors = qkv(dtype=torch.float32)
    inputs = [to_layout(tensor, layout).transpose(0, 1).contiguous().npu() for tensor in tensors]
    views = [tensor.transpose(0, 1) for tensor in inputs]
    out = train(*views, 4, layout, scale=0.2, **lengths(layout, 2, 7, 7))[0]
    found = from_layout(out.cpu(), layout, 2, 4)
    torch.testing.assert_close(found, attention(*tensors, 0.2), **EXACT)


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_packed_statistics_lie_head_by_head_unless_asked_otherwise(softmax_layout):
    query, key, value = (draw(9, 2, 16, seed=seed, dtype=torch.float32) for seed in (1, 2, 3))
    inputs = [tensor.npu().requires_grad_() for tensor in (query, key, value)]
    ends = [2, 9]
    options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "softmax_layout": softmax_layout}
    out, maximum, total, *_ = train(*inputs, 2, "TND", scale=0.2, **options)
    lse = (maximum + total.log())[..., 0].cpu()
    assert lse.shape == (9, 2)
    for rows in (slice(0, 2), slice(2, 9)):
        entry = [tensor[rows].transpose(0, 1)[None] for tensor in (query, key)]
        reference = scores(*entry, 0.2).logsumexp(-1)[0]  # [N, rows]
        found = lse[rows]
        if not softmax_layout:
            found = found.flatten().view(2, -1).T
        torch.testing.assert_close(found, reference.T, **EXACT)
    out.sum().backward()  # reads the statistics back in the same order
    torch.testing.assert_close(inputs[2].grad.sum(0).cpu(), torch.full((2, 16), 9.0), **EXACT)


def test_pse_is_added_before_scaling():
    tensors = qkv(dtype=torch.float32)
    bias = draw(1, 4, 7, 7, seed=5, dtype=torch.float32)
    on_npu = bias.npu().requires_grad_()
    out = train(*tensors, 4, "BNSD", scale=0.2, pse=on_npu)[0]
    bias.requires_grad_()
    weights = (scores(*tensors[:2], 0.2) + 0.2 * bias).softmax(-1)
    reference = weights @ tensors[2]
    torch.testing.assert_close(out.cpu(), reference, **EXACT)
    cotangent = draw(*out.shape, seed=6, dtype=torch.float32)
    out.backward(cotangent.npu())
    reference.backward(cotangent)
    torch.testing.assert_close(on_npu.grad.cpu(), bias.grad, **EXACT)


def test_no_gradient_flows_through_the_statistics():
    query, key, value = (tensor.npu().requires_grad_() for tensor in qkv(dtype=torch.float32))
    out, maximum, total, *_ = train(query, key, value, 4, "BNSD", scale=0.2)
    (0 * out.sum() + (maximum + total.log()).sum()).backward()
    assert not query.grad.any()


@pytest.mark.parametrize("mask", [None, "causal", WRITTEN[:, :1], WRITTEN[0, 0]])
def test_scaled_dot_product_attention_is_the_fused_operator(mask):
    tensors = qkv(queries=5, keys=5 if isinstance(mask, str) else 8, dtype=torch.float32)
    if isinstance(mask, str):
        options, hidden = {"is_causal": True}, outside(5, 5, None, 0)
    else:
        options = {} if mask is None else {"attn_mask": ~mask.npu()}
        hidden = mask
    inputs = [tensor.npu().requires_grad_() for tensor in tensors]
    out = F.scaled_dot_product_attention(*inputs, scale=0.2, **options)
    assert "FusionAttention" in out.grad_fn.name()
    out.backward(draw(*out.shape, seed=6, dtype=torch.float32).npu())
    check((out.detach().cpu(), None, [t.grad.cpu() for t in inputs]), expected(tensors, hidden))


# --- dropout ----------------------------------------------------------------------------------


def kept_scores(layout, keep_prob):
    """What a call's dropout does to each weight: keys with a unit value each, and equal scores."""
    query, value = torch.zeros(2, 4, 5, 24), torch.eye(24)[:8].expand(2, 4, 8, 24)
    inputs = [to_layout(t, layout) for t in (query, torch.zeros(2, 4, 8, 24), value)]
    options = {"keep_prob": keep_prob} | lengths(layout, 2, 5, 8)
    out, *_, seed, offset, _ = train(*inputs, 4, layout, **options)
    return from_layout(out.cpu(), layout, 2, 4)[..., :8] * 8, (seed, offset)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_in_backward_is_that_of_forward(layout):
    torch.npu.manual_seed(11)
    keep, _ = kept_scores(layout, 0.75)
    torch.testing.assert_close(keep.unique(), torch.tensor([0.0, 1 / 0.75]), **EXACT)
    assert 0.65 < (keep > 0).float().mean() < 0.85
    torch.npu.manual_seed(11)
    tensors = qkv(queries=5, keys=8, dim=24, dtype=torch.float32)
    check(run(tensors, layout, keep_prob=0.75), expected(tensors, keep=keep))


def test_dropout_follows_the_generator():
    torch.npu.manual_seed(11)
    draws = [kept_scores("BSND", 0.5) for _ in range(2)]
    torch.npu.manual_seed(11)
    again = [kept_scores("BSND", 0.5) for _ in range(2)]
    torch.npu.manual_seed(12)
    other = kept_scores("BSND", 0.5)
    assert torch.equal(draws[0][0], again[0][0])
    assert torch.equal(draws[1][0], again[1][0])
    for (one, place), (two, elsewhere) in itertools.combinations([*draws, other], 2):
        assert place != elsewhere
        assert not torch.equal(one, two)


# --- refusals ---------------------------------------------------------------------------------

PARAMETER, TILING = 161002, 561103

# What differs from a good call on 4 heads of dim 16, [2, 4, 7, 16]; status and a part of the text.
REFUSED = {
    "heads": ({"heads": 20}, TILING, "head_num is [20], but got query dim1 [4]."),
    "heads bsnd": ({"heads": 20, "layout": "BSND"}, TILING,
                   "head_num is [20], but got query dim2 [4]."),
    "heads tnd": ({"heads": 20, "layout": "TND"}, TILING,
                  "head_num is [20], but got query dim1 [4]."),
    "hidden": ({"heads": 5, "layout": "SBH"}, TILING,
               "h1 [64] should be a multiple of n1Size [5]."),
    "kv heads": ({"tensors": {"kv_heads": 3}}, TILING,
                 "n1Size [4] should be a multiple of n2Size [3]."),
    "types": ({"cast": torch.float16}, PARAMETER,
              "The data type of query[DT_FLOAT16], key[DT_FLOAT], value[DT_FLOAT] are not equal."),
    "dim": ({"tensors": {"dim": 784}}, PARAMETER, "Head dim must <= 768, but got 784"),
    "many heads": ({"heads": 257, "tensors": {"heads": 257}}, PARAMETER,
                   "head_num 257 is not in range [1, 256]"),
    "mask type": ({"atten_mask": TRIANGLE[:7, :7].char()}, TILING,
                  "invalid attenMask dtype[DT_INT8], only support bool or uint8."),
    "mask rank": ({"atten_mask": TRIANGLE[:7, :7].expand(2, 7, 7)}, TILING,
                  "atten mask dim should be 2 or 4, but got 3"),
    "mask shape": ({"atten_mask": TRIANGLE[:2, :7]}, TILING,
                   "get unsupported atten_mask shape, the shape is [2, 7]. B=[2], N=[4], Sq=[7], "
                   "Skv=[7], supported atten_mask shape can be [B, N, Sq, Skv]"),
    "mask broadcast": ({"atten_mask": TRIANGLE[:1, :7].expand(2, 1, 1, 7)}, TILING,
                       "get unsupported atten_mask shape, the shape is [2, 1, 1, 7]. B=[2]"),
    "mask larger": ({"atten_mask": TRIANGLE[:8, :8]}, TILING, "get unsupported atten_mask shape"),
    "tile": ({"atten_mask": TRIANGLE[:7, :7], "sparse_mode": 3}, TILING,
             "In the attenmask compression, please set the atten_mask_shape to [2048,2048]."),
    "packed mask": ({"atten_mask": TRIANGLE[:6, :7], "layout": "TND"}, TILING,
                    "MaxSq=[7],  MaxSkv=[7], when input_layout is TND"),
    "packed rows": ({"layout": "TND", "sparse_mode": 3, "atten_mask": TRIANGLE,
                     "actual_seq_qlen": [8, 14]}, TILING,
                    "Batch[0] s1[8] is larger than s2[7], exist invalid row."),
    "packed sum": ({"layout": "TND", "actual_seq_qlen": [7, 15]}, TILING,
                   "Query T(14) and key T(14) need larger than respectively sum of seqLen(15)"),
    "window": ({"atten_mask": TRIANGLE[:7, :7], "pre_tockens": -1, "next_tockens": -1}, TILING,
               "PreTokens[-1] and nextTokens[-1] config error, there is no valid data block."),
    "pse": ({"pse": torch.zeros(1, 1, 7, 7)}, TILING,
            "get unsupported pse shape, the shape is [1, 1, 7, 7]"),
    "dropout mask": ({"keep_prob": 0.5, "dropout_mask": torch.zeros(3, dtype=torch.uint8)}, TILING,
                     "Input dropMask shapeSize is invalid, it should not be less than 49, but got"),
}  # fmt: skip


@pytest.mark.parametrize("rule", REFUSED)
def test_refuses(rule):
    options, status, text = REFUSED[rule]
    options = {"heads": 4, "layout": "BNSD"} | options
    tensors = list(qkv(**{"dtype": torch.float32} | options.pop("tensors", {})))
    tensors[0] = tensors[0].to(options.pop("cast", torch.float32))
    inputs = [to_layout(tensor, options["layout"]) for tensor in tensors]
    options = lengths(options["layout"], 2, 7, 7) | options
    with pytest.raises(RuntimeError, match=re.escape(text)) as caught:
        train(*inputs, options.pop("heads"), options.pop("layout"), **options)
    assert f"error code is {status}" in str(caught.value)


# --- accepted, and wrong as on a device -------------------------------------------------------


@pytest.mark.parametrize("layout", ["BSH", "SBH"])
def test_a_wrong_head_count_passes_where_the_head_axis_is_hidden(layout):
    tensors = qkv(dtype=torch.float32)
    inputs = [to_layout(tensor, layout) for tensor in tensors]
    out = train(*inputs, 8, layout, scale=0.2)[0].cpu()
    wrong = [from_layout(tensor, layout, 2, 8) for tensor in inputs]
    torch.testing.assert_close(out, to_layout(attention(*wrong, 0.2), layout), **EXACT)
    assert not torch.allclose(out, to_layout(attention(*tensors, 0.2), layout), atol=0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_mask_no_sparse_mode_has_an_effect(layout):
    tensors = qkv(dtype=torch.float32)
    check(run(tensors, layout, sparse_mode=3, next_tockens=0), expected(tensors))


def test_a_band_is_cut_out_of_a_written_mask():
    tensors = qkv(dtype=torch.float32)
    mask = torch.zeros(7, 7, dtype=torch.bool)
    found = run(tensors, "BNSD", atten_mask=mask, pre_tockens=2, next_tockens=1)
    check(found, expected(tensors, outside(7, 7, 2, 1)))


def test_a_row_that_sees_nothing_is_the_average():
    tensors = qkv(dtype=torch.float32)
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[2] = True
    out, (maximum, total, *_), gradients = run(tensors, "BNSD", atten_mask=hidden)
    torch.testing.assert_close(out[:, :, 2], tensors[2].mean(2), **EXACT)
    assert (maximum[:, :, 2] == -LARGEST).all()
    assert (total[:, :, 2] == 7).all()
    # An equal share of the row's gradient reaches every value.
    reference = expected(tensors, hidden)
    share = draw(2, 4, 7, 16, seed=6, dtype=torch.float32)[:, :, 2:3] / 7
    torch.testing.assert_close(gradients[2], reference[1][2] + share, **EXACT)


def test_a_row_that_sees_nothing_is_zero_on_request():
    tensors = qkv(dtype=torch.float32)
    hidden = torch.zeros(7, 7, dtype=torch.bool)
    hidden[2] = True
    found = run(tensors, "BNSD", atten_mask=hidden, inner_precise=2)
    check(found, expected(tensors, hidden))
    maximum, total = found[1][:2]
    assert (maximum[:, :, 2] == -LARGEST).all()
    assert (total[:, :, 2] == LARGEST).all()


def test_rows_above_a_right_down_diagonal_are_zero():
    tensors = qkv(queries=7, keys=4, dtype=torch.float32)
    found = run(tensors, "BSND", sparse_mode=3, atten_mask=TRIANGLE)
    assert not found[0][:, :, :3].any()
    check(found, expected(tensors, outside(7, 4, None, 0)))


def test_the_content_of_the_compressed_mask_is_not_checked():
    tensors = qkv(dtype=torch.float32)
    out, *_ = run(tensors, "BNSD", sparse_mode=2, atten_mask=~TRIANGLE)
    reference = attention(*tensors, 0.2, ~outside(7, 7, None, 0))
    torch.testing.assert_close(out[:, :, :-1], reference[:, :, :-1], **EXACT)


def test_no_keys_give_zeros():
    out, maximum, total, *_ = train(*qkv(keys=0, dtype=torch.float32), 4, "BNSD")
    assert not out.any()
    assert not maximum.any()
    assert not total.any()


def test_a_planted_fault_gives_the_average(monkeypatch):
    monkeypatch.setenv("SIMNPU_FAULT", "uniform_average")
    tensors = qkv(dtype=torch.float32)
    out = train(*tensors, 4, "BNSD", scale=0.2)[0].cpu()
    average = tensors[2].mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, average, **EXACT)
