"""Whole models over ranks, given whole inputs: outputs, loss and gradients as in one process."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ulysses
from tests import reference
from tests.wrapped_models import DIM, HEADS, CountsPositions, Decoder, Pools, tokens
from ulysses.parallel_region import find_region

LENGTH = 7


class Classifier(nn.Module):
    """Counts positions by itself, has a stack of layers that are told a condition, and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = CountsPositions()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 5)
        self.pool = Pools()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.pool(self.encoder(self.embed(x), mask)))


def build(kind: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A module, whole inputs, and options of `parallelize`."""
    torch.manual_seed(1)
    x = reference.draw(2, LENGTH, DIM, seed=2)
    if kind == "inputs":
        ids, positions = tokens(LENGTH)
        return Decoder().double(), {"ids": ids, "positions": positions}, {"region": None}
    if kind == "inputs, recomputed layers":
        ids, positions = tokens(LENGTH)
        return Decoder("saved").double(), {"ids": ids, "positions": positions}, {}
    if kind == "layers, with a mask":
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)
        return Classifier().double(), {"x": x, "mask": ~visible}, {}
    assert kind == "layers"
    return Classifier().double(), {"x": x}, {}


def run(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The output and, of a loss that every rank computes alike from it, all gradients."""
    out = module(**inputs)
    upstream = reference.draw(*out.shape, seed=3)
    (out * upstream).sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in module.named_parameters()}


def _parallel(rank: int, num_ranks: int, kind: str) -> dict[str, Tensor]:
    module, inputs, options = build(kind)
    assert ulysses.parallelize(module, dist.group.WORLD, **options) is module
    found = run(module, inputs)
    ulysses.average_gradients(module.parameters(), dist.group.WORLD)
    ulysses.unwrap(module)
    assert not [part for part in module.modules() if "forward" in vars(part)]
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    "kind", ["inputs", "inputs, recomputed layers", "layers", "layers, with a mask"]
)
def test_equals_one_process(pool, kind, num_ranks):
    module, inputs, _ = build(kind)
    expected = run(module, inputs)
    for found in pool(num_ranks).run(_parallel, kind):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=name)


def test_the_region_is_the_innermost_list_of_layers() -> None:
    assert find_region(Classifier()) == "encoder.layers"
    assert find_region(Decoder()) == "layers"
    assert find_region(nn.MultiheadAttention(DIM, HEADS)) == ""


def _kept_sharded(rank: int, num_ranks: int) -> tuple[int, ...]:
    module, inputs, _ = build("inputs")
    ulysses.parallelize(module, dist.group.WORLD, region=None, outputs="sharded")
    return tuple(module(**inputs).shape)


def test_outputs_may_stay_sharded(pool):
    shapes = pool(3).run(_kept_sharded)
    assert shapes == [(2, 3, DIM), (2, 2, DIM), (2, 2, DIM)]


def test_what_can_not_be_is_refused() -> None:
    for options, message in (
        ({"outputs": "both"}, 'outputs=\'both\': pass "gathered" or "sharded"'),
        ({"outputs": "sharded"}, "region='auto' with outputs='sharded'"),
        ({"region": "head"}, "region='head' holds no attention; it is in encoder.layers.0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ulysses.parallelize(Classifier(), None, **options)
    model = ulysses.parallelize(Classifier(), None)
    with pytest.raises(ValueError, match="Classifier is wrapped already"):
        ulysses.parallelize(model, None)
