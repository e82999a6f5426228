"""generate() on a sharded prompt, with a sharded KV cache: the tokens of one process."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import DynamicCache

import ulysses
from tests.pool import WorkerError, WorkerPool
from tests.tiny_transformers import build, ids
from ulysses.tiling import shard_lengths

Pools = Callable[[int], WorkerPool]

PROMPT, NEW = 7, 9  # uneven over 2 and 3 ranks, and more new tokens than the prompt has


def named(model: Any, cache: Any) -> dict[str, Any]:
    """The cache by the name that this version of transformers has for it."""
    parameters = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in parameters else "past_key_values": cache}


def cache_of(out: Any) -> Any:
    return out.cache if "cache" in out else out.past_key_values


def generated(model: Any, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """The tokens, the logits [step, batch, word] that chose them, and the cache."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    out = model.generate(tokens, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits), cache_of(out)


def padded() -> dict[str, Tensor]:
    """A prompt with four tokens and one with all seven."""
    tokens = ids(PROMPT)
    tokens[0, :3] = 0
    return {"tokens": tokens, "attention_mask": (tokens != 0).long()}


def _alone(rank: int, num_ranks: int, kind: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    model = build(kind)
    torch.manual_seed(1)
    return generated(model, **options)[:2]


def _sharded(
    rank: int, num_ranks: int, kind: str, options: dict[str, Any], seed: int = 1
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    model = ulysses.parallelize(build(kind), dist.group.WORLD)
    torch.manual_seed(seed)
    tokens, logits, cache = generated(model, **options)
    if cache is None:
        return tokens, logits, ()
    assert {layer.rows.lens for layer in cache.layers} == {cache.lens}
    return tokens, logits, cache.lens


def compare(pool: Any, kind: str, num_ranks: int, **options: Any) -> list[tuple[int, ...]]:
    """Asserts that all ranks have one process's tokens and logits; returns who kept how many."""
    options = {"tokens": ids(PROMPT)} | options
    tokens, logits = pool(1).run(_alone, kind, options)[0]
    assert tokens.unique().numel() > 8, "a model that repeats itself shows little"
    bound = 1e-5 if kind in ("gemma3", "gpt_oss") else 1e-10  # they compute in float32
    kept = []
    for found in pool(num_ranks).run(_sharded, kind, options):
        assert torch.equal(found[0], tokens)
        assert (found[1] - logits).abs().max() < bound * logits.abs().max()
        kept.append(found[2])
    return kept


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("llama", 1), ("llama", 2), ("llama", 3), ("mistral", 3), ("gemma3", 2), ("gpt_oss", 2)],
)
def test_greedy(pool: Pools, kind: str, num_ranks: int) -> None:
    """Full attention, a window of 3, both kinds of layers, sinks."""
    kept = compare(pool, kind, num_ranks, min_new_tokens=NEW)
    total = PROMPT + NEW - 1  # nobody has asked for the last one's keys
    assert kept == [shard_lengths(total, num_ranks)] * num_ranks


@pytest.mark.parametrize(
    "options",
    [
        padded(),
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    ],
    ids=["left padding", "no cache", "chunks", "sampling"],
)
def test_options(pool: Pools, options: dict[str, Any]) -> None:
    compare(pool, "llama", 3, **options)


def test_left_padding_with_a_window(pool: Pools) -> None:
    compare(pool, "mistral", 2, **padded())


def test_a_conversation_goes_on(pool: Pools) -> None:
    """The cache of one generate(), and several new tokens at once in the next."""
    model = build("llama")
    first = model.generate(ids(PROMPT), max_new_tokens=3, do_sample=False)
    expected = generated(model, torch.cat([first, ids(4)], 1))[0]
    for found in pool(2).run(_going_on):
        assert torch.equal(found, expected)


def _going_on(rank: int, num_ranks: int) -> Tensor:
    model = ulysses.parallelize(build("llama"), dist.group.WORLD)
    tokens, _, cache = generated(model, ids(PROMPT), max_new_tokens=3)
    return generated(model, torch.cat([tokens, ids(4)], 1), **named(model, cache))[0]


