"""What a transformers model is given on a shard: positions, masks, labels and caches."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ulysses.integrations.huggingface_cache import (
    ShardedCache,
    cache_argument,
    continues,
    take_cache,
)
from ulysses.integrations.huggingface_masks import Facts
from ulysses.sequence import gather_sequence_slice_grads, position_ids
from ulysses.wrap_code import names_in
from ulysses.wrap_lengths import tell
from ulysses.wrap_scope import Scope

FACTS = "transformers"  # the key of a forward's `Facts` in a scope's notes
_LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


def prepared(
    scope: Scope, model: PreTrainedModel, signature: inspect.Signature, given: dict[str, Any]
) -> dict[str, Any]:
    """A model's arguments, of this rank's tokens, with the positions of the whole sequence.

    Leaves the facts in `scope.notes`. Raises ValueError for what can't be right on a shard.
    """
    given = {key: value for key, value in given.items() if value is not None}
    _refuse_encoder_states(model, given)
    caches = bool(given.get("use_cache", getattr(model.config, "use_cache", False)))
    cache = take_cache(scope.wrapping, model, given)
    if "use_cache" in signature.parameters:
        given["use_cache"] = False
    if cache is not None and not scope.neutral:
        given |= cache_argument(cache, signature.parameters)
    if scope.takes_whole:
        _refuse_cache_of_whole(model, cache)
        facts = _facts_of_whole(given)
    elif cache is not None and continues(cache):
        facts = replace(_facts_of_whole(given), cache=cache)
    else:
        _refuse_of_whole(model, given)
        given.pop("cache_position", None)  # of 4.x; made again from this rank's tokens
        own, facts = _facts_of_part(scope, model, given)
        given |= own
        if "position_ids" in signature.parameters and "position_ids" not in given:
            given |= _positions(scope, model, facts, given)
        if cache is not None:
            cache.prompt_lens = facts.lens
    scope.notes[FACTS] = facts
    if caches and (facts.documents or facts.document_of is not None):
        raise ValueError(
            f"{type(model).__name__} was given position_ids of packed documents and would make a "
            "KV cache, in which case transformers lets documents see each other: pass "
            "use_cache=False"
        )
    return given


def _refuse_of_whole(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """What speaks of the whole sequence and would be taken for this rank's part of it."""
    kept = given.get("logits_to_keep", 0)
    if isinstance(kept, int) and kept:
        raise ValueError(
            f"{type(model).__name__} was given logits_to_keep={kept}: these would be the last of "
            "each rank's tokens; pass a tensor of places among this rank's, or use "
            "ulysses.parallelize, which takes the last of the whole"
        )
    if labels := [name for name in _LABELS if name in given]:
        raise ValueError(
            f"{type(model).__name__} was given {', '.join(labels)}, of which it would make a loss "
            "of this rank's tokens only, shifted within the shard: use ulysses.parallelize, which "
            "takes whole labels, or ulysses.shift_labels before sharding and ulysses.token_loss"
        )


