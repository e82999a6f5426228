"""The exchange alone: bit-exact moves, each way the other's transpose, and what they cost."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import reference
from tests.counting import counted
from ulysses import tile_inputs
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import Band
from ulysses.call import Call
from ulysses.exchange import shard_to_tile, tile_to_shard
from ulysses.structure import one_band
from ulysses.tiling import EVERYTHING, Grid, grids, shard_lengths, tile_attention
from ulysses.workspace import Workspace

# 1001 rows on 3 ranks, empty shards, fewer rows than ranks.
LENGTHS = [(7, 0, 4), (1, 0, 0), (3, 3, 2)]


def _tilings(num_ranks):
    for lens in LENGTHS if num_ranks == 3 else [shard_lengths(9, num_ranks)]:
        for grid in grids(num_ranks):
            for heads, kv_heads in ((6, 3), (5, 1), (2, 2)):
                for visibility in (EVERYTHING, Band(None, 0), Band(-2, 0)):
                    yield tile_attention(heads, kv_heads, lens, lens, grid, visibility)


def _moves(rank: int, num_ranks: int, fused: bool) -> None:
    group = dist.group.WORLD
    for tiling in _tilings(num_ranks):
        routes = (tiling.query_route, tiling.key_route, tiling.key_route)
        length = tiling.query_shards[-1].stop
        whole = [
            reference.draw(2, length, route.num_heads, dim, seed=dim)
            for route, dim in zip(routes, (3, 3, 5), strict=True)
        ]
        lens = tuple(len(shard) for shard in tiling.query_shards)
        own = [reference.shard(t, lens, rank).clone().requires_grad_() for t in whole]
        tiles = shard_to_tile(own, routes, group, fused=fused)
        for tile, tensor, route in zip(tiles, whole, routes, strict=True):
            rows, heads = route.rows[rank], route.heads[rank]
            wanted = tensor[:, rows.start : rows.stop, heads.start : heads.stop]
            assert torch.equal(tile, wanted), tiling
        shards = tile_to_shard(tiles, routes, group)
        for shard, tensor, route in zip(shards, own, routes, strict=True):
            sent_to = _receivers(route, rank)
            assert torch.equal(shard, tensor * sent_to), tiling
        grads = torch.autograd.grad([shard.sum() for shard in shards], own)
        for grad, route in zip(grads, routes, strict=True):
            assert torch.equal(grad, _receivers(route, rank).expand_as(grad)), tiling


def _later(rank: int, num_ranks: int) -> None:
    """What one exchange has brought is no memory of the next one's messages."""
    group = dist.group.WORLD
    for tiling in _tilings(num_ranks):
        length = len(tiling.query_shards[rank])
        routes = (tiling.query_route,) * 2
        brought, copies = [], []
        for value in (1.0, 2.0):
            own = [torch.full((2, length, tiling.num_heads, 3), value)] * 2
            tiles = shard_to_tile(own, routes, group, fused=False)
            brought += [*tiles, *tile_to_shard(tiles, routes, group)]
            copies += [tensor.clone() for tensor in brought[-4:]]
        assert all(torch.equal(*pair) for pair in zip(brought, copies, strict=True)), tiling


def test_results_stay_when_messages_use_memory_again(pool):
    pool(3).run(_later)


def test_a_workspace_lends_what_it_got_back_and_keeps_little():
    workspace, like = Workspace(), torch.zeros(1)
    first = workspace.borrow(like, 100)
    second = workspace.borrow(like, 100)
    assert first.data_ptr() != second.data_ptr()
    workspace.give_back(first)
    assert workspace.borrow(like.double(), 100).dtype == torch.float64
    assert workspace.borrow(like, 100) is first
    with torch.inference_mode():
        workspace.give_back(workspace.borrow(torch.zeros(1), 7))
    workspace.borrow(like, 7).zero_()
    for _ in range(10):  # 4 MiB each
        workspace.give_back(torch.empty(1 << 20))
    assert 0 < workspace.kept_bytes <= 24 << 20
    held = [workspace.borrow(like, 1 << 20) for _ in range(8)]
    assert len({tensor.data_ptr() for tensor in held}) == 8
    workspace.give_back(torch.empty(1 << 23))
    assert workspace.kept_bytes == 0


