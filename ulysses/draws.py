"""Random numbers over ranks: the same on ranks that share a sample, different where data differ.

Noise, timesteps and guidance dropout belong to a sample: each of its sp (and tp) ranks needs the
same ones, or they compute different samples and nothing says so. Dropout of sharded activations
belongs to a token: there each rank needs draws of its own.

    torch.manual_seed(ulysses.data_seed(mesh))  # every global draw from here on
    noise = torch.randn(shape, generator=ulysses.data_generator(mesh, seed))
    latents = ulysses.replicated(latents, mesh["sp"])  # whatever drew them
    with ulysses.own_draws(mesh["sp"]):
        hidden = dropout(hidden)  # a shard
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.group import process_group, rank_in
from ulysses.sequence import Group


def replicated(tensor: Tensor, group: Group) -> Tensor:
    """The first rank's `tensor`, on every rank; the same shape and dtype is needed on all."""
    found = process_group(group)
    if found is None:
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, group=found, group_src=0)
    return copy


def data_seed(mesh: DeviceMesh, seed: int | None = None) -> int:
    """A seed that is equal on the ranks that share a sample and differs along dp.

    `seed` is the run's, the same on all ranks; without one the mesh's first rank draws it.
    Collective over the mesh only where `seed` is None, so either all ranks give one or none.
    """
    if seed is None:
        told: list[int] = [int(torch.randint(2**62, (), device="cpu"))]
        for axis in range(mesh.ndim):  # after the last axis all have the first rank's
            dist.broadcast_object_list(told, group=mesh.get_group(axis), group_src=0)
        (seed,) = told
    return seed + mesh["dp"].get_local_rank()


def data_generator(
    mesh: DeviceMesh, seed: int | None = None, *, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator that draws alike on the ranks that share a sample; see `data_seed`.

    On the CPU it draws the same numbers whatever the accelerator is.
    """
    return torch.Generator(device).manual_seed(data_seed(mesh, seed))


@contextlib.contextmanager
def own_draws(group: Group, device_type: str = "cpu") -> Iterator[None]:
    """Within, this rank's global draws are its own; afterwards all ranks draw alike again.

    The stream starts from one number of the CPU's global generator, so that a run repeats, and a
    checkpointed region recomputes what it drew.
    """
    rank, _ = rank_in(process_group(group))
    seed = int(torch.randint(2**62, (), device="cpu"))
    if device_type == "cpu":
        forked = torch.random.fork_rng(devices=[])
    else:
        device = torch.get_device_module(device_type).current_device()
        forked = torch.random.fork_rng(devices=[device], device_type=device_type)
    with forked:
        torch.manual_seed(seed + rank)
        yield
