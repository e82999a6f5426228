"""The layer against attention in one process: output and every gradient, on every grid."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from tests import reference
from tests.counting import counted
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import Band
from ulysses.tiling import grids, shard_lengths

HEADS = [(h, kv) for h in (1, 2, 5, 6, 7, 8, 9, 12, 28) for kv in range(1, h + 1) if h % kv == 0]


def _lengths(num_ranks: int) -> list[tuple[int, ...]]:
    """Odd, shorter than the number of ranks, and shards that the caller chose unevenly."""
    chosen = tuple((3 * rank) % 5 for rank in range(num_ranks))
    return [shard_lengths(13, num_ranks), shard_lengths(1, num_ranks), chosen]


@functools.cache
def _one_process(
    heads: tuple[int, int],
    length: int,
    batch: int,
    is_causal: bool,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Query, key, value, and an upstream gradient; the exact output, dq, dk, dv."""
    num_heads, num_kv_heads = heads
    dim, value_dim = dims
    shapes = ((num_heads, dim), (num_kv_heads, dim), (num_kv_heads, value_dim))
    shapes += ((num_heads, value_dim),)
    given = [
        reference.draw(batch, length, *shape, seed=seed, dtype=dtype)
        for seed, shape in enumerate(shapes, 1)
    ]
    exact = [tensor.to(torch.float64, copy=True).requires_grad_() for tensor in given[:3]]
    expected = reference.attention(*exact, band=Band(None, 0) if is_causal else Band())
    expected.backward(given[3].double())
    return given, [expected.detach(), *(tensor.grad for tensor in exact)]


def _differences(
    attention: UlyssesAttention,
    heads: tuple[int, int],
    lens: tuple[int, ...],
    batch: int = 1,
    is_causal: bool = False,
    dims: tuple[int, int] = (4, 3),
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """Largest differences from one process on this rank: output, dq, dk, dv.

    In units of the largest value of each, where that is over 1.
    """
    rank = attention.rank
    (*whole, upstream), want = _one_process(heads, sum(lens), batch, is_causal, dims, dtype)
    own = [reference.shard(t, lens, rank).clone().requires_grad_() for t in whole]
    out = attention(*own, is_causal=is_causal, seq_lens=lens)
    out.backward(reference.shard(upstream, lens, rank))

    got = [out, *(tensor.grad for tensor in own)]
    shapes = [reference.shard(w, lens, rank).shape for w in want]
    assert [g.shape for g in got] == shapes
    assert all(g.dtype == dtype for g in got)
    return [
        ((g - reference.shard(w, lens, rank)).abs().max() / w.abs().max().clamp(min=1)).item()
        if g.numel()
        else 0.0
        for g, w in zip(got, want, strict=True)
    ]


def _matrix(rank: int, num_ranks: int, stride: int) -> list[str]:
    """Every grid and head count, with every length, batch and causality in turn; what was wrong.

    `stride` spreads the combinations over the head counts where all of them would take minutes.
    """
    wrong = []
    combinations = list(itertools.product(_lengths(num_ranks), (1, 3), (False, True)))
    for grid in grids(num_ranks):
        attention = UlyssesAttention(dist.group.WORLD, grid=grid)
        for i, heads in enumerate(HEADS):
            for lens, batch, is_causal in combinations[i % stride :: stride]:
                differences = _differences(attention, heads, lens, batch, is_causal)
                if not max(differences) < 1e-10:
                    wrong.append(f"{grid=} {heads=} {lens=} {batch=} {is_causal=}: {differences}")
    return wrong


@pytest.mark.parametrize(("num_ranks", "stride"), [(1, 2), (2, 4), (3, 6), (4, 12), (6, 12)])
def test_equals_one_process_for_all_heads_grids_and_lengths(pool, num_ranks, stride):
    for wrong in pool(num_ranks).run(_matrix, stride, timeout=120):
        assert not wrong, "\n".join(wrong[:20])


def _by_dtype(rank: int, num_ranks: int, dtype: torch.dtype) -> float:
    worst = 0.0
    for grid in grids(num_ranks):
        attention = UlyssesAttention(dist.group.WORLD, grid=grid)
        for heads in ((5, 5), (6, 2), (8, 1)):
            worst = max(
                worst, *_differences(attention, heads, (7, 3, 5, 2), 2, True, (16, 16), dtype)
            )
    return worst


# One rounding is 2^-9 of the value in bfloat16 and 2^-12 in float16; a gradient adds up a few.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)]
)
def test_equals_one_process_in_every_dtype(pool, dtype, bound):
    assert max(pool(4).run(_by_dtype, dtype)) < bound


