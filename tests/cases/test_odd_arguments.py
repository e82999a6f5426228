"""Arguments in forms that people pass: iterators, other dtypes, a default device, copied layers."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from tests import dense, npu_ops, reference
from ulysses import KVCache, UlyssesAttention
from ulysses.backends.base import Alibi, Band
from ulysses.backends.registry import get_backend
from ulysses.tiling import grids

LENS, HEADS, DIM = (3, 2), 4, 8


def _own(rank: int) -> list[torch.Tensor]:
    whole = [reference.draw(2, 5, h, DIM, seed=seed) for seed, h in enumerate((HEADS, 2, 2))]
    return [reference.shard(tensor, LENS, rank).clone().requires_grad_() for tensor in whole]


def _iterators(rank: int, num_ranks: int) -> None:
    """Iterators of the same text, often at the same address, hold other borders each."""
    layer, own = UlyssesAttention(dist.group.WORLD), _own(rank)
    for lengths in ((2, 3), (3, 2), (1, 1, 3)):
        borders = itertools.accumulate(lengths, initial=0)
        got = layer(*own, seq_lens=(n for n in LENS), documents=borders)
        documents = tuple(itertools.accumulate(lengths, initial=0))
        assert torch.equal(got, layer(*own, seq_lens=torch.tensor(LENS), documents=documents))


def test_an_iterator_is_read_once_and_not_remembered_by_its_name(pool):
    pool(2).run(_iterators)


@pytest.mark.parametrize("backend", ["sdpa", "ascend"])
def test_slopes_in_half_precision_are_multiplied_in_that_of_the_scores(backend):
    """As of a model that was cast as a whole: bfloat16 has no place for 1,001 times a slope."""
    npu_ops.install()
    query, key, value = (
        reference.draw(1, n, 2, DIM, seed=n, dtype=torch.float32) for n in (2, 5, 5)
    )
    slopes = torch.tensor([0.0117, 0.5], dtype=torch.bfloat16)
    kernel = get_backend(backend, "cpu")
    got = kernel(query, key, value, band=Band(), scale=1.0, alibi=Alibi(slopes, -1001))
    expected = dense.attention(
        *(tensor.double() for tensor in (query, key, value)),
        dense.Shape(),
        scale=1.0,
        mask=Alibi(slopes.double(), -1001).bias(range(2), range(5)),
    )[0]
    assert (got - expected).abs().max() < 1e-4


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "a window": {"window": (1, 0)},
    "documents with padding behind": {"documents": (0, 2, 4)},
    "dropout": {"dropout_p": 0.5},
}


def _default_device(rank: int, num_ranks: int, name: str) -> None:
    """Factories without a device would make their tensors on another than the call's."""
    for grid, method in itertools.product(grids(num_ranks), ("forward", "with_lse")):
        results = []
        for device in ("cpu", "meta"):
            torch.manual_seed(1)
            own = _own(rank)
            with torch.device(device):
                layer = UlyssesAttention(dist.group.WORLD, grid=grid)
                out = getattr(layer, method)(*own, seq_lens=LENS, **CALLS[name])
                sum(part.sum() for part in (out if method == "with_lse" else [out])).backward()
            results.append([*(out if method == "with_lse" else [out]), *(t.grad for t in own)])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_is_not_the_tensors_device(pool, name):
    pool(2).run(_default_device, name)


def _cached(rank: int, num_ranks: int) -> torch.Tensor:
    tensors = [tensor.detach() for tensor in _own(rank)]
    new = [reference.draw(2, 1, h, DIM, seed=7) for h in (HEADS, 2, 2)]
    with torch.device("meta"):
        cache = KVCache(dist.group.WORLD)
        cache.prefill(*tensors[1:], seq_lens=LENS)
        return cache.attend(*new, window=(2, 0))


def test_a_cache_under_a_default_device(pool):
    whole = [reference.draw(2, 5, h, DIM, seed=seed) for seed, h in enumerate((HEADS, 2, 2))]
    new = [reference.draw(2, 1, h, DIM, seed=7) for h in (HEADS, 2, 2)]
    seen = [torch.cat(pair, 1)[:, -3:] for pair in zip(whole[1:], new[1:], strict=True)]
    expected = dense.attention(new[0], *seen, dense.Shape())[0]
    for got in pool(2).run(_cached):
        torch.testing.assert_close(got, expected)


def _copied(rank: int, num_ranks: int) -> None:
    """A model is copied as a whole, to average its weights say, and its layers with it."""
    model = torch.nn.Sequential(UlyssesAttention(dist.group.WORLD, grid=(1, 2), check=True))
    model[0].register_forward_hook(lambda *_: None)
    layer, duplicate, own = model[0], copy.deepcopy(model)[0], _own(rank)
    assert duplicate is not layer
    assert duplicate.group is layer.group
    assert duplicate.extra_repr() == layer.extra_repr()
    assert torch.equal(duplicate(*own, seq_lens=LENS), layer(*own, seq_lens=LENS))
    duplicate.eval()
    duplicate._forward_hooks.clear()
    assert layer.training
    assert len(layer._forward_hooks) == 1


def test_a_copied_layer_shares_the_group_and_nothing_else(pool):
    pool(2).run(_copied)
