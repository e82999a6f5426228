"""Attention as a model has it, with projections and norms around it: every weight's gradient."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import dense, reference
from ulysses import UlyssesAttention, tile_inputs
from ulysses.tiling import shard_lengths

HEADS, KV_HEADS, DIM = 4, 2, 8
WIDTH = HEADS * DIM


class _Attention(nn.Module):
    """Norms on query and key, biases, grouped heads; over ranks, or dense where there is none."""

    def __init__(self, layer: UlyssesAttention | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = layer
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * DIM) for _ in range(2))
        self.query_norm, self.key_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, hidden: torch.Tensor, **options) -> torch.Tensor:
        query, key, value = (
            proj(hidden).unflatten(2, (-1, DIM)) for proj in (self.query, self.key, self.value)
        )
        given = self.query_norm(query), self.key_norm(key), value
        if self.layer is None:
            attended = dense.attention(*given, dense.Shape(is_causal=True))[0]
        else:
            attended = self.layer(*given, is_causal=True, **options)
        return hidden + self.out(attended.flatten(2))


FROZEN = {
    "nothing": (),
    "weights, their biases learn": ("query.weight", "key.weight", "value.weight"),
    "all but the norm of the key": ("query", "key.", "value", "out"),
    "the whole key": ("key",),
}


def _gradients(rank: int, num_ranks: int, grid: tuple[int, int], fuse_below: int) -> None:
    with mock.patch.object(tile_inputs, "_FUSE_BELOW_BYTES", fuse_below):
        for names in FROZEN.values():
            _compare(rank, num_ranks, names, grid)


def _compare(rank: int, num_ranks: int, frozen: tuple[str, ...], grid: tuple[int, int]) -> None:
    whole = reference.draw(2, 7, WIDTH, seed=1)
    lens = shard_lengths(7, num_ranks)
    blocks = _Attention(None), _Attention(UlyssesAttention(dist.group.WORLD, grid=grid))
    for block in blocks:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or "-"))
    upstream = reference.draw(2, 7, WIDTH, seed=2)
    out = blocks[1](reference.shard(whole, lens, rank), seq_lens=lens)
    out.backward(reference.shard(upstream, lens, rank))
    blocks[0](whole).backward(upstream)
    for (name, want), got in zip(blocks[0].named_parameters(), blocks[1].parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), f"{name}, frozen: {frozen}"
        if got.grad is not None:
            dist.all_reduce(got.grad)
            torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("fuse_below", [1 << 21, 0], ids=["one message", "messages under way"])
@pytest.mark.parametrize(("num_ranks", "grid"), [(2, (2, 1)), (4, (2, 2)), (4, (1, 4))])
def test_every_weight_around_the_layer_has_its_gradient(pool, num_ranks, grid, fuse_below):
    """Also where a gradient is taken while messages are under way, and where some are frozen."""
    pool(num_ranks).run(_gradients, grid, fuse_below)


def _recomputed(rank: int, num_ranks: int) -> None:
    """20 steps of other lengths each, one rank empty at times, with dropout."""
    layer = UlyssesAttention(dist.group.WORLD)
    block = _Attention(layer)
    for step in range(20):
        lens = tuple((step * (r + 1) + r) % 4 for r in range(num_ranks))
        own = reference.draw(2, lens[rank], WIDTH, seed=step).requires_grad_()
        grads = []
        for run in (block, _in_checkpoint(block, use_reentrant=step % 2 == 0)):
            torch.manual_seed(step)
            out = run(own, seq_lens=lens, dropout_p=0.3)
            out.square().sum().backward()
            grads.append(own.grad)
            own.grad = None
        assert torch.equal(*grads)


def _in_checkpoint(block: nn.Module, use_reentrant: bool):
    def run(hidden: torch.Tensor, **options) -> torch.Tensor:
        return checkpoint(
            lambda given: block(given, **options), hidden, use_reentrant=use_reentrant
        )

    return run


def test_recomputation_never_meets_other_sizes(pool):
    pool(4).run(_recomputed)


def _kept_graphs(rank: int, num_ranks: int, grid: tuple[int, int], fuse_below: int) -> None:
    """Two calls' graphs, gone through in both orders, with other calls in between."""
    layer, lens = UlyssesAttention(dist.group.WORLD, grid=grid), shard_lengths(7, num_ranks)

    def inputs(seed: int) -> list[torch.Tensor]:
        heads = (HEADS, KV_HEADS, KV_HEADS)
        whole = [reference.draw(2, 7, h, DIM, seed=seed + n) for n, h in enumerate(heads)]
        return [reference.shard(tensor, lens, rank).requires_grad_() for tensor in whole]

    def grads(out: torch.Tensor, own: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), own, retain_graph=True)

    with mock.patch.object(tile_inputs, "_FUSE_BELOW_BYTES", fuse_below):
        ones, others = inputs(1), inputs(11)
        alone = [grads(layer(*own, seq_lens=lens), own) for own in (ones, others)]
        outs = [layer(*own, seq_lens=lens) for own in (ones, others)]
        kept = [out.clone() for out in outs]
        for order in ((0, 1), (1, 0)):
            for i in order:
                found = grads(outs[i], (ones, others)[i])
                layer(*inputs(21), seq_lens=lens)
                assert all(map(torch.equal, found, alone[i]))
        assert all(map(torch.equal, outs, kept))


@pytest.mark.parametrize("fuse_below", [1 << 21, 0], ids=["one message", "messages under way"])
@pytest.mark.parametrize(("num_ranks", "grid"), [(2, (2, 1)), (4, (2, 2)), (4, (1, 4))])
def test_memory_that_is_used_again_is_no_graphs(pool, num_ranks, grid, fuse_below):
    pool(num_ranks).run(_kept_graphs, grid, fuse_below)
