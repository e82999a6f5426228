"""Wrapped modules against themselves in one process: outputs and every parameter's gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ulysses
from tests import reference
from tests.wrapped_models import (
    DIM,
    HEADS,
    Decoder,
    TakesFunction,
    TakesProcessor,
    own_function,
    tokens,
)

RANKS = [1, 3]
LENGTH = 7  # uneven over 2, 3 and 4 ranks


def build(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """A module with the same weights on every rank, whole inputs for it, and the sequence's dim."""
    torch.manual_seed(1)
    x = reference.draw(2, LENGTH, DIM, seed=2)
    modules: dict[str, tuple[Any, tuple[Tensor, ...], int]] = {
        "sdpa": (Decoder, tokens(LENGTH), 1),
        "sdpa, recomputed": (lambda: Decoder("saved"), tokens(LENGTH), 1),
        "sdpa, recomputed reentrant": (lambda: Decoder("reentrant"), tokens(LENGTH), 1),
        "function": (lambda: TakesFunction(own_function), (x,), 1),
        "processor": (TakesProcessor, (x,), 1),
        "multihead": (
            lambda: Attends(nn.MultiheadAttention(DIM, HEADS, batch_first=True)),
            (x,),
            1,
        ),
        "multihead, seq first": (
            lambda: Attends(nn.MultiheadAttention(DIM, HEADS, bias=False)),
            (x.transpose(0, 1).contiguous(),),
            0,
        ),
        "encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), (x,), 1),
    }
    make, inputs, seq_dim = modules[kind]
    return make().double(), inputs, seq_dim


class Attends(nn.Module):
    """Asks for weights, as by default, and does not use them."""

    def __init__(self, attend: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)


def run(module: nn.Module, inputs: tuple[Tensor, ...], upstream: Tensor) -> dict[str, Tensor]:
    """The output, and every parameter's gradient."""
    out = module(*inputs)
    out.backward(upstream)
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads}


def _sharded(rank: int, num_ranks: int, kind: str) -> dict[str, Tensor]:
    """The output gathered, the gradients summed."""
    group = dist.group.WORLD
    module, inputs, seq_dim = build(kind)
    if kind == "function":
        module.function = ulysses.wrap_function(own_function, group)
    assert ulysses.wrap(module, group) is module
    own = tuple(
        ulysses.shard_sequence(each, group, dim=-1 if seq_dim else 0)
        if not each.is_floating_point()
        else ulysses.shard_sequence(each, group, dim=seq_dim)
        for each in inputs
    )
    upstream = ulysses.shard_sequence(upstream_of(kind), group, dim=seq_dim)
    found = run(module, own, upstream)
    for name, tensor in found.items():
        if name == "out":
            found[name] = ulysses.gather_sequence_slice_grads(tensor, group, dim=seq_dim)
        else:
            dist.all_reduce(tensor)
    return found


def upstream_of(kind: str) -> Tensor:
    upstream = reference.draw(2, LENGTH, DIM, seed=3)
    return upstream.transpose(0, 1) if "seq first" in kind else upstream


KINDS = [
    "sdpa",
    "sdpa, recomputed",
    "sdpa, recomputed reentrant",
    "function",
    "processor",
    "multihead",
    "multihead, seq first",
    "encoder",
]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(pool, kind, num_ranks):
    module, inputs, _ = build(kind)
    expected = run(module, inputs, upstream_of(kind))
    for found in pool(num_ranks).run(_sharded, kind):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=name)