def take_rows(given: dict[str, Any], lens: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    """Every rank's number of logits, where only the last of the whole are asked for.

    `given` then asks for this rank's, and for one more where it has none: DTensors of no rows are
    too much for some layers.
    """
    kept = given.get("logits_to_keep", 0)
    if isinstance(kept, Tensor):
        raise ValueError(
            "logits_to_keep is a tensor of places in the whole sequence: pass the number of last "
            "ones, or leave it out and take what you need of the logits"
        )
    if not kept:
        return None
    if given.get("return_dict") is False:
        raise ValueError(f"logits_to_keep={kept} with return_dict=False: logits are known by name")
    ends = tuple(accumulate(lens))
    counts = tuple(
        min(length, max(0, end - (ends[-1] - kept))) for length, end in zip(lens, ends, strict=True)
    )
    given["logits_to_keep"] = torch.arange(lens[rank] - max(1, counts[rank]), lens[rank])
    return counts


def _refuse_encoder_states(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """A second sequence, whose mask could not be told from the first one's."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False) or "encoder_hidden_states" in given:
        raise ValueError(
            f"{name} attends to an encoder's states, which ulysses does not shard for "
            "transformers' models yet: wrap the encoder, or the decoder's layers, by themselves"
        )


def _refuse_cache_of_whole(model: PreTrainedModel, cache: ShardedCache | None) -> None:
    if cache is not None:
        raise ValueError(
            f"{type(model).__name__} is sharded at a region and was asked for a KV cache, which "
            "goes with sharded inputs only: ulysses.parallelize(model, mesh, region=None), or "
            "pass use_cache=False"
        )


def _facts_of_whole(given: dict[str, Any]) -> Facts:
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return Facts(None, _padding(mask))
    if isinstance(positions, Tensor) and positions.ndim == 2 and mask is None:
        return packed(None, positions)
    return Facts(None)


def _facts_of_part(
    scope: Scope, model: PreTrainedModel, given: dict[str, Any]
) -> tuple[dict[str, Any], Facts]:
    """This rank's part of mask and positions, where they were given whole, and the facts."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None:
        return {}, Facts(None)
    lens = scope.lengths.of(tokens, 1, type(model).__name__)
    rank, group = scope.attention.rank, scope.attention.group
    named = {name: given.get(name) for name in ("attention_mask", "position_ids")}
    by_token = {n: t for n, t in named.items() if isinstance(t, Tensor) and t.ndim == 2}
    own = {name: _part(tensor, lens, rank) for name, tensor in by_token.items()}
    if scope.neutral:
        if "position_ids" in own and own["position_ids"] is not named["position_ids"]:
            own["position_ids"] = torch.zeros_like(own["position_ids"])  # were given whole
        return own, Facts(lens)
    told = tell([name in by_token for name in named], group, tokens.device)
    if any(each != told[0] for each in told):
        raise ValueError(
            f"attention_mask and position_ids are given on some ranks only, {told} (a rank each): "
            "each rank must pass its part of the same arguments"
        )
    if "attention_mask" in by_token:
        return own, Facts(lens, _padding(_whole(by_token["attention_mask"], lens, group)))
    # transformers sees packed documents only where there is no mask.
    if "position_ids" in by_token and named["attention_mask"] is None:
        return own, packed(lens, _whole(by_token["position_ids"], lens, group))
    return own, Facts(lens)


def _positions(
    scope: Scope, model: PreTrainedModel, facts: Facts, given: dict[str, Any]
) -> dict[str, Any]:
    """This rank's positions in the whole; where all tokens are to be alike, all the same."""
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None or facts.lens is None:
        return {}
    if scope.neutral:
        zeros = torch.zeros(1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
        return {"position_ids": zeros}
    _require_plain_positions(model, facts)
    own = position_ids(facts.lens, scope.attention.rank, device=tokens.device)
    return {"position_ids": own[None]}


def _padding(mask: Tensor) -> Tensor | None:
    """Bool [B, S], or None where nothing is padding."""
    seen = mask.bool()
    return None if bool(seen.all()) else seen


def _whole(tensor: Tensor, lens: tuple[int, ...], group: Any) -> Tensor:
    """[B, S] of this rank's part, or as it is."""
    if tensor.shape[1] == sum(lens):
        return tensor
    return gather_sequence_slice_grads(tensor, group, seq_lens=lens)


def _part(tensor: Tensor, lens: tuple[int, ...], rank: int) -> Tensor:
    if tensor.shape[1] != sum(lens):
        return tensor
    return tensor.narrow(1, sum(lens[:rank]), lens[rank])


def packed(lens: tuple[int, ...] | None, positions: Tensor) -> Facts:
    """The documents in whole positions [B, S]: one begins where they do not count on by one."""
    begins = positions.diff(dim=1) != 1
    if not bool(begins.any()):
        return Facts(lens)
    if bool((begins == begins[:1]).all()):
        borders = (begins[0].nonzero().flatten() + 1).tolist()
        return Facts(lens, documents=(0, *borders, positions.shape[1]))
    first = begins.new_zeros(len(begins), 1)
    return Facts(lens, document_of=torch.cat([first, begins], 1).cumsum(1))


def _require_plain_positions(model: PreTrainedModel, facts: Facts) -> None:
    """Refuses models that would not have counted 0, 1, 2, ... had they been given no positions."""
    for part in model.modules():
        names = names_in(type(part), depth=0)
        if "create_position_ids_from_input_ids" in names or (
            facts.padding is not None and "cumsum" in names and "position_ids" in names
        ):
            raise ValueError(
                f"{type(part).__name__} makes its positions from padding, not by counting tokens: "
                "pass position_ids of the whole sequence, this rank's part"
            )
