"""transformers' models given whole inputs and labels, by `parallelize`; and what is refused."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ulysses
from tests.tiny_transformers import build, ids, pooled, vision
from ulysses.wrapping import wrapping_of

LENGTH = 11
BEFORE_5 = transformers.__version__.startswith("4.")


def model_and_inputs(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model, and whole inputs with labels."""
    tokens = ids(LENGTH)
    if kind == "vision":
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
        return vision(), {"pixel_values": images, "labels": torch.tensor([1, 3])}
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 8:] = 0
    if kind.startswith("pooled"):
        inputs = {"input_ids": tokens, "attention_mask": mask}
        return pooled(kind.split()[1]), {**inputs, "labels": torch.tensor([1, 3])}
    labels = tokens.clone()
    labels[0, :6] = -100  # a shard of the first sample has nothing to predict
    labels[1, 8:] = -100
    return build(kind), {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    out = model(**inputs)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    if "attention_mask" in inputs and out.logits.ndim == 3:
        found["logits"] = found["logits"][inputs["attention_mask"].bool()]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | grads


def _parallel(rank: int, num_ranks: int, kind: str) -> dict[str, Tensor]:
    model, inputs = model_and_inputs(kind)
    ulysses.parallelize(model, dist.group.WORLD)
    found = run(model, inputs)
    ulysses.average_gradients(model.parameters(), dist.group.WORLD)
    return found


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """transformers computes losses in float32."""
    for name in expected:
        torch.testing.assert_close(
            found[name].double(), expected[name].double(), rtol=1e-5, atol=1e-5, msg=name
        )


# `verify` runs the families on every number of ranks.
@pytest.mark.parametrize("kind", ["llama", "bert", "vision", "pooled bert", "pooled distilbert"])
def test_loss_logits_and_gradients(pool, kind):
    expected = run(*model_and_inputs(kind))
    for found in pool(3).run(_parallel, kind):
        require_equal(found, expected)


def split_over_tp(model: Any, mesh: DeviceMesh, by: str) -> None:
    """By the model's own plan, which both torch and transformers can follow."""
    if by == "transformers" and BEFORE_5:
        from transformers.integrations import tensor_parallel

        tensor_parallel.distribute_model(model, None, mesh, mesh.size())
        for name, weight in list(model.named_parameters()):  # one at a time, as loading does
            tensor_parallel.shard_and_distribute_module(
                model, weight, weight, name, weight.dtype, True, mesh.get_local_rank(), mesh
            )
    elif by == "transformers":
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = model._expand_parallel_plan(model.tp_plan)  # for each layer, as loading does
        apply_tensor_parallelism(model, mesh, plan)
    else:
        styles = {
            "colwise": ColwiseParallel(),
            "rowwise": RowwiseParallel(),
            "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
            "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        }
        plan = {
            name: styles[style]
            for name, style in model.tp_plan.items()
            if hasattr(model, name.partition(".")[0])  # 4.x has the base model's own names too
        }
        parallelize_module(model, mesh, plan)


def _tensor_parallel(rank: int, num_ranks: int, by: str) -> tuple[dict[str, Tensor], Tensor]:
    """tp=2 x sp=2, the sharded gradients gathered; and tokens that are generated."""
    model, inputs = model_and_inputs("wide llama")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
    split_over_tp(model, mesh["tp"], by)
    ulysses.parallelize(model, mesh)
    found = run(model, inputs)
    tokens = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    heads = {(row.num_heads, row.num_kv_heads) for row in ulysses.describe(model).rows}
    assert heads == {(4, 2)}
    for name, value in list(found.items()):
        if name not in ("loss", "logits"):
            if hasattr(value, "full_tensor"):
                value = value.full_tensor()
            dist.all_reduce(value, group=mesh["sp"].get_group())
            found[name] = value / 2
    return found, tokens


@pytest.mark.parametrize("by", ["torch", "transformers"])
def test_tensor_parallelism_besides(pool, by):
    model, inputs = model_and_inputs("wide llama")
    expected = run(model, inputs)
    text = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    for found, tokens in pool(4).run(_tensor_parallel, by):
        require_equal(found, expected)
        assert torch.equal(tokens, text)


def _data_parallel(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Each dp rank has one sample; the loss is the mean over the tokens of both."""
    model, inputs = model_and_inputs("llama")
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "sp", "tp"))
    sample = rank // 2
    ulysses.parallelize(model, mesh)
    own = {name: tensor[sample : sample + 1] for name, tensor in inputs.items()}
    out = model(**own)
    out.loss.backward()
    ulysses.average_gradients(model.parameters(), ulysses.gradient_mesh(mesh))
    return out.loss.detach(), model.model.embed_tokens.weight.grad


def test_the_loss_counts_tokens_of_all_samples(pool):
    expected = run(*model_and_inputs("llama"))
    for loss, grad in pool(4).run(_data_parallel):
        torch.testing.assert_close(loss.float(), expected["loss"].float(), rtol=1e-5, atol=1e-6)
        want = expected["model.embed_tokens.weight"]
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


class Holds(torch.nn.Module):
    """A model inside something that is none of transformers' own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids).logits


def _held(rank: int, num_ranks: int) -> Tensor:
    module = ulysses.wrap(Holds(build("mistral")), dist.group.WORLD)
    part = ulysses.shard_sequence(ids(LENGTH), dist.group.WORLD)
    return ulysses.gather_sequence_slice_grads(module(part), dist.group.WORLD).detach()


def test_a_model_inside_another_module(pool):
    expected = build("mistral")(ids(LENGTH)).logits
    for found in pool(2).run(_held):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_configurations_copies_and_pickles() -> None:
    model = build("llama")
    config = model.config
    expected = model(ids(5)).logits
    ulysses.wrap(model, None)
    assert config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "ulysses"
    assert model.model.config is model.config
    duplicate = copy.deepcopy(model)
    torch.testing.assert_close(duplicate(ids(5)).logits, expected)
    assert wrapping_of(duplicate)

    pickled = pickle.loads(pickle.dumps(model))
    assert pickled.config._attn_implementation == "sdpa"
    assert torch.equal(pickled(ids(5)).logits, expected)
    assert torch.equal(ulysses.unwrap(model)(ids(5)).logits, expected)
    assert model.config._attn_implementation == "sdpa"
    assert model.generate(ids(5), max_new_tokens=2, do_sample=False).shape == (2, 7)


def test_refusals() -> None:
    model = ulysses.wrap(build("llama"), None)
    tokens = ids(5)
    for given, message in (
        ({"labels": tokens}, "was given labels, of which it would make a loss"),
        ({"encoder_hidden_states": torch.zeros(2, 3, 24)}, "attends to an encoder's states"),
        ({"logits_to_keep": 1}, "logits_to_keep=1: these would be the last of each rank's"),
        (
            {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
            "packed documents and would make a KV cache",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            model(tokens, **given)
    with pytest.raises(ValueError, match="is wrapped and given this rank's part"):
        model.generate(tokens, max_new_tokens=2)
    model.set_attn_implementation("eager")
    message = "model.layers.0.self_attn (LlamaAttention) ran, but its attention did not reach"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model(tokens)


def test_a_decoder_whose_causal_mask_is_its_own_is_refused() -> None:
    """In transformers 4; since then it is made by the mask interface."""
    model, tokens = build("bert decoder"), ids(5)
    expected = model(tokens).logits
    ulysses.wrap(model, None)
    if BEFORE_5:
        with pytest.raises(ValueError, match="BertModel is a decoder that makes its causal mask"):
            model(tokens)
    else:
        torch.testing.assert_close(model(tokens).logits, expected)


# transformers 4 warns of it first.
@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported")
def test_a_layer_that_asks_for_more_than_attention_has() -> None:
    model = ulysses.wrap(build("llama"), None)
    message = "asks for output_attentions, which ulysses' attention has not"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(ids(5), output_attentions=True)
