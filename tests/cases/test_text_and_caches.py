"""Every argument beside replicated text, exactly, and none of a cache's ignored."""

import inspect

import pytest
import torch
import torch.distributed as dist

from tests import dense, reference
from ulysses import KVCache, UlyssesAttention
from ulysses.backends.base import Dropout
from ulysses.tiling import grids

HEADS, KV_HEADS, DIM = 6, 3, 8
BEFORE, BEHIND, LENS = 2, 1, (3, 0, 4, 2)
LENGTH = BEFORE + sum(LENS) + BEHIND

OPTIONS = {
    "slopes and sinks": {"alibi_slopes": 0, "sinks": 1, "is_causal": True},
    "dropout and a mask for each head": {"dropout_p": 0.4, "mask": 2},
    "a prefix": {"prefix_len": 4, "is_causal": True, "scale": 0.9},
    "documents in a window with sinks": {"documents": (0, 5, 11), "window": (2, 1), "sinks": 1},
    "all at once": {
        "alibi_slopes": 0,
        "sinks": 1,
        "mask": 2,
        "dropout_p": 0.3,
        "window": (3, None),
        "is_causal": True,
    },
}
TENSORS = {"alibi_slopes": (HEADS,), "sinks": (HEADS,), "mask": (2, HEADS, LENGTH, LENGTH)}


def _joint(rank: int, num_ranks: int, name: str) -> list[str]:
    """Outputs of image and text and the sums of all gradients, against one process."""
    given = {
        key: reference.draw(*TENSORS[key], seed=20 + value).requires_grad_()
        for key, value in OPTIONS[name].items()
        if key in TENSORS
    }
    plain = {key: value for key, value in OPTIONS[name].items() if key not in TENSORS}
    seen = {
        key: plain[key]
        for key in ("is_causal", "window", "documents", "prefix_len")
        if key in plain
    }
    whole = [
        reference.draw(2, LENGTH, h, DIM, seed=n).requires_grad_()
        for n, h in enumerate((HEADS, KV_HEADS, KV_HEADS))
    ]
    torch.manual_seed(5)
    dropout = Dropout(p=plain.get("dropout_p", 0.0), seed=int(torch.randint(2**63 - 1, ())))
    want = dense.attention(
        *whole,
        dense.Shape(**seen),
        scale=plain.get("scale"),
        dropout=dropout if dropout.p else None,
        **given,
    )[0]
    upstream = reference.draw(*want.shape, seed=9)
    wanted = torch.autograd.grad(want, [*whole, *given.values()], upstream)
    return [
        wrong
        for grid in grids(num_ranks)
        for wrong in _differs(rank, grid, whole, given, plain, want, upstream, wanted)
    ]


def _differs(rank, grid, whole, given, plain, want, upstream, wanted) -> list[str]:
    parts = (BEFORE, sum(LENS), BEHIND)
    layer = UlyssesAttention(dist.group.WORLD, grid=grid)
    options = {"attn_mask" if key == "mask" else key: value for key, value in given.items()}
    cuts = [tensor.split(parts, 1) for tensor in whole]
    image = [reference.shard(cut[1], LENS, rank) for cut in cuts]
    torch.manual_seed(5)
    out, text = layer.joint(
        *image,
        prefix=tuple(cut[0] for cut in cuts),
        suffix=tuple(cut[2] for cut in cuts),
        seq_lens=LENS,
        **options,
        **plain,
    )
    before, middle, behind = upstream.split(parts, 1)
    share = torch.cat([before, behind], 1) / len(LENS)  # of a loss that all ranks compute alike
    found = torch.autograd.grad(
        [out, text],
        [*whole, *given.values()],
        [reference.shard(middle, LENS, rank), share],
    )
    for grad in found:
        dist.all_reduce(grad)
    expected = want.split(parts, 1)
    pairs = [
        (out, reference.shard(expected[1], LENS, rank)),
        (text, torch.cat([expected[0], expected[2]], 1)),
        *zip(found, wanted, strict=True),
    ]
    return [
        f"{grid} number {n}"
        for n, (got, right) in enumerate(pairs)
        if not torch.allclose(got, right, rtol=0, atol=1e-10)
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_text_beside_the_image_takes_every_argument(pool, name):
    assert pool(4).run(_joint, name) == [[]] * 4


# By argument of a cache: a step of 2 tokens behind 5, with it.
OF_A_CACHE = {
    "attn_mask": lambda: torch.arange(7) != 3,
    "scale": lambda: 0.9,
    "window": lambda: (1, 0),
    "sinks": lambda: torch.ones(HEADS),
}


def test_every_argument_of_a_cache_is_listed():
    names = set(inspect.signature(KVCache.attend).parameters)
    assert names - {"self", "query", "key", "value"} == set(OF_A_CACHE)


def _cached(rank: int, num_ranks: int, name: str) -> float:
    results = []
    for options in ({}, {name: OF_A_CACHE[name]()}):
        cache = KVCache(dist.group.WORLD)
        prompt = [reference.draw(1, 5, KV_HEADS, DIM, seed=n) for n in range(2)]
        cache.prefill(*(reference.shard(t, (3, 2), rank) for t in prompt), seq_lens=(3, 2))
        new = [reference.draw(1, 2, h, DIM, seed=7 + h) for h in (HEADS, KV_HEADS, KV_HEADS)]
        results.append(cache.attend(*new, **options))
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize("name", OF_A_CACHE)
def test_no_argument_of_a_cache_is_ignored(pool, name):
    assert min(pool(2).run(_cached, name)) > 1e-2
