"""transformers' models: taken over at its attention and mask interfaces.

There GQA and the mask's meaning still exist, where before scaled_dot_product_attention keys are
expanded to all query heads and a mask is a dense tensor of the local length. A wrapped model has a
configuration of its own that names the attention implementation "ulysses"; the configuration that
other models may share is not changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from ulysses.integrations.huggingface_cache import continues as continues
from ulysses.integrations.huggingface_cache import give_generation_back, take_generation
from ulysses.integrations.huggingface_inputs import FACTS, prepared
from ulysses.integrations.huggingface_inputs import take_rows as take_rows
from ulysses.integrations.huggingface_labels import shards_inputs as shards_inputs
from ulysses.integrations.huggingface_labels import take_targets as take_targets
from ulysses.integrations.huggingface_masks import Facts, Visible, read
from ulysses.integrations.huggingface_padding import expands_padding, of_all_keys
from ulysses.wrap_open import current_scope, opened
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope, Wrapping
from ulysses.wrap_sites import SDPA

NAME = "ulysses"


class _Implementation(str):
    """NAME, and what it stands in for; pickled it is the latter, since groups can't travel."""

    original: str | None

    def __new__(cls, original: str | None) -> _Implementation:
        made = super().__new__(cls, NAME)
        made.original = original
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Implementation:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self.original,)) if self.original is not None else (type(None), ())


def take_over(module: nn.Module, wrapping: Wrapping) -> None:
    """Gives the module configurations of its own, whose attention implementation is "ulysses"."""
    taken, left = _configurations(module, wrapping)
    both = [name for key, name in left.items() if key in taken]
    if both:
        raise ValueError(
            f"local=[...] holds {', '.join(both)}, whose configuration other attention shares that "
            "is to be exchanged: give it a copy of the configuration"
        )
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, PretrainedConfig):
                setattr(part, name, copy.deepcopy(value, memo))
    for key in taken:
        own = memo[key]
        own._attn_implementation_internal = _Implementation(own._attn_implementation)
    take_generation(module, wrapping)


def give_back(module: nn.Module) -> None:
    """The implementations that were replaced."""
    give_generation_back(module)
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, PretrainedConfig):
                replaced = value._attn_implementation
                if isinstance(replaced, _Implementation):
                    value._attn_implementation_internal = replaced.original


def _configurations(module: nn.Module, wrapping: Wrapping) -> tuple[dict[int, str], dict[int, str]]:
    """Configurations by id, with a site's name: of attention to exchange, and to leave alone."""
    taken: dict[int, str] = {}
    left: dict[int, str] = {}
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    own_masks = any(map(expands_padding, models))
    for name, site in wrapping.sites.items():
        if own_masks and site.route == SDPA:
            continue  # some of them make a mask for scaled_dot_product_attention by its name only
        config = getattr(module.get_submodule(name), "config", None)
        if isinstance(config, PretrainedConfig):
            (left if site.policy is Policy.LOCAL else taken).setdefault(id(config), site.name)
    return taken, left


def routed(part: nn.Module, forward: Callable[..., Any], wrapping: Wrapping) -> Callable[..., Any]:
    """A model's forward, told the positions and masks of the whole sequence."""
    if not isinstance(part, PreTrainedModel):
        return forward
    signature = inspect.signature(forward)
    expands = expands_padding(part)

    @functools.wraps(forward)
    def with_facts(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with opened(wrapping) as scope:
            told = FACTS in scope.notes  # by the model around this one
            if told and not expands:
                return forward(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            given = dict(bound.arguments)
            given.pop("self", None)
            given.update(given.pop("kwargs", {}))
            try:
                if not told:
                    given = prepared(scope, self, signature, given)
                if expands and not scope.takes_whole:
                    given = of_all_keys(self, scope.notes[FACTS], given)
                return forward(self, **given)
            finally:
                if not told:
                    scope.notes.pop(FACTS, None)

    return with_facts


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, H, l, D] to [B, l, H, Dv].

    Ignores what its own function for SDPA ignores: the rest of the keyword arguments are hints for
    other kernels, whose meaning the mask has.
    """
    scope = _scope(type(module).__name__)
    for name, asked in (
        ("softcap", softcap),
        ("position_bias", position_bias),
        ("output_attentions", output_attentions or None),
    ):
        if asked is not None:
            raise ValueError(f"{scope.site} asks for {name}, which ulysses' attention has not")
    q_blhd, k_blhd, v_blhd = (tensor.transpose(1, 2) for tensor in (query, key, value))
    facts: Facts | None = scope.notes.get(FACTS)
    if facts is not None and facts.cache is not None:
        rows = facts.cache.take_updated(scope.site)
        seen = {"attn_mask": attention_mask}
        if isinstance(attention_mask, Visible):
            seen = attention_mask.behind_a_cache()
        options: dict[str, Any] = {**seen, "dropout_p": dropout, "scale": scaling, "sinks": s_aux}
        return scope.attend_cached(rows, q_blhd, k_blhd, v_blhd, **options), None
    attend = functools.partial(
        scope.attend, q_blhd, k_blhd, v_blhd, dropout_p=dropout, scale=scaling, sinks=s_aux
    )
    if isinstance(attention_mask, Visible) and not scope.neutral:
        lens = attention_mask.facts.lens or scope.lengths.of(q_blhd, 1, scope.site)
        return attend(**attention_mask.arguments(lens, scope.attention.rank)), None
    if attention_mask is None or scope.neutral:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        return attend(is_causal=bool(causal)), None
    return attend(attn_mask=attention_mask), None


def _mask(**arguments: Any) -> Visible:
    """transformers' mask function: what is visible, instead of a tensor that says so."""
    scope = _scope("a model")
    return Visible(read(arguments["mask_function"]), scope.notes[FACTS])


def _scope(name: str) -> Scope:
    scope = current_scope()
    if scope is None:
        raise RuntimeError(
            f"{name} attends by ulysses outside of a forward of the module that was wrapped: it "
            "shares its configuration with one; make it with a copy of the configuration"
        )
    return scope


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
