"""Positions and packed documents: of several kinds, per stream, padded one by one."""

import pytest
import torch
import torch.distributed as dist

from tests import dense, reference
from ulysses import (
    UlyssesAttention,
    documents_of,
    gather_sequence_slice_grads,
    position_ids,
    shard_batch,
    shard_sequence,
)
from ulysses.tiling import grids, shard_lengths

HEADS, DIM = 4, 8


def _three_kinds(rank: int, num_ranks: int) -> None:
    """[3, batch, s]: text, height and width; neither the 3 nor the batch is the sequence."""
    whole = torch.arange(3 * 8).view(3, 1, 8)
    part = shard_sequence(whole, dist.group.WORLD, dim=-1)
    assert part.shape == (3, 1, 8 // num_ranks)
    assert torch.equal(gather_sequence_slice_grads(part, dist.group.WORLD, dim=-1), whole)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_positions_of_three_kinds_are_sharded_and_gathered_along_the_tokens(pool, num_ranks):
    pool(num_ranks).run(_three_kinds)


def test_borders_are_not_read_from_positions_of_three_kinds():
    """Flattened, they would be documents that end at l, 2 l and 3 l."""
    with pytest.raises(ValueError, match=r"positions of shape \(3, 1, 8\).*documents=\(0, \.\.\."):
        documents_of(torch.arange(8).expand(3, 1, 8))
    assert documents_of(torch.arange(8).expand(1, 8)) == (0, 8)


def test_borders_are_where_positions_start_again():
    restarts = [*range(3), 0, *range(4)]
    for positions in (torch.tensor(restarts), torch.tensor([restarts] * 2)):
        assert documents_of(positions) == (0, 3, 4, 8)
    assert documents_of(torch.tensor([5, 6, 7])) == (0, 3)
    assert documents_of(torch.zeros(2, 0, dtype=torch.int64)) == (0, 0)
    with pytest.raises(ValueError, match=r"positions \(2, 8\) hold different documents"):
        documents_of(torch.tensor([restarts, [*range(8)]]))


def _rotated(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, l, H, D] at these positions."""
    steps = 10.0 ** -torch.arange(DIM // 2, dtype=tensor.dtype)
    angle = (positions[:, None] * steps)[:, None]
    even, odd = tensor.unflatten(3, (DIM // 2, 2)).unbind(4)
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, 4).flatten(3)


def _whole() -> list[torch.Tensor]:
    return [reference.draw(2, 8, HEADS, DIM, seed=seed) for seed in range(3)]


def _differs(rank: int, lens, grid, order, positions, **options) -> list[str]:
    """Rotated on the shard, attended over ranks; against one process in the tokens' own order."""
    whole = [tensor.requires_grad_() for tensor in _whole()]
    own = [reference.shard(t.detach()[:, order], lens, rank).requires_grad_() for t in whole]
    layer = UlyssesAttention(dist.group.WORLD, grid=grid)
    out = layer(
        *(_rotated(tensor, positions) for tensor in own[:2]), own[2], seq_lens=lens, **options
    )
    places = torch.arange(8)
    turned = (_rotated(tensor, places) for tensor in whole[:2])
    expected = dense.attention(*turned, whole[2], dense.Shape(**options))[0]
    upstream = reference.draw(*expected.shape, seed=9)
    out.backward(reference.shard(upstream[:, order], lens, rank))
    expected.backward(upstream)
    pairs = [(out, expected), *((o.grad, w.grad) for o, w in zip(own, whole, strict=True))]
    return [
        f"{grid} {name}"
        for name, (got, want) in zip(("out", "query", "key", "value"), pairs, strict=True)
        if not torch.allclose(got, reference.shard(want[:, order], lens, rank), rtol=0, atol=1e-10)
    ]


def _rotary(rank: int, num_ranks: int, length: int) -> list[str]:
    lens = (*shard_lengths(length, num_ranks)[:-1], 8 - sum(shard_lengths(length, num_ranks)[:-1]))
    positions = position_ids(lens, rank)
    order = list(range(8))
    return [
        wrong
        for grid in grids(num_ranks)
        for wrong in _differs(rank, lens, grid, order, positions, is_causal=True)
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("length", [8, 5], ids=["even", "a longer last shard"])
def test_a_shard_is_rotated_at_its_place_in_the_whole(pool, length, num_ranks):
    assert pool(num_ranks).run(_rotary, length) == [[]] * num_ranks


def _streams(rank: int, num_ranks: int) -> list[str]:
    """Two streams of 4, each sharded by itself, positions too: a rank holds some of both."""
    each = 4 // num_ranks
    batch = {"a": torch.arange(4), "b": torch.arange(4, 8)}
    parts = [shard_sequence(stream, dist.group.WORLD, dim=0) for stream in batch.values()]
    positions = torch.cat(parts)
    assert positions.tolist() == [
        s + i for s in (each * rank, 4 + each * rank) for i in range(each)
    ]
    order = [4 * s + each * r + i for r in range(num_ranks) for s in (0, 1) for i in range(each)]
    lens = (2 * each,) * num_ranks
    return [
        wrong for grid in grids(num_ranks) for wrong in _differs(rank, lens, grid, order, positions)
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_streams_sharded_one_by_one_are_rotated_by_their_own_positions(pool, num_ranks):
    assert pool(num_ranks).run(_streams) == [[]] * num_ranks


def _table_of_the_whole(rank: int, num_ranks: int) -> str:
    query = torch.zeros(1, 2, HEADS, DIM)
    with pytest.raises(RuntimeError) as refused:
        _rotated(query, torch.arange(8))
    own = shard_sequence(torch.arange(8), dist.group.WORLD, dim=0)
    assert _rotated(query, own).shape == query.shape
    return str(refused.value)


def test_a_table_of_the_whole_does_not_fit_a_shard(pool):
    for told in pool(4).run(_table_of_the_whole):
        assert "size of tensor a (2) must match the size of tensor b (8)" in told


def _packed(rank: int, num_ranks: int) -> None:
    """Documents of 3 and 5 need no padding of their own; what goes with a token stays with it."""
    side = torch.tensor([[1, 2, 3, 0, 0, 6, 7, 8]])
    batch = {"ids": torch.arange(8)[None], "visual": side}
    lens = shard_lengths(8, num_ranks)
    whole = [tensor.requires_grad_() for tensor in _whole()]
    own = [reference.shard(tensor.detach(), lens, rank).requires_grad_() for tensor in whole]
    options = {"documents": (0, 3, 8), "is_causal": True}
    for grid in grids(num_ranks):
        got = UlyssesAttention(dist.group.WORLD, grid=grid)(*own, **options)
        want = dense.attention(*whole, dense.Shape(**options))[0]
        grads = torch.autograd.grad(got.square().sum(), own)
        wanted = torch.autograd.grad(want.square().sum(), whole)
        for one, other in zip((got, *grads), (want, *wanted), strict=True):
            torch.testing.assert_close(one, reference.shard(other, lens, rank))
    padded = torch.zeros(1, 10, dtype=torch.int64)  # each document to a multiple of 2
    with pytest.raises(ValueError, match=r"lengths differ: ids 10 \(dim 1\), visual 8 \(dim 1\)"):
        shard_batch({"ids": padded, "visual": side}, dist.group.WORLD)
    for name, part in shard_batch(batch, dist.group.WORLD).items():
        assert torch.equal(part, reference.shard(batch[name], lens, rank))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_documents_are_not_padded_one_by_one_nor_side_tensors_left_behind(pool, num_ranks):
    pool(num_ranks).run(_packed)
