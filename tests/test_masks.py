"""Masks: cut to each tile by global head and row, or refused before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_upper_left

from tests import dense, reference
from tests.counting import counted
from ulysses import QueryRows, UlyssesAttention
from ulysses.backends.sdpa import SdpaAttention
from ulysses.tiling import grids

HEADS, LENS, DIM = 4, (3, 1, 4, 2), 8
LENGTH = sum(LENS)
PLAIN = dense.Shape()


def _whole(heads: int = HEADS) -> list[torch.Tensor]:
    return [reference.draw(2, LENGTH, heads, DIM, seed=seed) for seed in range(3)]


def _own(rank: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.shard(tensor, LENS, rank).clone() for tensor in tensors]


def _padding() -> torch.Tensor:
    """Key padding [B, S]: the second sample is three tokens shorter."""
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, -3:] = False
    return real


FORMS = {
    "key padding, [B, 1, 1, S]": lambda: _padding()[:, None, None, :],
    "[S, S]": lambda: reference.draw(LENGTH, LENGTH, seed=5) > 0,
    "[H, S, S]": lambda: reference.draw(HEADS, LENGTH, LENGTH, seed=5),
    "[1, H, S, S], another for each head": lambda: reference.draw(1, HEADS, LENGTH, LENGTH, seed=5),
    "[B, 1, S, S]": lambda: reference.draw(2, 1, LENGTH, LENGTH, seed=5),
    "[B, H, 1, S]": lambda: reference.draw(2, HEADS, 1, LENGTH, seed=5) > 0,
    "[B, 1, S, 1], whole rows": lambda: reference.draw(2, 1, LENGTH, 1, seed=5) > 0,
}


def _by_form(rank: int, num_ranks: int, form: str) -> float:
    """The worst difference over grids, whole or in rows, causal or not."""
    mask, tensors, worst = FORMS[form](), _whole(), 0.0
    rows = mask.view((1,) * (4 - mask.ndim) + mask.shape)
    rows = rows.expand(-1, -1, LENGTH, -1).transpose(1, 2)
    in_rows = QueryRows(reference.shard(rows, LENS, rank).transpose(1, 2))
    for grid in grids(num_ranks):
        layer = UlyssesAttention(dist.group.WORLD, grid=grid)
        for is_causal in (False, True):
            expected, _ = dense.attention(*tensors, dense.Shape(is_causal=is_causal), mask=mask)
            for given in (mask, in_rows):
                out = layer(
                    *_own(rank, tensors), attn_mask=given, is_causal=is_causal, seq_lens=LENS
                )
                apart = (out - reference.shard(expected, LENS, rank)).abs()
                worst = max(worst, float(apart.max()))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_every_broadcast_form_whole_or_in_rows(pool, form):
    assert max(pool(4).run(_by_form, form)) < 1e-10


class _Noting(SdpaAttention):
    """SDPA, noting the masks that it is handed."""

    name = "noting"

    def __init__(self) -> None:
        self.masks: list[torch.Tensor] = []

    def __call__(self, query, key, value, **options):
        self.masks.append(options["mask"])
        return super().__call__(query, key, value, **options)


def _handed(rank: int, num_ranks: int, form: str) -> list[torch.Tensor]:
    kernel = _Noting()
    layer = UlyssesAttention(dist.group.WORLD, backend=kernel, grid=(4, 1))
    layer(*_own(rank, _whole()), attn_mask=FORMS[form](), seq_lens=LENS)
    return kernel.masks


def test_a_mask_for_each_head_is_cut_by_global_head(pool):
    mask = FORMS["[H, S, S]"]()
    for rank, (handed,) in enumerate(pool(4).run(_handed, "[H, S, S]")):
        assert torch.equal(handed, mask[None, rank : rank + 1])


def test_key_padding_is_the_whole_one_on_every_rank(pool):
    """Built from local lengths, or on the last rank only, it would hide other keys."""
    for (handed,) in pool(4).run(_handed, "key padding, [B, 1, 1, S]"):
        assert torch.equal(handed, _padding()[:, None, None, :])


def _bool_and_float(rank: int, num_ranks: int) -> float:
    layer, own = UlyssesAttention(dist.group.WORLD), _own(rank, _whole())
    visible = FORMS["[S, S]"]()
    added = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    outs = [layer(*own, attn_mask=mask, seq_lens=LENS) for mask in (visible, added)]
    return float((outs[0] - outs[1]).abs().max())


def test_a_bool_mask_and_its_additive_form_agree(pool):
    assert max(pool(4).run(_bool_and_float)) < 1e-12


def _hidden_rows(rank: int, num_ranks: int, kind: str, grid: tuple[int, int]) -> None:
    """Rows 2 and 5 see nothing, and the loss is of the others only."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    visible[[2, 5]] = False
    mask = visible
    if kind == "float":
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    own = [tensor.requires_grad_() for tensor in _own(rank, _whole())]
    layer = UlyssesAttention(dist.group.WORLD, grid=grid)
    out = layer(*own, attn_mask=mask, seq_lens=LENS)
    seen = reference.shard(visible.any(1)[None, :], LENS, rank)[0]
    assert out[:, ~seen].eq(0).all()
    assert out[:, seen].ne(0).all()
    out.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in own)
    assert own[0].grad[:, ~seen].eq(0).all()
    assert own[0].grad[:, seen].ne(0).any()


