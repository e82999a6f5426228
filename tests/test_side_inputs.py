"""No argument is taken and ignored, on any backend; recomputation, autocast and other modes."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from tests import dense, npu_ops, reference
from tests.counting import counted
from ulysses import QueryRows, Replicated, UlyssesAttention
from ulysses.backends.sdpa import SdpaAttention
from ulysses.tiling import grids

HEADS, DIM, LENS = 4, 16, (4, 4)
LENGTH = sum(LENS)

# By argument, and form of it: a call of that many rows with it.
ARGUMENTS = {
    "attn_mask, bool": lambda n: {"attn_mask": reference.draw(n, n, seed=7) > 0},
    "attn_mask, float": lambda n: {"attn_mask": reference.draw(n, n, seed=7).float()},
    "attn_mask, rows": lambda n: {"attn_mask": QueryRows(reference.draw(LENS[0], n, seed=7) > 0)},
    "attn_mask, causal bias": lambda n: {"attn_mask": causal_lower_right(n, n)},
    "dropout_p": lambda n: {"dropout_p": 0.5},
    "is_causal": lambda n: {"is_causal": True},
    "scale": lambda n: {"scale": 0.9},
    "window": lambda n: {"window": (1, 1)},
    "documents": lambda n: {"documents": (0, 3, n)},
    "prefix_len": lambda n: {"prefix_len": n - 1, "is_causal": True},
    "alibi_slopes": lambda n: {"alibi_slopes": torch.linspace(0.1, 0.9, HEADS)},
    "sinks": lambda n: {"sinks": torch.linspace(-1, 1, HEADS)},
}
# These say how the tensors are spread, not what is computed.
OF_THE_SPREAD = {"query", "key", "value", "seq_lens", "key_lens"}


def test_every_argument_of_the_layer_is_listed():
    names = set(inspect.signature(UlyssesAttention.forward).parameters) - {"self"}
    assert names - OF_THE_SPREAD == {name.partition(",")[0] for name in ARGUMENTS}


def _attend(layer: UlyssesAttention, way: str, own, options: dict) -> torch.Tensor:
    if way == "with two rows of text":
        text = tuple(reference.draw(1, 2, HEADS, DIM, seed=n).to(own[0].dtype) for n in (4, 5, 6))
        return layer.joint(*own, prefix=text, **options)[0]
    return layer.with_lse(*own, **options)[0] if way == "with_lse" else layer(*own, **options)


def _with_and_without(
    rank: int, num_ranks: int, name: str, backend: str, dtype: torch.dtype, grid: tuple[int, int]
) -> dict[str, str]:
    if backend == "ascend":
        npu_ops.install()
    whole = [reference.draw(1, LENGTH, HEADS, DIM, seed=seed) for seed in range(3)]
    own = [reference.shard(tensor, LENS, rank).to(dtype) for tensor in whole]
    layer = UlyssesAttention(dist.group.WORLD, backend=backend, grid=grid)
    outcomes = {}
    for way, length in (("alone", 8), ("with_lse", 8), ("with two rows of text", 10)):
        with torch.no_grad():
            plain = _attend(layer, way, own, {"is_causal": name == "prefix_len"})
            options = ARGUMENTS[name](length)
            with counted() as counts:
                try:
                    result = _attend(layer, way, own, options)
                except (TypeError, ValueError) as error:
                    named = f"{name.partition(',')[0]} " in str(error) or repr(backend) in str(
                        error
                    )
                    in_time = named and not counts.collectives
                    outcomes[way] = "refused" if in_time else f"late or without a name: {error}"
                    continue
        outcomes[way] = "changed" if (result - plain).abs().max() > 1e-2 else "ignored"
    return outcomes


@pytest.mark.parametrize("grid", grids(2))
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("sdpa", torch.float32), ("ascend", torch.float32), ("ascend", torch.bfloat16)],
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_argument_is_ignored(pool, name, backend, dtype, grid):
    """Each changes the result, or is refused by name before anything is sent."""
    refused = {("with two rows of text", "attn_mask, rows")}  # of the sharded rows, or of all?
    for outcomes in pool(2).run(_with_and_without, name, backend, dtype, tuple(grid)):
        for way, outcome in outcomes.items():
            assert outcome == "refused" if (way, name) in refused else "changed", way


BAD = {
    "slopes of this rank's heads": ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes .*\(2,\)"),
    "sinks elsewhere": ({"sinks": torch.zeros(HEADS, device="meta")}, "sinks is on meta"),
    "a scale that is a tensor": ({"scale": torch.ones(())}, "scale=.*pass a number"),
    "a scale of nothing": ({"scale": 0.0}, r"scale=0\.0: .* above 0; multiply the query"),
    "a scale that turns what is hidden around": ({"scale": -1}, "scale=-1: "),
    "a scale without end": ({"scale": float("inf")}, "scale=inf: "),
    "borders that are no whole numbers": (
        {"documents": (0, 2.5, 8)},
        r"documents=\(0, 2\.5, 8\): pass whole numbers",
    ),
    "lengths that are no whole numbers": ({"seq_lens": (8.0,)}, r"seq_lens=\(8\.0,\): pass whole"),
    "lengths in a string": ({"seq_lens": "8"}, "seq_lens=.*: pass whole numbers"),
    "a border alone": ({"documents": 8}, "documents=8: pass whole numbers"),
    "a window of one number": ({"window": 3}, r"window=3: pass \(left, right\)"),
    "a negative window": ({"window": (-1, 0)}, r"window=\(-1, 0\)"),
    "lengths of documents": ({"documents": (3, 5)}, r"documents=\(3, 5\).*borders"),
    "documents beyond the end": ({"documents": (0, 9)}, "end <= 8"),
    "a prefix that is not causal": ({"prefix_len": 2}, "pass is_causal=True and no window"),
    "a prefix beyond the end": ({"prefix_len": 9, "is_causal": True}, r"must lie in 0\.\.8"),
    "is_causal beside a causal bias": (
        {"is_causal": True, "attn_mask": causal_lower_right(LENGTH, LENGTH)},
        "beside a causal bias",
    ),
    "only the key replicated": (
        {"key": Replicated(torch.zeros(1, LENGTH, HEADS, DIM))},
        "or neither",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_can_not_be_meant_is_refused(kind):
    own = {name: torch.zeros(1, LENGTH, HEADS, DIM) for name in ("query", "key", "value")}
    options, told = BAD[kind]
    with pytest.raises((TypeError, ValueError), match=told):
        UlyssesAttention(None)(**(own | options))


def _cross_without_a_corner(rank: int, num_ranks: int) -> None:
    query, key = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 4, 8)
    UlyssesAttention(dist.group.WORLD)(query, key, key, key_lens=(3, 3), is_causal=True)


def test_causal_between_lengths_that_differ_asks_for_the_corner(pool):
    with pytest.raises(Exception, match=r"4 queries and 6 keys: .*causal_lower_right") as refused:
        pool(2).run(_cross_without_a_corner)
    assert sorted(refused.value.errors) == [0, 1]


class _KeyLengths(SdpaAttention):
    name = "key-lengths"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, query, key, value, **options):
        self.seen.append(key.shape[1])
        return super().__call__(query, key, value, **options)


def _text(rank: int, num_ranks: int) -> tuple[list[int], int]:
    query = reference.draw(1, 8, 8, 16, seed=1)
    key, value = (reference.draw(1, 5, 8, 16, seed=seed) for seed in (2, 3))
    kernel = _KeyLengths()
    layer = UlyssesAttention(dist.group.WORLD, backend=kernel, grid=(4, 1))
    own = reference.shard(query, (2,) * 4, rank)
    real = torch.tensor([True, True, True, False, False])
    with counted() as counts:
        out = layer(own, Replicated(key), Replicated(value), real)
    expected = dense.attention(query, key, value, dense.Shape(), mask=real)[0]
    torch.testing.assert_close(out, reference.shard(expected, (2,) * 4, rank))
    return kernel.seen, len(counts.collectives)


def test_replicated_text_is_not_exchanged_nor_seen_once_a_rank(pool):
    assert pool(4).run(_text) == [([5], 2)] * 4


def _sink_gradients(rank: int, num_ranks: int) -> torch.Tensor:
    """Rank r's heads alone get a gradient on rank r."""
    own = [reference.draw(1, 2, HEADS, DIM, seed=seed) for seed in range(3)]
    sinks = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    UlyssesAttention(dist.group.WORLD, grid=(4, 1))(*own, sinks=sinks).square().sum().backward()
    return sinks.grad


