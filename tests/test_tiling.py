"""Tile arithmetic, by property: nothing is missed, nothing is computed twice, sums agree."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulysses.backends.base import Band
from ulysses.route import consecutive
from ulysses.tiling import (
    Everything,
    Grid,
    Tile,
    grids,
    shard_lengths,
    tile_attention,
)

ROW_BYTES = (7, 11, 5)  # different, so that no tensor is counted as another


@st.composite
def tilings(draw, max_len=4096, max_ranks=64):
    """A tiling of any heads, ranks, lengths, grid and visibility."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_kv_heads = draw(st.integers(1, 64))
    num_heads = num_kv_heads * draw(st.integers(1, 64 // num_kv_heads))
    length = draw(st.integers(1, max_len))
    lens = shard_lengths(length, num_ranks)
    if draw(st.booleans()):  # shards that a caller cut anywhere, empty ones among them
        cuts = sorted(
            draw(st.lists(st.integers(0, length), min_size=num_ranks - 1, max_size=num_ranks - 1))
        )
        lens = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    grid = draw(st.sampled_from(grids(num_ranks)))
    window = draw(st.integers(1, max_len))
    visibility = draw(
        st.sampled_from([Everything(), Band(None, 0), Band(1 - window, 0), Band(-window, window)])
    )
    return tile_attention(num_heads, num_kv_heads, lens, lens, grid, visibility), visibility


@given(tilings())
def test_every_head_and_query_is_in_exactly_one_tile(drawn):
    tiling, _ = drawn
    length = tiling.query_shards[-1].stop
    owned = sum(len(tile.heads) * len(tile.queries) for tile in tiling.tiles)
    assert owned == tiling.num_heads * length
    for u in range(tiling.grid.u):
        column = tiling.tiles[u :: tiling.grid.u]
        assert [tile.heads for tile in column] == [column[0].heads] * tiling.grid.r
        assert _is_laid_end_to_end([tile.queries for tile in column], length)
    row = tiling.tiles[: tiling.grid.u]
    assert _is_laid_end_to_end([tile.heads for tile in row], tiling.num_heads)


@given(tilings())
def test_every_tile_gets_the_keys_and_kv_heads_that_its_queries_use(drawn):
    tiling, visibility = drawn
    group_size = tiling.num_heads // tiling.num_kv_heads
    num_keys = tiling.key_shards[-1].stop
    for rank, tile in enumerate(tiling.tiles):
        if not (tile.heads and tile.queries):
            assert not tile.keys
            continue
        assert {head // group_size for head in tile.heads} == set(tile.kv_heads)
        assert tile.keys == visibility.keys(tile.queries, num_keys)
        arriving = [tiling.key_route.between[source][rank] for source in range(len(tiling.tiles))]
        assert _is_laid_end_to_end(arriving, len(tile.keys), tile.keys.start)


@given(tilings(max_ranks=16))
def test_bytes_sent_are_bytes_received(drawn):
    tiling, _ = drawn
    ranks = range(len(tiling.tiles))
    sent = [tiling.bytes_sent(rank, ROW_BYTES) for rank in ranks]
    received = [tiling.bytes_received(rank, ROW_BYTES) for rank in ranks]
    assert sum(sent) == sum(received)
    if len(ranks) == 1:
        assert sent == [0]


@given(tilings(max_ranks=16))
def test_work_is_the_visible_area(drawn):
    tiling, visibility = drawn
    length = tiling.query_shards[-1].stop
    assert sum(tiling.work) == tiling.num_heads * visibility.area(range(length), length)


@given(tilings(max_len=64, max_ranks=9))
def test_runs_share_kv_heads_evenly_and_cover_the_tile(drawn):
    tiling, _ = drawn
    for tile in tiling.tiles:
        if tile.is_empty:
            continue
        assert len(tile.runs) <= 3
        assert _is_laid_end_to_end([heads for heads, _ in tile.runs], len(tile.heads))
        for heads, kv_heads in tile.runs:
            assert len(heads) % len(kv_heads) == 0
            share = len(heads) // len(kv_heads)
            for i, head in enumerate(heads):
                used = (tile.heads[head]) // tile.group_size - tile.kv_heads.start
                assert kv_heads[i // share] == used


@given(st.integers(1, 64), st.integers(1, 4096), st.data())
def test_causal_row_blocks_are_level(num_ranks, extra, data):
    length = 64 * num_ranks + extra
    grid = data.draw(st.sampled_from(grids(num_ranks)))
    lens = shard_lengths(length, num_ranks)
    tiling = tile_attention(grid.u, grid.u, lens, lens, grid, Band(None, 0))
    mean = sum(tiling.work) / num_ranks
    assert all(abs(work - mean) <= 0.05 * mean for work in tiling.work)


@given(
    st.one_of(st.none(), st.integers(-40, 40)),
    st.integers(0, 40),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 30),
    st.booleans(),
)
def test_a_band_counts_and_bounds_what_its_mask_shows(lower, width, start, size, num_keys, is_open):
    band = Band(lower, None if is_open else (lower or 0) + width)
    queries = range(start, start + size)
    mask = band.mask(queries.stop, num_keys, torch.device("cpu"))[start:]
    assert band.area(queries, num_keys) == mask.sum().item()
    keys = band.keys(queries, num_keys)
    seen = mask.any(0).nonzero().flatten().tolist()
    assert set(seen) <= set(keys)
    if seen:
        assert (seen[0], seen[-1]) == (keys.start, keys.stop - 1)
    shifted = band.shifted(start, keys.start).mask(size, len(keys), mask.device)
    assert (shifted == mask[:, keys.start : keys.stop]).all()
    clipped = band.clipped(queries.stop, num_keys).mask(queries.stop, num_keys, mask.device)
    assert (clipped[start:] == mask).all()


def test_bytes_are_the_published_formulas():
    """Bytes a rank sends: (2+2g) S h e (P-1)/P^2 for Ulysses, 2 g S h e (P-1)/P for K/V gather."""
    length, heads, kv_heads, dim, ranks = 128, 16, 8, 4, 8
    row_bytes = (dim * 2, 2 * dim * 2, dim * 2)
    lens = shard_lengths(length, ranks)
    total = length * heads * dim * 2
    share = kv_heads / heads
    ulysses = tile_attention(heads, kv_heads, lens, lens, Grid(ranks, 1))
    gather = tile_attention(heads, kv_heads, lens, lens, Grid(1, ranks))
    for rank in range(ranks):
        assert (
            ulysses.bytes_sent(rank, row_bytes) == (2 + 2 * share) * total * (ranks - 1) / ranks**2
        )
        assert gather.bytes_sent(rank, row_bytes) == 2 * share * total * (ranks - 1) / ranks


def test_fewer_kv_heads_than_ranks_send_one_head_each():
    """(2 + 2P/H) S h e (P-1)/P^2: a kv head goes to the ranks that use it, never expanded to H."""
    length, heads, kv_heads, dim, ranks = 64, 8, 2, 4, 4
    tiling = tile_attention(heads, kv_heads, (16,) * 4, (16,) * 4, Grid(ranks, 1))
    row_bytes = (dim * 2, 2 * dim * 2, dim * 2)
    expected = (2 + 2 * ranks / heads) * length * heads * dim * 2 * (ranks - 1) / ranks**2
    assert [tiling.bytes_sent(rank, row_bytes) for rank in range(ranks)] == [expected] * ranks


def test_heads_that_do_not_divide_differ_by_one():
    lens = (2, 2, 2, 2)
    tiling = tile_attention(7, 7, lens, lens, Grid(4, 1))
    assert [len(tile.heads) for tile in tiling.tiles] == [2, 2, 2, 1]


def test_twelve_heads_of_three_kv_heads_are_three_each():
    lens = (2, 2, 2, 2)
    tiling = tile_attention(12, 3, lens, lens, Grid(4, 1))
    assert [tile.heads for tile in tiling.tiles] == [range(3 * r, 3 * r + 3) for r in range(4)]
    assert tiling.tiles[1].runs == ((range(1), range(1)), (range(1, 3), range(1, 2)))


def test_rows_follow_the_shards_where_they_are_level():
    """Without a mask no query moves on grid (1, P), whoever holds the longer shards."""
    tiling = tile_attention(4, 4, (33, 33, 34), (33, 33, 34), Grid(1, 3))
    assert tiling.query_route.is_identity
    assert not tiling.key_route.is_identity


def test_a_window_needs_a_halo_only():
    """Window of w keys on row grids: each neighbour sends at most w rows, whatever S is."""
    lens = (256,) * 4
    tiling = tile_attention(2, 2, lens, lens, Grid(1, 4), Band(-63, 0))
    for rank, tile in enumerate(tiling.tiles):
        from_others = [
            len(tiling.key_route.between[other][rank]) for other in range(4) if other != rank
        ]
        assert sum(from_others) == (63 if rank else 0), tile


@pytest.mark.parametrize(("length", "parts"), [(10, 4), (3, 4), (0, 2), (7, 1)])
def test_shard_lengths(length, parts):
    lens = shard_lengths(length, parts)
    assert len(lens) == parts
    assert sum(lens) == length
    assert max(lens) - min(lens) <= 1
    assert sorted(lens, reverse=True) == list(lens)


@pytest.mark.parametrize("num_ranks", [1, 6, 64])
def test_grids_are_all_factorings(num_ranks):
    found = grids(num_ranks)
    assert found[0] == (num_ranks, 1)
    assert found[-1] == (1, num_ranks)
    assert Counter(found) == Counter(
        (u, num_ranks // u) for u in range(1, num_ranks + 1) if num_ranks % u == 0
    )


def _is_laid_end_to_end(ranges, stop, start=0):
    """True if the ranges that are not empty cover start..start+stop without gap or overlap."""
    place = start
    for part in ranges:
        if part:
            if part.start != place:
                return False
            place = part.stop
    return place == start + stop


def test_consecutive_ranges():
    assert consecutive((2, 0, 3)) == (range(2), range(2, 2), range(2, 5))
    assert Tile(range(2), range(0), range(1), range(3), 2).is_empty
