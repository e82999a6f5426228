"""Masks, cross-attention and attention that is none of ours, in wrapped modules."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import ulysses
from tests import reference
from tests.counting import counted
from tests.wrapped_models import DIM, HEADS

LENGTH, MEMORY = 7, 11


class Masked(nn.Module):
    """SDPA with whatever mask it is given, or one that it makes of the rows it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        query, key, value = self.proj(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if mask == "alibi":
            steps = torch.arange(x.shape[1])
            mask = -0.1 * (steps[:, None] - steps).abs().to(x.dtype).expand(HEADS, -1, -1)
        out = scaled_dot_product_attention(query, key, value, mask)
        return out.transpose(1, 2).flatten(2)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, kdim=DIM, vdim=DIM, batch_first=True)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return self.attend(x, x, x, need_weights=False, **masks)[0]


def visible(*shape: int) -> Tensor:
    """Some of everything, and always a token itself."""
    some = torch.rand(*shape, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) > 0.4
    return some | torch.eye(LENGTH, dtype=torch.bool)


def build(case: str) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """A module, whole inputs, and the names of those to be sharded in dim 1."""
    torch.manual_seed(1)
    x = reference.draw(2, LENGTH, DIM, seed=2)
    padding = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
    causal = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    bias = reference.draw(HEADS, LENGTH, LENGTH, seed=6)
    cases: dict[str, tuple[type[nn.Module], dict[str, Any], list[str]]] = {
        "bool": (Masked, {"x": x, "mask": visible(2, 1)}, ["x"]),
        "bias of heads": (Masked, {"x": x, "mask": bias}, ["x"]),
        "attn_mask": (Attends, {"x": x, "attn_mask": ~visible()}, ["x"]),
        "attn_mask of heads": (Attends, {"x": x, "attn_mask": ~visible(2 * HEADS)}, ["x"]),
        "causal": (Attends, {"x": x, "attn_mask": causal, "is_causal": True}, ["x"]),
        "padding": (Attends, {"x": x, "key_padding_mask": padding}, ["x"]),
        "padding, sharded": (Attends, {"x": x, "key_padding_mask": padding}, ["x", "key_padding"]),
        "both": (Attends, {"x": x, "attn_mask": causal, "key_padding_mask": padding}, ["x"]),
        "bias and padding": (
            Attends,
            {"x": x, "attn_mask": bias.repeat(2, 1, 1), "key_padding_mask": padding.double() * -9},
            ["x"],
        ),
    }
    kind, inputs, sharded = cases[case]
    return kind().double(), inputs, sharded


CASES = [
    "bool",
    "bias of heads",
    "attn_mask",
    "attn_mask of heads",
    "causal",
    "padding",
    "padding, sharded",
    "both",
    "bias and padding",
]


def run(module: nn.Module, inputs: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    out = module(**inputs)
    (out * upstream).sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in module.named_parameters()}


def _masked(rank: int, num_ranks: int, case: str) -> dict[str, Tensor]:
    group = dist.group.WORLD
    module, inputs, sharded = build(case)
    ulysses.wrap(module, group)
    own = {
        name: ulysses.shard_sequence(value, group) if name.startswith(tuple(sharded)) else value
        for name, value in inputs.items()
    }
    upstream = ulysses.shard_sequence(reference.draw(2, LENGTH, DIM, seed=3), group)
    return gathered(run(module, own, upstream))