def _by_hand(rank: int, num_ranks: int) -> Tensor:
    """Of a wrapped model: this rank's part of the prompt, then whole new tokens."""
    model = ulysses.wrap(build("mistral"), dist.group.WORLD)
    with torch.no_grad():
        cache = cache_of(
            model(ulysses.shard_sequence(ids(PROMPT), dist.group.WORLD), use_cache=True)
        )
        assert cache.get_seq_length() == PROMPT
        logits = model(ids(5), **named(model, cache)).logits
        again = model(ids(2), **named(model, cache)).logits
    return torch.cat([logits, again], 1)


def test_a_wrapped_model_by_hand(pool: Pools) -> None:
    expected = build("mistral")(torch.cat([ids(PROMPT), ids(5), ids(2)], 1)).logits[:, PROMPT:]
    for found in pool(2).run(_by_hand):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def _last_logits(rank: int, num_ranks: int) -> list[Tensor]:
    model = ulysses.parallelize(build("llama"), dist.group.WORLD, outputs="sharded")
    return [model(ids(PROMPT), logits_to_keep=kept).logits.detach() for kept in (1, 4, 99)]


def test_the_last_logits_of_the_whole(pool: Pools) -> None:
    """Of one rank, of several, and of all."""
    expected = build("llama")(ids(PROMPT)).logits
    for found in pool(3).run(_last_logits):
        for logits, kept in zip(found, (1, 4, 99), strict=True):
            torch.testing.assert_close(logits, expected[:, -kept:], rtol=0, atol=1e-10)


def _seeded_apart(rank: int, num_ranks: int) -> None:
    _sharded(rank, num_ranks, "llama", {"tokens": ids(PROMPT), "do_sample": True}, seed=rank)


def test_ranks_that_would_draw_other_tokens_are_refused(pool: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run(_seeded_apart)
    assert len(caught.value.errors) == 2
    assert all("torch.manual_seed" in text for _, text in caught.value.errors.values())


def test_what_a_sharded_cache_can_not_do() -> None:
    """By name, before any communication: there is no group here to communicate in."""
    model = ulysses.parallelize(build("llama"), None)
    tokens = ids(PROMPT)
    for options, message in (
        ({"num_beams": 2}, "beam search, which changes or reorders what was kept, is not supp"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation, which changes or reorders"),
        ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
        (named(model, DynamicCache()), "was given a DynamicCache, which would hold this rank's"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            model.generate(tokens, max_new_tokens=2, **options)
    _, _, cache = generated(model, tokens)
    for change in ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"):
        with pytest.raises(ValueError, match=rf"{change}.* is not supported with a KV cache"):
            getattr(cache, change)(1)
    with pytest.raises(ValueError, match=r"labels with .* or logits_to_keep"):
        model(tokens, labels=tokens, logits_to_keep=1)
    with pytest.raises(ValueError, match="tensor of places in the whole sequence"):
        model(tokens, logits_to_keep=torch.arange(2))


def test_models_that_could_not_use_a_sharded_cache() -> None:
    tokens = ids(PROMPT)
    layer = "model.layers.1.self_attn"
    model = build("llama")
    model.get_submodule(layer).config = copy.deepcopy(model.config)
    ulysses.parallelize(model, None, local=[layer])
    with pytest.raises(ValueError, match=rf"with a KV cache, but {layer} .* attends otherwise"):
        model(tokens, use_cache=True)
    by_layers = ulysses.parallelize(build("llama"), None, region="model.layers")
    with pytest.raises(ValueError, match="is wrapped and given this rank's part"):
        by_layers.generate(tokens, max_new_tokens=2)
    with pytest.raises(ValueError, match="asked for a KV cache, which goes with sharded inputs"):
        by_layers(tokens, use_cache=True)


def test_unwrapped_and_pickled_models_generate_as_before() -> None:
    model = build("llama")
    expected = generated(model, ids(PROMPT))[0]
    ulysses.parallelize(model, None)
    duplicate = copy.deepcopy(model)
    assert type(generated(duplicate, ids(PROMPT))[2]).__name__ == "ShardedCache"
    for plain in (pickle.loads(pickle.dumps(model)), ulysses.unwrap(model)):
        tokens, _, cache = generated(plain, ids(PROMPT))
        assert torch.equal(tokens, expected)
        assert type(cache) is DynamicCache
