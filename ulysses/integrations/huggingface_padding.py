"""Encoders that make a dense mask of padding themselves, as transformers 4 has them.

In transformers 5 they go through the mask interface, which decoders do in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ulysses.integrations.huggingface_masks import Facts
from ulysses.wrap_code import names_in

_BY_KEY = "get_extended_attention_mask"  # of [B, S] or [B, 1, S]: one row for all queries
_BY_ROW = {"_prepare_4d_attention_mask", "_prepare_4d_attention_mask_for_sdpa"}  # of [B, S]
_INTERFACE = {"create_causal_mask", "create_bidirectional_mask"}


def expands_padding(model: PreTrainedModel) -> bool:
    """Whether a model makes its mask of `attention_mask` itself, not by the mask interface."""
    names = _names(model)
    return not names.isdisjoint({_BY_KEY, *_BY_ROW}) and names.isdisjoint(_INTERFACE)


def of_all_keys(model: PreTrainedModel, facts: Facts, given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the whole sequence's padding: what the model makes of it is for all keys.

    Raises ValueError for a decoder, whose causal mask would be of this rank's places.
    """
    mask, tokens = given.get("attention_mask"), given.get("input_ids", given.get("inputs_embeds"))
    if facts.lens is None or tokens is None:
        return given
    if getattr(model.config, "is_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is a decoder that makes its causal mask itself, of this "
            "rank's places: use transformers 5, where it goes through the mask interface"
        )
    if isinstance(mask, Tensor) and mask.ndim != 2:
        return given
    if facts.padding is None:
        ones = torch.ones(tokens.shape[0], sum(facts.lens), device=tokens.device)
        return given | {"attention_mask": ones}
    by_key = _BY_KEY in _names(model)
    return given | {"attention_mask": facts.padding[:, None] if by_key else facts.padding}


def _names(model: PreTrainedModel) -> frozenset[str]:
    return names_in(type(model), depth=1)