def test_a_learned_number_for_each_head_has_its_gradient_where_the_head_is(pool):
    for rank, grad in enumerate(pool(4).run(_sink_gradients)):
        assert grad.nonzero().flatten().tolist() == [rank]


def _log_sum_exp(rank: int, num_ranks: int, backend: str) -> None:
    npu_ops.install()
    own = [torch.randn(1, 4, HEADS, DIM, requires_grad=True) for _ in range(3)]
    out, lse = UlyssesAttention(dist.group.WORLD, backend=backend).with_lse(*own)
    out.sum().backward(retain_graph=True)
    (out.sum() + lse.sum()).backward()


def test_a_log_sum_exp_without_a_gradient_says_so_and_does_not_drop_it(pool):
    pool(2).run(_log_sum_exp, "sdpa")
    with pytest.raises(Exception, match=r"no gradient through the log-sum-exp.*lse\.detach"):
        pool(2).run(_log_sum_exp, "ascend")


class _Block(torch.nn.Module):
    """One fused projection, attended twice by one layer."""

    def __init__(self, layer: UlyssesAttention) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = layer
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).unflatten(2, (HEADS, 3, DIM)).unbind(3)
        out = self.layer(query, key, value, is_causal=True, dropout_p=0.2, seq_lens=(3, 5))
        return hidden + out.flatten(2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attend(self.attend(hidden))


def _modes(rank: int, num_ranks: int, grid: tuple[int, int]) -> None:
    whole = reference.draw(2, 8, HEADS * DIM, seed=1, dtype=torch.float32)
    block = _Block(UlyssesAttention(dist.group.WORLD, grid=grid))

    def step(run) -> list[torch.Tensor]:
        torch.manual_seed(11)
        block.zero_grad()
        own = reference.shard(whole, (3, 5), rank).clone().requires_grad_()
        out = run(own)
        if out.requires_grad:
            out.square().sum().backward()
            return [out, own.grad, block.qkv.weight.grad.clone(), block.qkv.bias.grad.clone()]
        return [out]

    expected = step(block)
    runs = {
        "checkpoint": lambda own: checkpoint(block, own, use_reentrant=False),
        "reentrant checkpoint": lambda own: checkpoint(block, own, use_reentrant=True),
        "each half checkpointed": lambda own: checkpoint(
            block.attend, checkpoint(block.attend, own, use_reentrant=False), use_reentrant=True
        ),
        "no_grad": torch.no_grad()(block),
        "inference_mode": torch.inference_mode()(block),
    }
    for name, run in runs.items():
        for got, want in zip(step(run), expected, strict=False):
            assert torch.equal(got, want), name
    torch.use_deterministic_algorithms(True)
    try:
        deterministic = step(block)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got, want) for got, want in zip(deterministic, expected, strict=True))


