"""Models of transformers, wrapped, against themselves in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ulysses
from tests import reference
from tests.tiny_transformers import VOCABULARY, build, ids

LENGTH = 11  # uneven over 2, 3 and 4 ranks
KINDS = ["llama", "qwen3", "mistral", "gemma3", "gpt_oss", "bert"]


def inputs_of(case: str) -> dict[str, Any]:
    """Whole inputs."""
    tokens = ids(LENGTH)
    if case == "padded":
        mask = torch.ones(2, LENGTH, dtype=torch.int64)
        mask[0, :4] = 0
        mask[1, 9:] = 0
        return {"input_ids": tokens, "attention_mask": mask}
    if case == "packed":
        positions = torch.tensor([[*range(5), *range(6)]])
        return {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    if case == "packed by row":
        rows = [[*range(5), *range(6)], [*range(2), *range(3), *range(6)]]
        return {"input_ids": tokens, "position_ids": torch.tensor(rows), "use_cache": False}
    if case == "whole mask":
        visible = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) > 0.5
        return {"input_ids": tokens, "attention_mask": visible | torch.eye(LENGTH).bool()}
    return {"input_ids": tokens}


def is_by_token(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim < 4


def run(model: Any, inputs: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    """Logits, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    logits = model(**inputs).logits
    (logits * upstream).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def upstream_of(case: str) -> Tensor:
    """Nothing asks for what padding tokens see: left ones see no key."""
    upstream = reference.draw(2, LENGTH, VOCABULARY, seed=3)
    if case == "padded":
        upstream = upstream * inputs_of(case)["attention_mask"][:, :, None]
    return upstream


def _sharded(
    rank: int, num_ranks: int, kind: str, case: str, recomputed: bool = False
) -> dict[str, Tensor]:
    """Logits gathered, gradients summed."""
    group = dist.group.WORLD
    model = build(kind)
    if recomputed:
        model.train()
        enable = "activation_checkpointing_enable"  # its name since transformers 5.24
        getattr(model, enable, model.gradient_checkpointing_enable)()
    ulysses.wrap(model, group)
    inputs = {
        name: ulysses.shard_sequence(whole, group) if is_by_token(whole) else whole
        for name, whole in inputs_of(case).items()
    }
    found = run(model, inputs, ulysses.shard_sequence(upstream_of(case), group))
    for name, tensor in found.items():
        if name == "logits":
            found[name] = ulysses.gather_sequence_slice_grads(tensor, group)
        else:
            dist.all_reduce(tensor)
    return found


def compare(found: list[dict[str, Tensor]], kind: str, case: str) -> None:
    expected = run(build(kind), inputs_of(case), upstream_of(case))
    if case == "padded":
        seen = inputs_of(case)["attention_mask"].bool()
        expected["logits"] = expected["logits"][seen]
        for each in found:
            each["logits"] = each["logits"][seen]
    # Some norms compute in float32 whatever the model's dtype, and sum gradients over tokens in it.
    bound = 1e-5 if expected["logits"].dtype == torch.float32 or kind == "gemma3" else 1e-10
    for each in found:
        assert each.keys() == expected.keys()
        for name, tensor in each.items():
            scale = max(1.0, expected[name].abs().max().item())
            difference = (tensor - expected[name]).abs().max().item() / scale
            assert difference < bound, f"{name}: {difference}"


# `verify` runs them on every number of ranks.
@pytest.mark.parametrize("kind", KINDS)
def test_models(pool, kind):
    compare(pool(3).run(_sharded, kind, "plain"), kind, "plain")


CASES = [
    ("llama", "padded"),
    ("llama", "packed"),
    ("llama", "packed by row"),
    ("llama", "whole mask"),
    ("mistral", "padded"),
    ("mistral", "packed"),
    ("gemma3", "padded"),
    ("gpt_oss", "padded"),
    ("bert", "padded"),
    ("albert", "padded"),
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_masks(pool, kind, case):
    compare(pool(3).run(_sharded, kind, case), kind, case)


@pytest.mark.parametrize("case", ["plain", "packed"])
def test_gradient_checkpointing(pool, case):
    compare(pool(3).run(_sharded, "mistral", case, recomputed=True), "mistral", case)


def _hidden(rank: int, num_ranks: int) -> Tensor:
    model = ulysses.wrap(build("splinter"), dist.group.WORLD)
    part = ulysses.shard_sequence(ids(LENGTH), dist.group.WORLD)
    states = model(part).last_hidden_state
    return ulysses.gather_sequence_slice_grads(states, dist.group.WORLD).detach()


def test_an_encoder_that_always_makes_a_mask(pool):
    """Of no padding too, as it does in transformers 4; alone, it has a softmax in float32."""
    expected = build("splinter")(ids(LENGTH)).last_hidden_state
    for found in pool(3).run(_hidden):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
