"""Norms and clipping over ranks count each element once; averaging by hand is DDP's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import ulysses
from tests import reference
from tests.pool import WorkerPool

Pools = Callable[[int], WorkerPool]

# Gradients of a layout each: alike on all ranks, cut along one axis or both, cut unevenly.
LAYOUTS: dict[str, list[Placement]] = {
    "alike": [Replicate(), Replicate()],
    "outer": [Shard(0), Replicate()],
    "inner": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
}


def wholes() -> dict[str, torch.Tensor]:
    names = ["plain", "half", *LAYOUTS, "empty"]
    return {name: reference.draw(5, 7, seed=seed) for seed, name in enumerate(names)}


def _clipped(rank: int, num_ranks: int, norm_type: float, max_norm: float) -> Any:
    """The norm, and what clipping left of each gradient, put together again."""
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("outer", "inner"))
    parameters = {}
    for name, whole in wholes().items():
        value = torch.zeros_like(whole)
        if name == "half":  # a plain tensor, as a tp rank holds it
            value, whole = (t.chunk(2)[mesh["inner"].get_local_rank()] for t in (value, whole))
        if name in LAYOUTS:
            ends = [DTensor.from_local(t, mesh, LAYOUTS["alike"]) for t in (value, whole)]
            value, whole = (end.redistribute(mesh, LAYOUTS[name]) for end in ends)
        parameters[name] = torch.nn.Parameter(value)
        if name != "empty":
            parameters[name].grad = whole.clone()
    sharded = [([parameters["half"]], mesh["inner"])]
    norm = ulysses.clip_grad_norm_(
        parameters.values(), max_norm, sharded=sharded, norm_type=norm_type
    )
    left = {}
    for name in wholes():
        grad = parameters[name].grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        elif name == "half":
            grad = ulysses.gather_sequence_slice_grads(grad, mesh["inner"], dim=0)
        left[name] = grad
    return float(norm), left


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 1.5), (1.0, 2.5), (torch.inf, 0.5)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_clipping_equals_torch_on_whole_gradients(
    pool: Pools, num_ranks: int, norm_type: float, max_norm: float
) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in wholes().items()}
    for name, whole in wholes().items():
        parameters[name].grad = None if name == "empty" else whole
    expected = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type)
    for norm, left in pool(num_ranks).run(_clipped, norm_type, max_norm):
        assert norm == pytest.approx(float(expected), rel=1e-12)
        for name, parameter in parameters.items():
            if name == "empty":
                assert left[name] is None
            else:
                torch.testing.assert_close(left[name], parameter.grad, atol=1e-12, rtol=0)


def test_a_small_norm_is_left_alone_and_none_is_zero() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert float(ulysses.grad_norm([parameter])) == float(ulysses.grad_norm([])) == 0.0
    parameter.grad = torch.tensor([0.0, 3.0, 4.0])
    assert float(ulysses.clip_grad_norm_([parameter], 10.0)) == 5.0
    assert parameter.grad.tolist() == [0.0, 3.0, 4.0]


def _partial(rank: int, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,))
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"shape \(2,\).*still to be summed; redistribute"):
        ulysses.grad_norm([parameter])


def test_a_gradient_still_to_be_summed_is_refused(pool: Pools) -> None:
    pool(2).run(_partial)


def _averaged(rank: int, num_ranks: int) -> Any:
    used, unused, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    frozen.requires_grad_(False)
    if rank:
        used.grad = torch.tensor([float(rank), 1.0])
    ulysses.average_gradients([used, unused, frozen], dist.group.WORLD)
    return [None if p.grad is None else p.grad.tolist() for p in (used, unused, frozen)]


def test_averaging_by_hand_waits_for_no_rank_without_a_gradient(pool: Pools) -> None:
    expected = [[1.0, 2 / 3], [0.0, 0.0], None]
    for found in pool(3).run(_averaged):
        for grad, wanted in zip(found, expected, strict=True):
            assert grad == pytest.approx(wanted)
