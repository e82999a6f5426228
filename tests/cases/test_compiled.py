"""torch.compile around the layer: the same numbers, and nothing compiled anew with each shape."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests import reference
from ulysses import UlyssesAttention

HEADS, DIM = 4, 8


class _Block(torch.nn.Module):
    """Something for Dynamo on both sides of the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attend = UlyssesAttention(dist.group.WORLD)
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM).double()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).unflatten(2, (3, HEADS, DIM)).unbind(2)
        return hidden + self.attend(query, key, value, is_causal=True).flatten(2)


def _compiled(rank: int, num_ranks: int) -> int:
    """How many graphs were compiled for three lengths."""
    block = _Block()
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(block, backend="eager")
    for length in (8, 12, 16):
        whole = reference.draw(2, length, HEADS * DIM, seed=length)
        own = reference.shard(whole, (length // num_ranks,) * num_ranks, rank)
        found = []
        for run in (block, compiled):
            out = _quietly(run, own.requires_grad_())
            grads = torch.autograd.grad(out.square().sum(), [own, *block.parameters()])
            found.append((out, *grads))
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    return counters["stats"]["unique_graphs"]


def _quietly(run, *given: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own, at its graph breaks
        return run(*given)


def test_a_compiled_model_gives_the_same_numbers_without_a_graph_for_each_length(pool):
    """The projections and the sum, for one length and then for any."""
    assert pool(2).run(_compiled, timeout=120) == [2 * 2] * 2


def _whole_graph(rank: int, num_ranks: int) -> None:
    own = [torch.randn(1, 4, HEADS, DIM) for _ in range(3)]
    torch.compiler.reset()
    torch.compile(lambda *given: attend(*given), fullgraph=True, backend="eager")(*own)


def attend(*own: torch.Tensor) -> torch.Tensor:
    return UlyssesAttention(dist.group.WORLD)(*own)


def test_one_graph_around_the_layer_is_refused_with_the_reason(pool):
    with pytest.raises(Exception, match="attention over ranks is planned on the host"):
        pool(2).run(_whole_graph, timeout=120)
