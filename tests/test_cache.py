"""Generation with a sharded cache, step by step, against attention of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right

from tests import reference
from tests.counting import counted
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import Band
from ulysses.backends.sdpa import SdpaAttention
from ulysses.cache import KVCache
from ulysses.cache_rows import levelled

DIM, VALUE_DIM = 4, 3
STEPS = (1, 1, 3, 1, 7, 2, 1)


def _whole(length, heads, batch, dtype=torch.float64):
    num_heads, num_kv_heads = heads
    return [
        reference.draw(batch, length, n, dim, seed=n + dim, dtype=dtype)
        for n, dim in ((num_heads, DIM), (num_kv_heads, DIM), (num_kv_heads, VALUE_DIM))
    ]


def _lengths(num_ranks):
    return [(5, 2, 0, 3)[:num_ranks], (0,) * (num_ranks - 1) + (1,), (0,) * num_ranks]


def _rows(tensors, start, stop):
    return [tensor[:, start:stop] for tensor in tensors]


def _generate(lens, heads, batch=1, steps=STEPS, left=None, mask=None, sinks=None):
    """Prefill, then every step: the largest difference from one process, and the cache."""
    rank, prompt = dist.get_rank(), sum(lens)
    length = prompt + sum(steps)
    query, key, value = _whole(length, heads, batch)
    cache = KVCache(dist.group.WORLD)
    cache.prefill(*(reference.shard(t, lens, rank) for t in (key, value)), seq_lens=lens)
    worst, start = 0.0, prompt
    for n in steps:
        stop = start + n
        cut = None if mask is None else mask[..., -n if mask.shape[2] > 1 else 0 :, :stop]
        options = {"attn_mask": cut, "sinks": sinks, "scale": 0.7}
        if left is not None:
            options["window"] = (left, 0)
        out = cache.attend(*_rows((query, key, value), start, stop), **options)
        band = Band(None if left is None else start - left, start)
        tensors = (query[:, start:stop], key[:, :stop], value[:, :stop])
        expected = _expected(*tensors, band, cut, sinks)
        assert out.shape == expected.shape
        worst = max(worst, (out - expected).abs().max().item())
        start = stop
    assert cache.length == length
    return worst, cache


def _expected(query, key, value, band, mask, sinks):
    if sinks is None:
        return reference.attention(query, key, value, band, 0.7, mask)
    # A sink is one more key, of a score that the mask gives it and no value.
    scores = torch.zeros(1, query.shape[2], query.shape[1], key.shape[1] + 1, dtype=query.dtype)
    visible = band.mask(query.shape[1], key.shape[1], query.device)
    scores[..., :-1].masked_fill_(~visible, -torch.inf)
    scores[..., -1] = sinks.view(1, -1, 1)
    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1)) for t in (key, value))
    return reference.attention(query, key, value, None, 0.7, scores)


def _every_step(rank, num_ranks):
    wrong = []
    for lens in _lengths(num_ranks):
        for heads, batch in (((4, 4), 1), ((6, 2), 3), ((1, 1), 2)):  # one head on many ranks
            difference, _ = _generate(lens, heads, batch)
            if not difference < 1e-10:
                wrong.append(f"{lens=} {heads=} {batch=}: {difference}")
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_step_equals_one_process(pool, num_ranks):
    for wrong in pool(num_ranks).run(_every_step):
        assert not wrong, "\n".join(wrong)


def _with_everything(rank, num_ranks):
    lens = _lengths(num_ranks)[0]
    length = sum(lens) + sum(STEPS)
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[0, ..., :6] = False
    added = reference.draw(1, 6, 7, length, seed=3)  # the last n rows are a step's
    assert _generate(lens, (6, 3), 2, mask=padding)[0] < 1e-10
    assert _generate(lens, (6, 3), 2, mask=added)[0] < 1e-10
    for left in (0, 2, 9):
        assert _generate(lens, (6, 3), 2, left=left)[0] < 1e-10
    assert _generate(lens, (6, 3), 2, left=2, mask=added)[0] < 1e-10
    assert _generate(lens, (6, 3), 2, left=9, mask=padding)[0] < 1e-10
    assert _generate(lens, (6, 3), 1, sinks=reference.draw(6, seed=4))[0] < 1e-10


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_masks_windows_and_sinks(pool, num_ranks):
    pool(num_ranks).run(_with_everything)


def _padding_alone(rank, num_ranks):
    """A sample of nothing but padding gives zeros, not NaN."""
    cache = KVCache(dist.group.WORLD)
    tokens = _whole(2, (4, 2), 2)
    mask = torch.tensor([False, True]).view(2, 1, 1, 1)
    out = cache.attend(*tokens, attn_mask=mask)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    expected = reference.attention(*tokens, Band(None, 0))
    torch.testing.assert_close(out[1], expected[1])


def test_rows_that_see_nothing_are_zero(pool):
    pool(2).run(_padding_alone)


def _after_the_layer(rank, num_ranks):
    """The prompt through the layer, its keys kept, then tokens one by one: one causal sequence."""
    lens, length = (4, 3, 2), 15
    whole = _whole(length, (6, 2), 2)
    expected = reference.attention(*whole, Band(None, 0))
    own = [reference.shard(t, lens, rank) for t in _rows(whole, 0, 9)]
    with torch.inference_mode():
        cache = KVCache(dist.group.WORLD, check=True)
        out = UlyssesAttention(dist.group.WORLD)(*own, is_causal=True, seq_lens=lens)
        cache.prefill(*own[1:])  # the ranks tell each other their lengths
    assert cache.lens == lens
    torch.testing.assert_close(out, reference.shard(expected, lens, rank))
    for i in range(9, length):
        with torch.inference_mode(i % 2 == 0):  # written to in and out of it
            out = cache.attend(*_rows(whole, i, i + 1))
        torch.testing.assert_close(out, expected[:, i : i + 1])


def test_generation_continues_what_the_layer_began(pool):
    pool(3).run(_after_the_layer)


def _memory(rank, num_ranks):
    """All that a rank keeps, and that it keeps nothing of what it was given alive."""
    heads, lens = (4, 2), (8, 8, 8, 8)
    row = 2 * heads[1] * (DIM + VALUE_DIM) * 8
    fused = reference.draw(2, 8, heads[1], DIM + VALUE_DIM, seed=1)
    cache = KVCache(dist.group.WORLD)
    cache.prefill(*fused.split((DIM, VALUE_DIM), dim=3))
    assert cache.nbytes == 8 * row
    _, cache = _generate(lens, heads, 2, steps=(1,) * 64)
    assert cache.lens == (24,) * 4
    assert 24 * row <= cache.nbytes <= (24 + 24) * row
    _, cache = _generate((512,) * 4, heads, 2, steps=(64,))
    assert cache.nbytes <= 528 * row * 9 / 8


def test_each_rank_keeps_its_share(pool):
    pool(4).run(_memory)


def _costs(rank, num_ranks, heads):
    cache = KVCache(dist.group.WORLD)
    tokens = _whole(1, heads, 1)
    with counted() as counts:
        cache.attend(*tokens)
    return counts.collectives


@pytest.mark.parametrize("heads", [(1, 1), (32, 8)])
def test_a_step_is_one_collective(pool, heads):
    assert pool(3).run(_costs, heads) == [["c10d::alltoall_base_"]] * 3


def _in_bfloat16(rank, num_ranks):
    tokens = _whole(20, (4, 2), 1, torch.bfloat16)
    cache = KVCache(dist.group.WORLD)
    cache.prefill(*(reference.shard(t[:, :12], (6, 6), rank) for t in tokens[1:]))
    out = cache.attend(*_rows(tokens, 12, 20))
    expected = reference.attention(
        *(t.double() for t in (tokens[0][:, 12:], *tokens[1:])), Band(None, 12)
    )
    assert out.dtype == torch.bfloat16
    # The output of each rank is rounded before the merge, and the merge after it: 2 of 2^-9.
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)


def test_in_bfloat16_sums_are_wider(pool):
    pool(2).run(_in_bfloat16)


def test_without_a_group():
    query, key, value = _whole(9, (4, 2), 2)
    cache = KVCache(None)
    cache.prefill(key[:, :6], value[:, :6])
    out = cache.attend(query[:, 6:], key[:, 6:], value[:, 6:])
    torch.testing.assert_close(out, reference.attention(query[:, 6:], key, value, Band(None, 6)))


@pytest.mark.parametrize(
    ("lens", "num_new", "taken"),
    [
        ((3, 3), 1, (1, 0)),
        ((4, 3), 1, (0, 1)),
        ((9, 0, 2), 8, (0, 5, 3)),
        ((0, 0, 0), 7, (3, 2, 2)),
        ((5,), 3, (3,)),
        ((5, 1), 0, (0, 0)),
    ],
)
def test_new_rows_go_where_fewest_are(lens, num_new, taken):
    assert levelled(lens, num_new) == taken


class _WithoutLse(SdpaAttention):
    name = "without-lse"
    attend_with_lse = None


class _FewKeys(SdpaAttention):
    name = "few-keys"

    def unsupported(self, problem):
        return f"num_keys={problem.num_keys}: at most 4" if problem.num_keys > 4 else None


def _refused(rank, num_ranks, kind):
    tokens = _whole(1, (4, 2), 2)
    options, kernel = {}, "auto"
    if kind == "gradients":
        tokens[1].requires_grad_()
    elif kind == "batch":
        tokens = _whole(1, (4, 2), 1)
    elif kind == "mask":
        options["attn_mask"] = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    elif kind == "causal bias":
        options["attn_mask"] = causal_lower_right(1, 7)
    elif kind == "kernel":
        kernel = _WithoutLse()
    elif kind == "other rank's rows":
        kernel = _FewKeys()  # rank 0 has 5 rows, rank 1 has 1 and takes the new one
    cache = KVCache(dist.group.WORLD, backend=kernel)
    cache.prefill(*(t.new_zeros(2, (5, 1)[rank], 2, t.shape[3]) for t in _whole(1, (4, 2), 1)[1:]))
    with counted() as counts:
        try:
            if kind == "prefill":
                cache.prefill(*tokens[1:])
            cache.attend(*tokens, **options)
        except (TypeError, ValueError):
            assert not counts.collectives
            assert cache.length == 6
            raise


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gradients", "requires gradients.*no backward pass.*torch.no_grad"),
        ("batch", r"new rows are \(1, 1, 2, 4\).*cache's \(2, [15], 2, 4\)"),
        ("mask", r"attn_mask of shape \(2, 1, 1, 5\) does not fit .*\(2, 4, 1, 7\)"),
        ("causal bias", "attn_mask is CausalBias: new tokens are causal"),
        ("kernel", "'without-lse' has no attend_with_lse"),
        ("other rank's rows", "'few-keys' can not run a decode step: num_keys=5"),
        ("prefill", "the cache holds 6 tokens: prefill comes first and once"),
    ],
)
def test_what_can_not_be_exact_is_refused_on_every_rank(pool, kind, told):
    with pytest.raises(Exception, match=told) as refused:
        pool(2).run(_refused, kind)
    assert sorted(refused.value.errors) == [0, 1]


def _differ(rank, num_ranks):
    cache = KVCache(dist.group.WORLD, check=True)
    cache.attend(*_whole(2 if rank == 1 else 1, (4, 2), 1))


def test_check_names_the_rank_that_differs(pool):
    with pytest.raises(Exception, match="num_queries: rank 1 has 2, the others 1") as refused:
        pool(3).run(_differ)
    assert sorted(refused.value.errors) == [0, 1, 2]