@pytest.mark.parametrize("grid", [(4, 1), (1, 4)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_see_nothing_are_zero_with_zero_gradients(pool, kind, grid):
    pool(4).run(_hidden_rows, kind, grid)


def _both(rank: int, num_ranks: int) -> None:
    """Key 0 is hidden by the mask, so that row 0 of causal attention sees nothing."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    tensors = _whole()
    out = UlyssesAttention(dist.group.WORLD)(
        *_own(rank, tensors), attn_mask=mask, is_causal=True, seq_lens=LENS
    )
    expected = dense.attention(*tensors, dense.Shape(is_causal=True), mask=mask)[0]
    torch.testing.assert_close(out, reference.shard(expected, LENS, rank))


def test_a_mask_and_causal_are_combined(pool):
    pool(4).run(_both)


BAD = {
    "a local square mask": (lambda: torch.ones(1, 1, 3, 3), r"\(1, 1, 3, 3\).*= \(2, 4, 6, 6\)"),
    "local columns": (lambda: torch.ones(6, 3), r"attn_mask of shape .*QueryRows"),
    "whole rows in QueryRows": (lambda: QueryRows(torch.ones(6, 6)), r"QueryRows of shape"),
    "a head too many": (lambda: torch.ones(1, 5, 6, 6), "does not fit"),
    "key padding without its dims": (lambda: torch.ones(2, 6), r"mask\[:, None, None, :\]"),
    "integers": (lambda: torch.ones(6, 6, dtype=torch.int64), "bool .*or floating point"),
    "no tensor": (lambda: [[True]], "list"),
    "another device": (lambda: torch.ones(6, 6, device="meta"), "mask is on meta"),
    "a causal bias in QueryRows": (
        lambda: QueryRows(causal_upper_left(3, 6)),
        "causal bias .*by itself",
    ),
    "a causal bias of other lengths": (
        lambda: causal_upper_left(3, 3),
        "the whole sequence has 6 and 6",
    ),
}


def _refused(rank: int, num_ranks: int, kind: str) -> None:
    own, mask = [torch.zeros(2, 3, 4, 8) for _ in range(3)], BAD[kind][0]()
    with counted() as counts:
        try:
            UlyssesAttention(dist.group.WORLD)(*own, attn_mask=mask)
        except (TypeError, ValueError):
            assert not counts.collectives
            raise


@pytest.mark.parametrize("kind", BAD)
def test_a_mask_that_does_not_fit_is_refused_before_anything_is_sent(pool, kind):
    with pytest.raises(Exception, match=BAD[kind][1]) as refused:
        pool(2).run(_refused, kind)
    assert sorted(refused.value.errors) == [0, 1]


class _NoMasks(SdpaAttention):
    """A kernel without a mask argument, as some are."""

    name = "no-masks"

    def unsupported(self, problem):
        return "attn_mask: it has no argument for one" if problem.mask_dtype else None

    def __call__(self, query, key, value, *, band, scale):
        return super().__call__(query, key, value, band=band, scale=scale)


def _without_masks(rank: int, num_ranks: int, masked: bool) -> None:
    tensors = _whole()
    layer = UlyssesAttention(dist.group.WORLD, backend=_NoMasks())
    with counted() as counts:
        try:
            mask = _padding()[:, None, None, :] if masked else None
            out = layer(*_own(rank, tensors), attn_mask=mask, seq_lens=LENS)
        except ValueError:
            assert not counts.collectives
            raise
    torch.testing.assert_close(
        out, reference.shard(dense.attention(*tensors, PLAIN)[0], LENS, rank)
    )


def test_a_kernel_without_masks_is_refused_by_name_and_runs_uneven_lengths_without(pool):
    """10 tokens on 4 ranks need no padding, so no mask either."""
    pool(4).run(_without_masks, False)
    with pytest.raises(Exception, match=r"'no-masks' can not run grid .*attn_mask") as refused:
        pool(4).run(_without_masks, True)
    assert sorted(refused.value.errors) == [0, 1, 2, 3]


def _streams(rank: int, num_ranks: int) -> None:
    """Text 8 (2 real) and image 4, each sharded by itself: the order is T0 I0 T1 I1 ..."""
    text, image = 8 // num_ranks, 4 // num_ranks
    order = [
        position
        for r in range(num_ranks)
        for position in (
            *range(text * r, text * r + text),
            *range(8 + image * r, 8 + image * (r + 1)),
        )
    ]
    real = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    whole = [reference.draw(1, 12, 8, 16, seed=seed) for seed in range(3)]
    lens = (text + image,) * num_ranks
    own = [reference.shard(tensor[:, order], lens, rank) for tensor in whole]
    out = UlyssesAttention(dist.group.WORLD)(*own, attn_mask=real[order][None, None, None])
    expected = dense.attention(*whole, PLAIN, mask=real)[0][:, order]
    torch.testing.assert_close(out, reference.shard(expected, lens, rank))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_streams_sharded_one_by_one_take_their_mask_in_the_same_order(pool, num_ranks):
    pool(num_ranks).run(_streams)
