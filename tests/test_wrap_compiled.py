"""torch.compile of wrapped models: the same numbers, and no more graphs at the same shapes."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import ulysses
from tests import reference, tiny_transformers
from tests.pool import WorkerError, WorkerPool
from tests.wrapped_models import DIM, Decoder, tokens
from ulysses.eager import in_eager

Pools = Callable[[int], WorkerPool]

LENGTH = 7


def wrapped(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "llama":
        return ulysses.wrap(tiny_transformers.build("llama"), dist.group.WORLD)
    model = Around().double()
    ulysses.wrap(model.decoder, dist.group.WORLD)
    return model


class Around(nn.Module):
    """Has a graph before what is wrapped, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder((ids + 1) % 20, positions)
        return self.head(hidden).square()


def _compiled(rank: int, num_ranks: int, kind: str) -> tuple[int, int]:
    """Graphs after the first step and after two more; asserts that numbers are those of eager."""
    inputs = (tiny_transformers.ids(LENGTH),) if kind == "llama" else tokens(LENGTH)
    parts = [ulysses.shard_sequence(whole, dist.group.WORLD) for whole in inputs]
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(wrapped(kind), backend="eager")
    steps, graphs = [], []
    for _ in range(3):
        steps.append(step(compiled, parts))
        graphs.append(counters["stats"]["unique_graphs"])
    expected = step(wrapped(kind), parts)
    for found in steps:
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))
    return graphs[0], graphs[-1]


def step(model: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own, at its graph breaks
        out = model(*parts)
    out = getattr(out, "logits", out)
    upstream = reference.draw(*out.shape, seed=3)
    (out * upstream).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("kind", "num_graphs"), [("llama", 0), ("a part", 2)])
def test_compiled_models(pool: Pools, kind: str, num_graphs: int) -> None:
    for graphs in pool(2).run(_compiled, kind, timeout=180):
        assert graphs == (num_graphs, num_graphs)


def _first_call(rank: int, num_ranks: int, fullgraph: bool) -> list[torch.Tensor]:
    torch.compiler.reset()
    left_alone = in_eager("the reason")(torch.sin)
    compiled = torch.compile(lambda x: left_alone(x) * 2, backend="eager", fullgraph=fullgraph)
    return [compiled(torch.ones(1)) for _ in range(3)]


def test_the_first_call_may_be_compiled(pool: Pools) -> None:
    (results,) = pool(1).run(_first_call, False)
    assert results == [2 * torch.ones(1).sin()] * 3
    with pytest.raises(WorkerError, match="the reason"):
        pool(1).run(_first_call, True)
