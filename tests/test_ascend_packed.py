"""Packed documents on Ascend: which pieces are one call, in what terms, and that it is exact."""

from dataclasses import replace

import pytest
import torch

from tests import npu_ops
from tests.npu_ops.arithmetic import hidden_keys
from tests.npu_ops.examples import TRIANGLE, Recorder, problem
from ulysses import UlyssesAttention
from ulysses.backends import Band, Dropout
from ulysses.backends.ascend import AscendAttention
from ulysses.backends.ascend_operators import INFERENCE, TRAINING
from ulysses.backends.ascend_packed import pack, packed_operator
from ulysses.backends.ascend_sparse import SparseArguments, shared_arguments
from ulysses.backends.base import Piece
from ulysses.conformance_pieces import PIECES
from ulysses.structure import packed

npu_ops.install()

DOCUMENTS = (0, 5, 6, 6, 17)
LENGTH = 20


def tensors(heads=4, dim=64, dtype=torch.bfloat16, batch=1):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, LENGTH, number, dim) for number in (heads, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def called(given, **options):
    """The output, and the operators' names, layouts and modes."""
    attention = UlyssesAttention(None, backend=AscendAttention())
    with Recorder() as recorder:
        out = attention(*given, documents=DOCUMENTS, **options)
    calls = [(name, a["input_layout"], a["sparse_mode"]) for name, a in recorder.calls]
    return out, calls


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, 0),
        ({"is_causal": True}, 3),
        ({"window": (2, 1)}, 4),
        ({"is_causal": True, "window": (3, None)}, 4),
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_documents_are_one_call_and_equal_sdpa(options, mode, trains):
    """Three that are not empty, and rows behind them."""
    given = [tensor.requires_grad_(trains) for tensor in tensors(batch=2)]
    out, calls = called(given, **options)
    infers = not trains and mode != 0
    assert calls == [(INFERENCE if infers else TRAINING, "TND", mode)]
    exact = [tensor.detach().double().requires_grad_(trains) for tensor in given]
    expected = UlyssesAttention(None, backend="sdpa")(*exact, documents=DOCUMENTS, **options)
    results, truth = [out], [expected]
    if trains:
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        results += torch.autograd.grad(out, given, upstream)
        truth += torch.autograd.grad(expected, exact, upstream.double())
    for found, true in zip(results, truth, strict=True):
        error = (found.double() - true).abs().max() / true.abs().max().clamp(min=1)
        assert error < 4 * torch.finfo(torch.bfloat16).eps
    assert not out[:, 17:].any()


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"sinks": torch.zeros(4)},
    ],
    ids=["mask", "ALiBi", "sinks"],
)
def test_with_anything_on_top_each_document_is_a_call(options):
    _, calls = called(tensors(), is_causal=True, **options)
    assert len(calls) == 3
    assert not any(layout == "TND" for _, layout, _ in calls)


@pytest.mark.parametrize(
    ("changes", "mode", "name"),
    [
        ({}, 3, INFERENCE),
        ({}, 4, INFERENCE),
        ({}, 0, TRAINING),  # vllm-ascend#13699
        ({"dtype": torch.float16}, 3, TRAINING),
        ({"head_dim": 80, "value_dim": 80}, 3, TRAINING),
        ({"value_dim": 64}, 3, TRAINING),
        ({"requires_grad": True}, 3, TRAINING),
        ({"batch": 64, "num_heads": 4}, 3, INFERENCE),
        ({"batch": 65, "num_heads": 4}, 3, None),
        ({"num_queries": 2**20 + 1}, 3, None),
    ],
)
def test_the_operator_of_packed_rows(changes, mode, name):
    sizes = {"head_dim": 128, "value_dim": 128} | changes
    sparse = SparseArguments(mode, 0, 0, has_empty_rows=False)
    assert packed_operator(problem(**sizes), sparse) == name


def test_which_pieces_are_one_call():
    assert {name: pack(pieces) is not None for name, pieces in PIECES.items()} == {
        name: name != "a prefix" for name in PIECES
    }
    ends = pack(PIECES["rows behind the documents"])
    assert (ends.query_ends, ends.key_ends) == ((4, 9), (4, 9))


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(range(3), range(0))],
        [Piece(range(2), range(0)), Piece(range(2, 4), range(2))],  # unseeing rows in front
        [Piece(range(2), range(2)), Piece(range(2, 4), range(3, 5))],  # a key between
        [Piece(range(2), range(2), Band(None, -1)), Piece(range(2, 4), range(2, 4))],  # a row
        # A window to both sides, cut below: its corner is not that of a whole document.
        [Piece(range(9), range(9), Band(-2, 2)), Piece(range(9, 13), range(9, 15), Band(-2, 2))],
        [*packed(range(1026), 1025, Band()).pieces],
    ],
)
def test_which_pieces_are_not(pieces):
    assert pack(pieces) is None


def test_shared_arguments_show_what_the_bands_show():
    """Pairs of small rectangles with any bands: what is shared shows each band exactly."""
    sides = [None, *range(-3, 4)]
    bands = [Band(lower, upper) for lower in sides for upper in sides]
    shared = 0
    for other in ((Band(None, 0), 4, 4), (Band(-1, 1), 3, 3), (Band(), 2, 3)):
        for queries, keys in ((1, 1), (2, 4), (3, 3), (4, 2)):
            for band in bands:
                rectangles = [other, (band, queries, keys)]
                arguments = shared_arguments(rectangles)
                if arguments is None:
                    continue
                shared += 1
                tokens = arguments.pre_tokens, arguments.next_tokens
                triangle = TRIANGLE if arguments.mode else None
                for each, rows, columns in rectangles:
                    hidden = hidden_keys(arguments.mode, *tokens, triangle, rows, columns)
                    visible = each.mask(rows, columns, torch.device("cpu"))
                    assert visible.all() if hidden is None else torch.equal(hidden, ~visible)
    assert shared > 50


def test_dropout_of_packed_documents_is_replayed():
    """dv of the identity's columns is the transpose of the weights that forward used."""
    query, key, _ = tensors(dim=LENGTH, dtype=torch.float32)
    value = torch.eye(LENGTH).expand(1, 2, LENGTH, LENGTH).transpose(1, 2).requires_grad_()
    pieces = [replace(piece, band=Band()) for piece in PIECES["documents"]]
    rows = pieces[-1].queries.stop
    out = AscendAttention().attend_pieces(
        query[:, :rows],
        key[:, :rows],
        value[:, :rows],
        pieces=pieces,
        scale=0.25,
        dropout=Dropout(p=0.5, seed=3),
    )
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(out, value, upstream)
    weights = out.detach()[..., :rows]
    assert 0 < (weights[0, 4:, 0, 4:] == 0).float().mean() < 1
    expected = torch.einsum(
        "bqgnk,bqgnd->bkgd", *(t.unflatten(2, (2, 2)) for t in (weights, upstream))
    )
    torch.testing.assert_close(gradient[:, :rows], expected)
