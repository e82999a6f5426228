"""The layer against attention in one process: output and every gradient, on every grid."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests import reference
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import Band
from ulysses.tiling import grids, shard_lengths

HEADS = [(h, kv) for h in (1, 2, 5, 6, 7, 8, 9, 12, 28) for kv in range(1, h + 1) if h % kv == 0]
RANKS = [1, 2, 3, 4, 6]


def _lengths(num_ranks: int) -> list[tuple[int, ...]]:
    """Odd, shorter than the number of ranks, and shards that the caller chose unevenly."""
    chosen = tuple((3 * rank) % 5 for rank in range(num_ranks))
    return [shard_lengths(13, num_ranks), shard_lengths(1, num_ranks), chosen]


def _differences(
    attention: UlyssesAttention,
    heads: tuple[int, int],
    lens: tuple[int, ...],
    batch: int = 1,
    is_causal: bool = False,
    dims: tuple[int, int] = (4, 3),
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """Largest differences from one process on this rank: output, dq, dk, dv."""
    num_heads, num_kv_heads = heads
    dim, value_dim = dims
    length, rank = sum(lens), attention.rank
    whole = [
        reference.draw(batch, length, num_heads, dim, seed=1, dtype=dtype),
        reference.draw(batch, length, num_kv_heads, dim, seed=2, dtype=dtype),
        reference.draw(batch, length, num_kv_heads, value_dim, seed=3, dtype=dtype),
    ]
    upstream = reference.draw(batch, length, num_heads, value_dim, seed=4, dtype=dtype)
    own = [reference.shard(t, lens, rank).clone().requires_grad_() for t in whole]
    out = attention(*own, is_causal=is_causal, seq_lens=lens)
    out.backward(reference.shard(upstream, lens, rank))

    exact = [tensor.double().requires_grad_() for tensor in whole]
    band = Band(None, 0) if is_causal else Band()
    expected = reference.attention(*exact, band=band)
    expected.backward(upstream.double())
    got = [out, *(tensor.grad for tensor in own)]
    want = [expected, *(tensor.grad for tensor in exact)]
    shapes = [reference.shard(w, lens, rank).shape for w in want]
    assert [g.shape for g in got] == shapes
    assert all(g.dtype == dtype for g in got)
    return [
        (g - reference.shard(w, lens, rank)).abs().max().item() if g.numel() else 0.0
        for g, w in zip(got, want, strict=True)
    ]


def _matrix(rank: int, num_ranks: int, heads: list[tuple[int, int]]) -> list[str]:
    """Every grid, length, batch and causality for some head counts; what was wrong."""
    wrong = []
    for grid in grids(num_ranks):
        attention = UlyssesAttention(dist.group.WORLD, grid=grid)
        for pair, lens, batch, causal in itertools.product(
            heads, _lengths(num_ranks), (1, 3), (False, True)
        ):
            differences = _differences(attention, pair, lens, batch, causal)
            if not max(differences) < 1e-10:
                wrong.append(f"{grid=} {pair=} {lens=} {batch=} {causal=}: {differences}")
    return wrong


@pytest.mark.parametrize("num_ranks", RANKS)
def test_matrix(pool, num_ranks):
    for wrong in pool(num_ranks).run(_matrix, HEADS, timeout=240):
        assert not wrong, "\n".join(wrong[:20])