@pytest.mark.parametrize("grid", grids(2))
def test_recomputation_and_other_modes_repeat_every_bit(pool, grid):
    pool(2).run(_modes, tuple(grid))


def _autocast(rank: int, num_ranks: int, with_lse: bool) -> None:
    """2 heads on 4 ranks: two ranks have no work, and must send the dtype that the others do."""
    lens = (2, 3, 1, 2)
    whole = [reference.draw(1, 8, 2, DIM, seed=seed, dtype=torch.float32) for seed in range(3)]
    own = [reference.shard(tensor, lens, rank).clone().requires_grad_() for tensor in whole]
    layer = UlyssesAttention(dist.group.WORLD, grid=(4, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if with_lse:
            out, lse = layer.with_lse(*own, seq_lens=lens)
            assert lse.dtype == torch.float32
        else:
            out = layer(own[0].bfloat16(), *own[1:], seq_lens=lens)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    exact = [tensor.bfloat16().float().requires_grad_() for tensor in whole]
    expected = dense.attention(*exact, dense.Shape())[0]
    expected.square().sum().backward()
    pairs = [(out, expected), *((o.grad, e.grad) for o, e in zip(own, exact, strict=True))]
    for got, want in pairs:
        want = reference.shard(want, lens, rank)
        assert (got.float() - want).abs().max() < 4e-2 * want.abs().max().clamp(min=1)


@pytest.mark.parametrize("with_lse", [False, True])
def test_autocast_gives_every_rank_the_same_dtype(pool, with_lse):
    pool(4).run(_autocast, with_lse)


def _precise_bias(rank: int, num_ranks: int) -> None:
    """A bias of some -100 everywhere cancels; rounded to bfloat16 it would be off by a half."""
    own = [reference.draw(1, 4, HEADS, DIM, seed=seed).bfloat16() for seed in range(3)]
    layer = UlyssesAttention(dist.group.WORLD, grid=(1, 2))
    bias = -100 - torch.arange(LENGTH) / 8
    out, shifted = (layer(*own, attn_mask=mask) for mask in (bias + 100, bias))
    assert (out - shifted).abs().max() < 2e-2


def test_a_large_bias_is_not_rounded_to_half_precision(pool):
    pool(2).run(_precise_bias)
