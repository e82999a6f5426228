"""Wrapped modules under DDP and FSDP2, over dp x sp: the gradients of one process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ulysses
from tests import reference
from tests.wrapped_models import DIM, Decoder, tokens

LENGTH = 7


def run(module: nn.Module, ids: Tensor, positions: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    (module(ids, positions) * upstream).sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _distributed(rank: int, num_ranks: int, by: str) -> dict[str, Tensor]:
    """Two ranks of dp with one sample each, over two of sp; the sum over ranks is wanted."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "sp", "tp"))
    group = ulysses.gradient_mesh(mesh)
    torch.manual_seed(1)
    module = Decoder("saved").double()
    if by == "DDP":
        ulysses.wrap(module, mesh)
        whole = DistributedDataParallel(module, process_group=group.get_group())
    else:
        if by == "wrap, FSDP2":
            ulysses.wrap(module, mesh)
        for layer in module.layers:
            fully_shard(layer, mesh=group)
        whole = fully_shard(module, mesh=group)
        if by == "FSDP2, wrap":
            ulysses.wrap(module, mesh)
    ids, positions = tokens(LENGTH)
    sample = slice(rank // 2, rank // 2 + 1)
    parts = [
        ulysses.shard_sequence(each, mesh["sp"])
        for each in (ids[sample], positions, reference.draw(2, LENGTH, DIM, seed=3)[sample])
    ]
    found = run(whole, *parts)
    return {
        name.removeprefix("module."): num_ranks
        * (grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        for name, grad in found.items()
    }


@pytest.mark.parametrize("by", ["DDP", "wrap, FSDP2", "FSDP2, wrap"])
def test_gradients_over_dp_and_sp(pool, by):
    torch.manual_seed(1)
    expected = run(Decoder().double(), *tokens(LENGTH), reference.draw(2, LENGTH, DIM, seed=3))
    for found in pool(4).run(_distributed, by):
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12, msg=name)
