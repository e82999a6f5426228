"""Which operator, layout and sparse mode the Ascend kernel chooses for a problem."""

import pytest
import torch

from tests import npu_ops
from tests.npu_ops.arithmetic import hidden_keys
from tests.npu_ops.examples import TRIANGLE, attend, problem, tensors
from ulysses.backends import Band, Dropout
from ulysses.backends.ascend_limits import choose_operator
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.ascend_sparse import rows_with_keys, sparse_arguments
from ulysses.conformance import reference_attention

CPU = torch.device("cpu")
npu_ops.install()


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
