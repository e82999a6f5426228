"""A KV cache for transformers' models whose sequence is sharded, and `generate()` with it.

The prompt is cut over the ranks and each keeps its own rows of keys and values. Later tokens are
whole on every rank, which all compute the same.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from ulysses.cache import KVCache
from ulysses.wrap_lengths import tell
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Wrapping

_NAMES = ("cache", "past_key_values")  # of forward's argument, by transformers' version
_MAKES_CACHE = "_prepare_cache_for_generation"  # called by generate before any forward
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class ShardedCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """transformers' cache, of which every layer is a `KVCache`.

    `prompt_lens` are all ranks' parts of it, set before its forward. `update` gives back the
    rows that it was given; what came before new tokens is seen by those of `take_updated()` alone.
    """

    def __init__(self, wrapping: Wrapping) -> None:
        attention = wrapping.attention
        new_rows = functools.partial(KVCache, attention.group, backend=attention.backend)
        super().__init__(layer_class_to_replicate=functools.partial(_Layer, new_rows))
        self.prompt_lens: tuple[int, ...] | None = None
        self._updated: KVCache | None = None

    @property
    def lens(self) -> tuple[int, ...]:
        """How many tokens' rows each rank keeps."""
        kept: tuple[int, ...] = self.layers[0].rows.lens if self.layers else ()
        return kept

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank, room for more included."""
        return sum(layer.rows.nbytes for layer in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[B, Hkv, l, D] of a layer: kept if they are the prompt's, and given back."""
        continues = layer_idx < len(self.layers) and self.layers[layer_idx].get_seq_length() > 0
        super().update(key_states, value_states, layer_idx, self.prompt_lens)
        self._updated = self.layers[layer_idx].rows if continues else None
        return key_states, value_states

    def take_updated(self, site: str) -> KVCache:
        """The rows of the layer that was updated last, once, for the attention that follows."""
        rows, self._updated = self._updated, None
        if rows is None:
            raise RuntimeError(
                f"{site} attends new tokens to keys that it has not put into the KV cache, as "
                "layers do that share another's: pass use_cache=False"
            )
        return rows

    def reorder_cache(self, *_: Any) -> None:
        _refuse("reorder_cache, as beam search does")

    def crop(self, *_: Any) -> None:
        _refuse("crop, as assisted generation does")

    def batch_repeat_interleave(self, *_: Any) -> None:
        _refuse("batch_repeat_interleave")

    def batch_select_indices(self, *_: Any) -> None:
        _refuse("batch_select_indices")


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's rows, as transformers asks for them."""

    def __init__(self, new_rows: Callable[[], KVCache]) -> None:
        super().__init__()
        self._new_rows = new_rows
        self.rows = new_rows()

    def update(
        self, key_states: Tensor, value_states: Tensor, lens: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor]:
        if not self.rows.length:
            self.rows.prefill(
                key_states.transpose(1, 2), value_states.transpose(1, 2), seq_lens=lens
            )
        return key_states, value_states

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing is there before the first rows."""

    def get_mask_sizes(self, new: Any) -> tuple[int, int]:
        """Keys with the new ones, and where they begin; 4.x counts the new ones by their places."""
        return self.rows.length + (len(new) if isinstance(new, Tensor) else new), 0

    def get_seq_length(self) -> int:
        return self.rows.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def reset(self) -> None:
        self.rows = self._new_rows()


def continues(inputs: Any) -> bool:
    """Whether a forward's arguments hold a sharded cache of what came before."""
    caches = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, ShardedCache))
    return any(cache.get_seq_length() for cache in caches)