def _strided(rank: int, num_ranks: int) -> None:
    """Views of one fused projection, and the stride-0 gradient that `.sum()` gives."""
    heads, dim, lens = 4, 8, (5, 2, 4)
    whole = reference.draw(2, 11, 3 * heads * dim, seed=1)
    own = reference.shard(whole, lens, rank).clone().requires_grad_()
    query, key, value = own.unflatten(2, (heads, 3, dim)).unbind(3)
    assert not query.is_contiguous()
    attention = UlyssesAttention(dist.group.WORLD)
    attention(query, key, value, seq_lens=lens).sum().backward()
    whole.requires_grad_()
    reference.attention(*whole.unflatten(2, (heads, 3, dim)).unbind(3)).sum().backward()
    torch.testing.assert_close(own.grad, reference.shard(whole.grad, lens, rank))


def test_inputs_and_gradients_of_any_strides(pool):
    pool(3).run(_strided)


def _heads_first_in_memory(rank: int, num_ranks: int) -> None:
    attention = UlyssesAttention(dist.group.WORLD)
    whole = [reference.draw(2, 4, 8, 4, seed=i).transpose(1, 2) for i in range(3)]
    own = [reference.shard(t, (4, 4), rank) for t in whole]
    expected = reference.shard(reference.attention(*whole), (4, 4), rank)
    torch.testing.assert_close(attention(*own), expected)


def test_transposed_memory_is_read_by_its_shape(pool):
    pool(2).run(_heads_first_in_memory)


def _alternating(rank: int, num_ranks: int) -> None:
    """Two layers of different head counts, and one layer that is handed both."""
    layers = [UlyssesAttention(dist.group.WORLD), UlyssesAttention(dist.group.WORLD)]
    for first, second in ((0, 1), (1, 0), (0, 0)):
        for layer, heads in ((first, (12, 3)), (second, (8, 8)), (first, (5, 1))):
            assert max(_differences(layers[layer], heads, (4, 3, 3, 2))) < 1e-10


def test_layers_of_different_head_counts_in_turn(pool):
    pool(4).run(_alternating)