def _receivers(route, rank):
    """[1, l, heads, 1]: how many tiles hold each row and head of this shard."""
    shard = route.shards[rank]
    count = torch.zeros(1, len(shard), route.num_heads, 1, dtype=torch.float64)
    for target, heads in enumerate(route.heads):
        rows = route.between[rank][target]
        count[:, rows.start - shard.start : rows.stop - shard.start, heads.start : heads.stop] += 1
    return count


@pytest.mark.parametrize(
    ("num_ranks", "fused"), [(1, True), (2, True), (3, False), (4, True), (4, False)]
)
def test_moves_every_bit_there_and_back(pool, num_ranks, fused):
    pool(num_ranks).run(_moves, fused)


def _cost(rank: int, num_ranks: int, batch: int, fuse_below: int) -> None:
    """Grid (P, 1) and P | Hkv: a message for each tensor, or one for all."""
    length = 16
    heads, kv_heads, dim = 8, 4, 16
    attention = UlyssesAttention(dist.group.WORLD, grid=(num_ranks, 1))
    local = length // num_ranks
    query, key, value = (
        torch.randn(batch, local, h, dim, requires_grad=True) for h in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(batch, local, heads, dim)
    own_bytes = sum(t.numel() * 4 for t in (query, key, value, query))
    with mock.patch.object(tile_inputs, "_FUSE_BELOW_BYTES", fuse_below):
        with counted() as forward:
            out = attention(query, key, value)
        with counted() as backward:
            torch.autograd.grad(out, (query, key, value), upstream)
    call = Call(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_dim=dim,
        query_lens=(local,) * num_ranks,
        key_lens=(local,) * num_ranks,
        dtype=torch.float32,
        device_type="cpu",
        requires_grad=True,
        structure=one_band(length, length, Band()),
    )
    assert attention.tiling == call.tiled(Grid(num_ranks, 1))
    for counts in (forward, backward):
        assert len(counts.collectives) == (2 if fuse_below and counts is forward else 4)
        assert set(counts.collectives) == {"c10d::alltoall_base_"}
        assert counts.sent == attention.tiling.bytes_sent(rank, call.row_bytes)
        assert counts.copied <= own_bytes, (counts, own_bytes)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fuse_below", [0, 1 << 21])
def test_costs_what_the_tiling_says_and_one_copy(pool, batch, fuse_below):
    pool(4).run(_cost, batch, fuse_below)


def _window(rank: int, num_ranks: int) -> None:
    tiling = tile_attention(2, 2, (64,) * 4, (64,) * 4, Grid(1, 4), Band(-15, 0))
    own = torch.randn(1, 64, 2, 8)
    with counted() as counts:
        (tile,) = shard_to_tile((own,), (tiling.key_route,), dist.group.WORLD, fused=False)
    assert tile.shape[1] == (64 if rank == 0 else 79)
    assert counts.sent == (0 if rank == 3 else 15 * 2 * 8 * 4)


def test_a_window_is_a_halo_exchange(pool):
    pool(4).run(_window)


def _nothing_crosses(rank: int, num_ranks: int) -> None:
    """All rows on one rank and one head: nobody needs anything of anybody."""
    lens = (5, 0)
    attention = UlyssesAttention(dist.group.WORLD, grid=(2, 1))
    own = torch.randn(2, lens[rank], 1, 4, requires_grad=True)
    with counted() as counts:
        out = attention(own, own, own, seq_lens=lens)
        out.sum().backward()
    assert out.shape == own.shape
    assert not counts.collectives


def test_no_collective_where_nothing_crosses(pool):
    pool(2).run(_nothing_crosses)
