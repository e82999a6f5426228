"""Small numbers with which attention over ranks has gone wrong for people; the right value alone
passes. docs/cases.md says where the other kinds are tested."""

import pytest
import torch
import torch.distributed as dist

from tests import dense, reference
from tests.counting import counted
from ulysses import UlyssesAttention
from ulysses.tiling import Grid, grids, shard_lengths, tile_attention

DIM = 8


def _differences(rank, num_ranks, sizes, grid, in_memory=None, **options) -> float:
    """The largest difference of output or gradients, with a random upstream gradient."""
    batch, length, heads, kv_heads = sizes
    lens = shard_lengths(length, num_ranks)
    whole = [
        reference.draw(batch, length, h, DIM, seed=seed, dtype=torch.float32).requires_grad_()
        for seed, h in enumerate((heads, kv_heads, kv_heads))
    ]
    order = (0, 1, 2, 3) if in_memory is None else in_memory
    back = [order.index(dim) for dim in range(4)]
    own = [
        reference.shard(t.detach(), lens, rank).permute(order).contiguous().permute(back)
        for t in whole
    ]
    layer = UlyssesAttention(dist.group.WORLD, grid=grid)
    out = layer(*(t.requires_grad_() for t in own), seq_lens=lens, **options)
    expected = dense.attention(*whole, dense.Shape(**options))[0]
    upstream = reference.draw(*expected.shape, seed=9, dtype=torch.float32)
    out.backward(reference.shard(upstream, lens, rank))
    expected.backward(upstream)
    pairs = [(out, expected), *((o.grad, w.grad) for o, w in zip(own, whole, strict=True))]
    apart = [(got - reference.shard(want, lens, rank)).detach().abs() for got, want in pairs]
    return max([0.0, *(float(part.max()) for part in apart if part.numel())])


def _on_every_grid(rank, num_ranks, sizes, **options) -> float:
    grid_list = ["auto", *map(tuple, grids(num_ranks))]
    return max(_differences(rank, num_ranks, sizes, grid, **options) for grid in grid_list)


HEADS = {
    "each rank's heads are no multiple of the ranks": (8, 8, 4),
    "one head a rank": (4, 4, 4),
    "the last rank has fewer heads": (7, 7, 4),
    "three ranks have fewer heads": (5, 5, 4),
    "6 heads would be padded to 8": (6, 6, 4),
    "more ranks than heads": (2, 2, 4),
    "key/value heads evenly over the ranks": (8, 2, 2),
    "ranks share a key/value head": (8, 2, 4),
    "3 key/value heads on 4 ranks": (12, 3, 4),
    "4 key/value heads on 3 ranks": (12, 4, 3),
    "one key/value head for all": (4, 1, 4),
    "one key/value head on two ranks": (4, 1, 2),
}


@pytest.mark.parametrize("kind", HEADS)
def test_any_heads_on_any_ranks(pool, kind):
    heads, kv_heads, num_ranks = HEADS[kind]
    sizes = (2, 8, heads, kv_heads)
    assert max(pool(num_ranks).run(_on_every_grid, sizes, is_causal=True)) < 1e-5


def test_heads_are_level_whatever_was_called_before(pool):
    """Three key/value heads once, and 12 heads must not be 4, 4, 4 and 0 afterwards."""
    pool(4).run(_on_every_grid, (1, 8, 12, 3))
    for kv_heads in (3, 12):
        tiles = tile_attention(12, kv_heads, (2,) * 4, (2,) * 4, Grid(4, 1)).tiles
        assert [tile.heads for tile in tiles] == [range(3 * r, 3 * r + 3) for r in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 10, 11])
def test_any_length_on_any_ranks(pool, length, num_ranks):
    """Fewer rows than ranks, and shares of ceil and floor: nothing is padded, dropped or hangs."""
    assert max(pool(num_ranks).run(_on_every_grid, (2, length, 4, 4))) < 1e-5


ORDERS = {"[B, S, H, D]": (0, 1, 2, 3), "[B, H, S, D]": (0, 2, 1, 3), "[S, B, H, D]": (1, 0, 2, 3)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 4, 4), (2, 8, 4, 2), (1, 8, 4, 2)], ids=["B = l", "B = l = Hkv", "B = 1"]
)
def test_sizes_that_are_equal_are_not_confused(pool, sizes, order):
    """Where batch, rows and key/value heads are 2 each, a swapped dim fits every shape."""
    num_ranks = sizes[1] // 2
    run = pool(num_ranks).run
    assert max(run(_on_every_grid, sizes, is_causal=True, in_memory=ORDERS[order])) < 1e-5


def _costs(rank, num_ranks, heads, kv_heads) -> tuple[int, int]:
    own = [torch.randn(2, 4, h, DIM) for h in (heads, kv_heads, kv_heads)]
    layer = UlyssesAttention(dist.group.WORLD, grid=(num_ranks, 1))
    with counted() as counts:
        for _ in range(4):
            layer(*own)
    return len(counts.collectives), counts.sent // 4


def test_key_value_heads_travel_as_they_are(pool):
    """Never expanded to the query heads: half of query, key, value and output rows leave."""
    rows = 2 * 4 * DIM * 4  # of one head: batch, rows, dim, bytes
    for _, sent in pool(2).run(_costs, 8, 4):
        assert sent == rows * (8 + 4 + 4 + 8) // 2


@pytest.mark.parametrize("heads", [(4, 4), (8, 8), (16, 2)])
def test_collectives_do_not_grow_with_heads_or_calls(pool, heads):
    """Two a call while messages are small, none of them to ask for lengths."""
    assert {count for count, _ in pool(4).run(_costs, *heads)} == {4 * 2}