def _second_derivative(rank: int, num_ranks: int) -> None:
    """Through exchange, math attention and exchange again."""
    lens = (3, 2)
    whole = [reference.draw(1, 5, heads, 4, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    own = [reference.shard(t.detach(), lens, rank).clone().requires_grad_() for t in whole]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = UlyssesAttention(dist.group.WORLD)(*own, seq_lens=lens)
    (grad,) = torch.autograd.grad(out.square().sum(), own[:1], create_graph=True)
    second = torch.autograd.grad(grad.square().sum(), own)
    expected = reference.attention(*whole).square().sum()
    (grad,) = torch.autograd.grad(expected, whole[:1], create_graph=True)
    for got, want in zip(second, torch.autograd.grad(grad.square().sum(), whole), strict=True):
        torch.testing.assert_close(got, reference.shard(want, lens, rank))


def test_second_derivatives(pool):
    pool(2).run(_second_derivative)


def _frozen_inputs(rank: int, num_ranks: int) -> None:
    """Only the query trains: the gradients of key and value are neither computed nor sent."""
    whole = [reference.draw(1, 6, 6, 4, seed=i) for i in range(3)]
    own = [reference.shard(t, (2, 2, 2), rank).clone() for t in whole]
    own[0].requires_grad_()
    upstream = reference.draw(1, 6, 6, 4, seed=9)
    with counted() as counts:
        out = UlyssesAttention(dist.group.WORLD, grid=(3, 1))(*own)
        forward = counts.sent
        out.backward(reference.shard(upstream, (2, 2, 2), rank))
    assert counts.sent - forward == forward / 2  # query and output only
    assert own[1].grad is None
    whole[0].requires_grad_()
    reference.attention(*whole).backward(upstream)
    torch.testing.assert_close(own[0].grad, reference.shard(whole[0].grad, (2, 2, 2), rank))


def test_inputs_without_gradient(pool):
    pool(3).run(_frozen_inputs)


def test_a_single_process_needs_no_group():
    query, key, value = (reference.draw(2, 5, heads, 4, seed=heads) for heads in (6, 3, 3))
    out = UlyssesAttention(None)(query, key, value, is_causal=True, scale=0.3)
    expected = reference.attention(query, key, value, Band(None, 0), scale=0.3)
    torch.testing.assert_close(out, expected)


def _scaled(rank: int, num_ranks: int) -> None:
    whole = [reference.draw(1, 8, 4, 16, seed=i) for i in range(3)]
    own = [reference.shard(t, (4, 4), rank) for t in whole]
    out = UlyssesAttention(dist.group.WORLD)(*own, scale=0.5)
    expected = reference.attention(*whole, scale=0.5)
    torch.testing.assert_close(out, reference.shard(expected, (4, 4), rank))


def test_scale_reaches_the_kernel(pool):
    pool(2).run(_scaled)


def _no_look_ahead(rank: int, num_ranks: int, grid: tuple[int, int]) -> None:
    """Change the last token, which lives on the last rank: no earlier row may move a bit."""
    attention = UlyssesAttention(dist.group.WORLD, grid=grid)
    whole = [reference.draw(1, 8, 4, 4, seed=i) for i in range(3)]
    before = attention(*(reference.shard(t, (4, 4), rank) for t in whole), is_causal=True)
    for tensor in whole:
        tensor[:, 7] += 1
    after = attention(*(reference.shard(t, (4, 4), rank) for t in whole), is_causal=True)
    moved = (before != after).any(-1).any(-1).flatten().nonzero().flatten().tolist()
    assert moved == ([3] if rank == 1 else [])


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_causal_rows_do_not_see_later_tokens(pool, grid):
    pool(2).run(_no_look_ahead, grid)


def _dropped(rank: int, num_ranks: int, grid: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(5)
    lens = shard_lengths(9, num_ranks)
    whole = [reference.draw(2, 9, heads, 4, seed=heads) for heads in (6, 2, 2)]
    own = [reference.shard(t, lens, rank).clone().requires_grad_() for t in whole]
    attention = UlyssesAttention(dist.group.WORLD, grid=grid)
    out = attention(*own, dropout_p=0.3, is_causal=True, seq_lens=lens)
    out.backward(reference.shard(reference.draw(2, 9, 6, 4, seed=8), lens, rank))
    again = attention(*own, dropout_p=0.3, is_causal=True, seq_lens=lens)
    assert not torch.equal(out, again)  # each call draws anew
    return torch.cat([t.detach().flatten(2) for t in (out, *(t.grad for t in own))], dim=2)


def test_dropout_is_the_same_for_every_number_of_ranks_and_grid(pool):
    (alone,) = pool(1).run(_dropped, (1, 1))
    for num_ranks in (2, 3, 4):
        for grid in grids(num_ranks):
            parts = pool(num_ranks).run(_dropped, tuple(grid))
            torch.testing.assert_close(torch.cat(parts, dim=1), alone)


@pytest.mark.parametrize("given", [list, torch.tensor, lambda n: [torch.tensor(i) for i in n]])
def test_a_layer_is_asked_for_other_documents_of_the_same_number(given):
    """Plans are remembered by what the borders are, not by how many, however they are given."""
    layer = UlyssesAttention(None)
    query, key, value = (reference.draw(1, 8, 2, 4, seed=i) for i in range(3))
    for border in (3, 5):
        out = layer(query, key, value, documents=given([0, border, 8]))
        parts = [slice(0, border), slice(border, 8)]
        expected = [reference.attention(query[:, p], key[:, p], value[:, p]) for p in parts]
        torch.testing.assert_close(out, torch.cat(expected, dim=1))
