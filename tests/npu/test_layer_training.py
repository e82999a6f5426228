"""A small transformer trains a step on NPUs, its sequence shared out: all equal to the CPU."""

import torch
from torch import nn

import ulysses
from tests.tiny_lm import LENGTH, TinyLM, attend_alone, micro_batches
from ulysses.tiling import shard_lengths


def step(model, batch, group, optimizer) -> float:
    """The whole loss of one step, in one process where there is no group."""
    count = ulysses.count_targets([batch["targets"]], group)
    logits = model(batch["input_ids"], batch["position_ids"])
    loss = ulysses.token_loss(logits, batch["targets"], count, group)
    loss.backward()
    if group is not None:
        ulysses.average_gradients(model.parameters(), group)
    optimizer.step()
    return float(ulysses.mean_over_ranks(loss.detach(), group))


def train(rank: int, num_ranks: int, device: str):
    """Loss, gradients and weights after a step, by name, on the CPU."""
    mesh = group = None
    (batch,) = micro_batches(0, 1)
    attend = attend_alone
    if device == "npu":
        torch.npu.set_device(rank)
        mesh = ulysses.init_mesh(sp=num_ranks, device_type="npu")
        group = ulysses.gradient_mesh(mesh)
        attention = ulysses.UlyssesAttention(mesh["sp"])
        lens = shard_lengths(LENGTH, num_ranks)

        def attend(*qkv):
            return attention(*qkv, is_causal=True, seq_lens=lens)

    parts = ulysses.shard_tokens(
        batch, None if mesh is None else mesh["sp"], targets="targets", positions="position_ids"
    )
    torch.manual_seed(1)
    model = TinyLM(attend)
    for layer in model.layers:  # an NPU has one formula for GELU, this one
        layer.mlp[1] = nn.GELU(approximate="tanh")
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    on_device = {name: tensor.to(device) for name, tensor in parts.items()}
    loss = step(model, on_device, group, optimizer)
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad.cpu() for name, parameter in named.items()}
    return loss, gradients, {name: value.detach().cpu() for name, value in named.items()}


def test_a_step_on_npus_equals_one_on_the_cpu(npus) -> None:
    loss, gradients, weights = train(0, 1, "cpu")
    for found_loss, found_gradients, found_weights in npus(4).run(train, "npu"):
        assert abs(found_loss - loss) < 1e-5
        for found, expected in ((found_gradients, gradients), (found_weights, weights)):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
                assert tensor.any(), name
