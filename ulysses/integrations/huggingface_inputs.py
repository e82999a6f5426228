"""What a transformers model is given on a shard: positions, masks, labels and caches."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ulysses.integrations.huggingface_masks import Facts
from ulysses.sequence import gather_sequence_slice_grads, position_ids
from ulysses.wrap_code import calls_in
from ulysses.wrap_lengths import tell
from ulysses.wrap_scope import Scope

FACTS = "transformers"  # the key of a forward's `Facts` in a scope's notes
_LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")
_CACHES = ("cache", "past_key_values")


def prepared(
    scope: Scope, model: PreTrainedModel, signature: inspect.Signature, given: dict[str, Any]
) -> dict[str, Any]:
    """A model's arguments, of this rank's tokens, with the positions of the whole sequence.

    Leaves the facts in `scope.notes`. Raises ValueError for what can't be right on a shard.
    """
    name = type(model).__name__
    _refuse(model, given)
    given = {key: value for key, value in given.items() if value is not None}
    caches = bool(given.get("use_cache", getattr(model.config, "use_cache", False)))
    if "use_cache" in signature.parameters:
        given["use_cache"] = False
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None or scope.neutral:
        scope.notes[FACTS] = Facts(None)
        if tokens is not None and "position_ids" in signature.parameters:
            rows = torch.zeros(1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
            given.setdefault("position_ids", rows)
        return given
    lens = scope.lengths.of(tokens, 1, name)
    own, facts = _facts(scope, tokens, lens, given)
    if caches and (facts.documents or facts.document_of is not None):
        raise ValueError(
            f"{name} was given position_ids of packed documents and would make a KV cache, in "
            "which case transformers lets documents see each other: pass use_cache=False"
        )
    scope.notes[FACTS] = facts
    if "position_ids" in signature.parameters and "position_ids" not in given:
        _require_plain_positions(model, facts)
        rank = scope.attention.rank
        own["position_ids"] = position_ids(lens, rank, device=tokens.device)[None]
    return given | own


def _refuse(model: PreTrainedModel, given: dict[str, Any]) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model, which ulysses does not shard yet")
    for label in _LABELS:
        if given.get(label) is not None:
            raise ValueError(
                f"{name} was given {label}, of which it would make a loss of this rank's tokens "
                "only, shifted within the shard: use ulysses.parallelize, which takes whole "
                "labels, or ulysses.shift_labels before sharding and ulysses.token_loss"
            )
    caches = [cache for cache in _CACHES if given.get(cache) is not None]
    if caches or given.get("use_cache"):
        raise ValueError(
            f"{name} was given {' and '.join(caches) or 'use_cache=True'}: a KV cache of a sharded "
            "sequence is not supported, and so generate() is not; pass use_cache=False, or "
            "ulysses.unwrap the model to generate"
        )


def _facts(
    scope: Scope, tokens: Tensor, lens: tuple[int, ...], given: dict[str, Any]
) -> tuple[dict[str, Any], Facts]:
    """This rank's part of mask and positions, where they were given whole, and the facts."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    has_mask = isinstance(mask, Tensor) and mask.ndim == 2
    has_positions = isinstance(positions, Tensor) and positions.ndim == 2
    group = scope.attention.group
    told = tell([has_mask, has_positions], group, tokens.device)
    if any(each != told[0] for each in told):
        raise ValueError(
            f"attention_mask and position_ids are given on some ranks only, {told} (a rank each): "
            "each rank must pass its part of the same arguments"
        )
    own: dict[str, Any] = {}
    padding: Tensor | None = None
    if has_mask and isinstance(mask, Tensor):
        whole = _whole(mask, lens, group).bool()
        own["attention_mask"] = _part(mask, lens, scope.attention.rank)
        padding = None if bool(whole.all()) else whole
    if has_positions and isinstance(positions, Tensor):
        own["position_ids"] = _part(positions, lens, scope.attention.rank)
        if mask is None:  # transformers sees packed documents only then
            return own, packed(lens, _whole(positions, lens, group))
    return own, Facts(lens, padding)


def _whole(tensor: Tensor, lens: tuple[int, ...], group: Any) -> Tensor:
    """[B, S] of this rank's part, or as it is."""
    if tensor.shape[1] == sum(lens):
        return tensor
    return gather_sequence_slice_grads(tensor, group, seq_lens=lens)


def _part(tensor: Tensor, lens: tuple[int, ...], rank: int) -> Tensor:
    if tensor.shape[1] != sum(lens):
        return tensor
    return tensor.narrow(1, sum(lens[:rank]), lens[rank])


def packed(lens: tuple[int, ...], positions: Tensor) -> Facts:
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
        names = calls_in(type(part).forward, depth=0)
        if "create_position_ids_from_input_ids" in names or (
            facts.padding is not None and "cumsum" in names and "position_ids" in names
        ):
            raise ValueError(
                f"{type(part).__name__} makes its positions from padding, not by counting tokens: "
                "pass position_ids of the whole sequence, this rank's part"
            )