def take_cache(wrapping: Wrapping, model: PreTrainedModel, given: dict[str, Any]) -> Any:
    """The cache that a forward is to use, taken out of its arguments, or None.

    One is made where it is asked for by `use_cache=True`: a model's own default does not count.
    Raises ValueError for what is no sharded one, and for models that could not use it.
    """
    caches = [given.pop(name) for name in _NAMES if name in given]
    if not caches and not given.pop("use_cache", None):
        return None
    cache = caches[0] if caches else ShardedCache(wrapping)
    if not isinstance(cache, ShardedCache):
        raise ValueError(
            f"{type(model).__name__} was given a {type(cache).__name__}, which would hold this "
            "rank's rows as if they were all: leave it out and pass use_cache=True, which makes a "
            "sharded one"
        )
    _require_cacheable(wrapping, model)
    return cache


def cache_argument(cache: ShardedCache, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The cache by the name that a forward has for it."""
    name = next(name for name in _NAMES if name in parameters)
    return {name: cache, "use_cache": True}


def _require_cacheable(wrapping: Wrapping, model: PreTrainedModel) -> None:
    """Refuses models in which something attends that would not see the cache's other rows."""
    apart = [
        f"{site.name} ({site.kind})"
        for site in wrapping.sites.values()
        if site.route != "transformers" or site.policy is not Policy.EXCHANGED
    ]
    if apart:
        raise ValueError(
            f"{type(model).__name__} with a KV cache, but {', '.join(apart)} attends otherwise "
            "than by transformers' attention interface: pass use_cache=False"
        )
    if chunk := getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise ValueError(
            f"{type(model).__name__} attends in chunks of {chunk} keys, which a sharded KV cache "
            "has not: pass use_cache=False"
        )


def take_generation(module: nn.Module, wrapping: Wrapping) -> None:
    """Makes `generate` of the parts that have one use a sharded cache."""
    for part in module.modules():
        if isinstance(part, GenerationMixin):
            setattr(part, _MAKES_CACHE, MethodType(_making_sharded(type(part), wrapping), part))


def give_generation_back(module: nn.Module) -> None:
    for part in module.modules():
        vars(part).pop(_MAKES_CACHE, None)


def _making_sharded(kind: type, wrapping: Wrapping) -> Callable[..., None]:
    inner = getattr(kind, _MAKES_CACHE)

    @functools.wraps(inner)  # of this name, it pickles as the class's own
    def make_cache(
        self: Any, config: Any, model_kwargs: dict[str, Any], mode: GenerationMode, *sizes: int
    ) -> None:
        if not (wrapping.cuts_inputs and getattr(self.forward, "ulysses_root", False)):
            raise ValueError(
                f"generate() of {type(self).__name__}, which is wrapped and given this rank's part "
                "of each sequence: ulysses.parallelize(model, mesh) takes whole prompts"
            )
        if mode is GenerationMode.SAMPLE:
            _require_same_draws(wrapping, self.device)
        if config.use_cache is False:
            inner(self, config, model_kwargs, mode, *sizes)
            return
        if mode not in _MODES:
            _refuse(f"{mode.value.replace('_', ' ')}, which changes or reorders what was kept,")
        if config.cache_implementation not in (None, "dynamic"):
            _refuse(f"cache_implementation={config.cache_implementation!r}")
        cache = take_cache(wrapping, self, {**model_kwargs, "use_cache": True})
        model_kwargs |= cache_argument(cache, inspect.signature(self.forward).parameters)

    return make_cache


def _refuse(what: str) -> None:
    raise ValueError(
        f"{what} is not supported with a KV cache of a sharded sequence: generate greedily or by "
        "sampling, or pass use_cache=False"
    )


def _require_same_draws(wrapping: Wrapping, device: torch.device) -> None:
    """Ranks that draw other tokens would each go on with a text of their own."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.blake2b(bytes(torch.cat(states).tolist()), digest_size=7).digest()
    told = tell([int.from_bytes(digest, "big")], wrapping.attention.group, device)
    if any(each != told[0] for each in told):
        raise ValueError(
            "do_sample=True, and the ranks' random numbers differ, so each would draw other "
            "tokens: call torch.manual_seed with the same seed on every rank before generate()"
        )