def gathered(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output whole, gradients summed."""
    for name, tensor in found.items():
        if name == "out":
            found[name] = ulysses.gather_sequence_slice_grads(tensor, dist.group.WORLD)
        else:
            dist.all_reduce(tensor)
    return found


def require_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for each in found:
        for name, tensor in each.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_masks(pool, case):
    module, inputs, _ = build(case)
    expected = run(module, inputs, reference.draw(2, LENGTH, DIM, seed=3))
    require_equal(pool(3).run(_masked, case), expected)


def decoder_layer() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 8, dropout=0.0, batch_first=True).double()
    return layer, reference.draw(2, LENGTH, DIM, seed=2), reference.draw(2, MEMORY, DIM, seed=5)


def _cross(rank: int, num_ranks: int, replicated: bool) -> dict[str, Tensor]:
    group = dist.group.WORLD
    layer, x, memory = decoder_layer()
    ulysses.wrap(layer, group, replicated=["multihead_attn"] if replicated else [])
    if not replicated:
        memory = ulysses.shard_sequence(memory, group)
    inputs = {"tgt": ulysses.shard_sequence(x, group), "memory": memory}
    upstream = ulysses.shard_sequence(reference.draw(2, LENGTH, DIM, seed=3), group)
    found = run(layer, inputs, upstream)
    policies = [row.policy for row in ulysses.describe(layer).rows]
    assert policies == ["exchanged", "replicated" if replicated else "exchanged"]
    return gathered(found)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("replicated", [False, True])
def test_cross_attention(pool, replicated, num_ranks):
    """To a memory that is sharded itself, or whole on every rank."""
    layer, x, memory = decoder_layer()
    upstream = reference.draw(2, LENGTH, DIM, seed=3)
    expected = run(layer, {"tgt": x, "memory": memory}, upstream)
    require_equal(pool(num_ranks).run(_cross, replicated), expected)


class ByFrame(nn.Module):
    """Attention along the sequence, and one inside each token's own patches besides."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.inside = Masked()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(x, x, x)[0]
        patches = x.flatten(0, 1).unflatten(1, (2, -1)).repeat(1, 1, 2)
        return x + self.inside(patches).mean(1).unflatten(0, x.shape[:2])


def _local(rank: int, num_ranks: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    torch.manual_seed(1)
    module = ulysses.wrap(ByFrame().double(), group, local=["inside"])
    part = ulysses.shard_sequence(reference.draw(2, LENGTH, DIM, seed=2), group)
    upstream = ulysses.shard_sequence(reference.draw(2, LENGTH, DIM, seed=3), group)
    found = run(module, {"x": part}, upstream)
    alone = module.inside
    with counted() as count:
        alone(part)
    assert count.collectives == []
    return gathered(found)


def test_attention_that_is_local_is_left_alone(pool):
    torch.manual_seed(1)
    inputs = {"x": reference.draw(2, LENGTH, DIM, seed=2)}
    expected = run(ByFrame().double(), inputs, reference.draw(2, LENGTH, DIM, seed=3))
    require_equal(pool(2).run(_local), expected)


def _not_local(rank: int, num_ranks: int) -> list[str]:
    told = []
    for module, inputs in (
        (ByFrame().double(), {"x": reference.draw(2, 8, DIM, seed=2)}),
        (Masked().double(), {"x": reference.draw(2, 4, DIM, seed=2), "mask": "alibi"}),
    ):
        ulysses.wrap(module, dist.group.WORLD)
        with pytest.raises(ValueError) as caught:
            module(**inputs)
        told.append(str(caught.value))
    return told


def test_a_mask_or_rows_of_another_length_are_refused(pool):
    for other_rows, local_mask in pool(2).run(_not_local):
        assert "inside (Masked) attends over 2 rows, but the inputs have 8" in other_rows
        assert "QueryRows of shape (1, 6, 4, 4) does not fit [B, H, Sq, Sk]" in local_mask


def _query_rows(rank: int, num_ranks: int) -> Tensor:
    """A mask that a caller makes for this rank's rows."""
    torch.manual_seed(1)
    module = ulysses.wrap(Masked().double(), dist.group.WORLD)
    own = ulysses.shard_sequence(visible(2, 1), dist.group.WORLD, dim=2)
    part = ulysses.shard_sequence(reference.draw(2, LENGTH, DIM, seed=2), dist.group.WORLD)
    out = module(part, own).detach()
    return ulysses.gather_sequence_slice_grads(out, dist.group.WORLD)


def test_a_mask_of_this_rank_s_rows(pool):
    torch.manual_seed(1)
    expected = Masked().double()(reference.draw(2, LENGTH, DIM, seed=2), visible(2, 1))
    for found in pool(3).run(_query_rows):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
