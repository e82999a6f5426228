"""Guided steps: a branch on each rank group, the same steps on all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ulysses
from tests.pool import WorkerError
from tests.test_mesh import release

SCALE = 3.0


def _groups(rank: int, num_ranks: int) -> dict[str, Any]:
    mesh = ulysses.init_mesh(cfg=2, sp=2, device_type="cpu")
    found = {
        "names": mesh.mesh_dim_names,
        "place": mesh.get_coordinate(),
        "cfg": dist.get_process_group_ranks(mesh["cfg"].get_group()),
        "sp": dist.get_process_group_ranks(mesh["sp"].get_group()),
    }
    release(mesh)
    return found


def test_the_axis_lies_behind_dp(pool):
    for rank, found in enumerate(pool(8).run(_groups)):
        dp, cfg, sp = rank // 4, rank // 2 % 2, rank % 2
        assert found == {
            "names": ("dp", "cfg", "sp", "tp"),
            "place": (dp, cfg, sp, 0),
            "cfg": [4 * dp + sp, 4 * dp + 2 + sp],
            "sp": [4 * dp + 2 * cfg, 4 * dp + 2 * cfg + 1],
        }


def test_more_than_two_branches_are_refused() -> None:
    for wrong, message in ((3, "cfg=3: guidance has two branches"), (0, "cfg=0: give a whole")):
        with pytest.raises(ValueError, match=message):
            ulysses.init_mesh(cfg=wrong)


def denoised(mesh: Any) -> tuple[Tensor, list[str]]:
    """Four steps, of which the second is without guidance, and the branches that ran here."""
    ran = []

    def predict(text: float, name: str) -> Tensor:
        ran.append(name)
        return torch.sin(latent + text)

    latent = torch.arange(6, dtype=torch.float64).view(2, 3)
    for step in range(4):
        branches = [{"text": 0.1 * step, "name": "with"}, {"text": -0.3, "name": "without"}]
        predicted = ulysses.run_branches(predict, branches[: 1 if step == 1 else 2], mesh)
        noise = predicted[-1] + SCALE * (predicted[0] - predicted[-1])
        latent = latent - 0.1 * noise
    return latent, ran


def _steps(rank: int, num_ranks: int, cfg: int) -> tuple[Tensor, list[str]]:
    mesh = ulysses.init_mesh(cfg=cfg, sp=num_ranks // cfg, device_type="cpu")
    found = denoised(mesh)
    release(mesh)
    return found


def test_each_branch_runs_on_its_own_ranks(pool):
    expected, both = pool(1).run(_steps, 1)[0]
    assert both == ["with", "without", "with"] + ["with", "without"] * 2
    for latent, ran in pool(2).run(_steps, 1):  # without the axis, all of them on every rank
        assert torch.equal(latent, expected)
        assert ran == both
    for rank, (latent, ran) in enumerate(pool(4).run(_steps, 2)):
        assert torch.equal(latent, expected)
        own = ("with", "without")[rank // 2]
        assert ran == [own, "with", own, own]


def _out_of_step(rank: int, num_ranks: int) -> None:
    mesh = ulysses.init_mesh(cfg=2, device_type="cpu")
    ulysses.run_branches(lambda: torch.zeros(1), [{}] * (1 + rank), mesh)


def test_groups_that_disagree_are_told_so(pool):
    with pytest.raises(WorkerError, match=r"numbers of branches \[1, 2\]") as caught:
        pool(2).run(_out_of_step)
    assert set(caught.value.errors) == {0, 1}
