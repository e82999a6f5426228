"""Random numbers: alike where ranks share a sample, of their own where tokens differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ulysses
from tests.pool import WorkerPool

Pools = Callable[[int], WorkerPool]


def _noise(rank: int, num_ranks: int, sp: int, tp: int, seed: int | None) -> dict[str, list[float]]:
    """Noise by each route, on ranks that were all seeded differently."""
    torch.manual_seed(1000 + rank)
    mesh = ulysses.init_mesh(sp=sp, tp=tp, device_type="cpu")
    drawn = {"generator": torch.randn(3, generator=ulysses.data_generator(mesh, seed))}
    drawn["replicated"] = ulysses.replicated(torch.randn(5, 3).t(), mesh["sp"])[0, :3]
    torch.manual_seed(ulysses.data_seed(mesh, seed))
    drawn["global"] = torch.randn(3)
    return {name: values.tolist() for name, values in drawn.items()}


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("sp", "tp", "samples"),
    [(2, 1, [[0, 1], [2, 3]]), (1, 2, [[0, 1], [2, 3]]), (2, 2, [[0, 1, 2, 3]])],
)
def test_ranks_of_a_sample_draw_alike(
    pool: Pools, sp: int, tp: int, samples: list[list[int]], seed: int | None
) -> None:
    found = pool(4).run(_noise, sp, tp, seed)
    for route in ("generator", "global", *["replicated"] * (sp == 2 and tp == 1)):
        of_samples = [[found[rank][route] for rank in ranks] for ranks in samples]
        for of_ranks in of_samples:
            assert of_ranks == of_ranks[:1] * len(of_ranks)
        firsts = [of_ranks[0] for of_ranks in of_samples]
        assert len({tuple(first) for first in firsts}) == len(samples), "dp ranks draw alike"


def _dropout(rank: int, num_ranks: int) -> tuple[list[bool], list[float]]:
    """What dropout of a shard keeps, recomputed alike, and a draw after it."""
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    layer = nn.Dropout(0.5)
    kept: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        with ulysses.own_draws(mesh["sp"]):
            y: Tensor = layer(x)
        kept.append(y.detach() != 0)
        return y * y

    x = torch.ones(64, requires_grad=True)
    out: Any = checkpoint(region, x, use_reentrant=False)
    out.sum().backward()
    first, again = kept
    assert torch.equal(first, again), "recomputed with other draws"
    return first.tolist(), torch.randn(3).tolist()


def test_shards_draw_their_own_and_then_alike_again(pool: Pools) -> None:
    runs = [pool(2).run(_dropout) for _ in range(2)]
    assert runs[0] == runs[1], "a run must repeat"
    (mask_0, after_0), (mask_1, after_1) = runs[0]
    assert mask_0 != mask_1
    assert after_0 == after_1
