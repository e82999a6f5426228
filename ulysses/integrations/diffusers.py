"""diffusers' models: sharded by their own context-parallel plan, at their attention dispatch.

A model's `_cp_plan` says which tensors are cut along the sequence and which are gathered; so it
says what the model takes to be right on a shard. Lengths need not divide here. Attention is taken
over where the dispatch reaches torch's scaled_dot_product_attention, by its "native" backend.
Cross-attention finds the text whole, and is not exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from ulysses.sharding_plan import Cut, PartPlan, ShardingPlan

# Those whose plan has been followed and verified. Others' may cut a text to which cross-attention
# attends, or count rows of the shard inside of an attention processor.
_VERIFIED = (
    "ChronoEditTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
)
# What the plan does not shard, or what counts rows of the shard.
_REFUSED = ("controlnet_block_samples", "controlnet_single_block_samples", "kv_cache_mode")


def sharding_plan(model: nn.Module) -> ShardingPlan | None:
    """A model's own plan, or None. Raises ValueError for what can't be right with it."""
    if not isinstance(model, ModelMixin) or not getattr(model, "_cp_plan", None):
        return None
    if type(model).__name__ not in _VERIFIED:
        raise ValueError(
            f"{type(model).__name__} has a plan for context parallelism that has not been verified "
            f"with ulysses, as have {', '.join(_VERIFIED)}: name its list of layers in region=..., "
            "and in local=[...] the attention that finds its keys whole, as of text"
        )
    _require_native(model)
    parts: dict[str, PartPlan] = {}
    for pattern, steps in model._cp_plan.items():
        for name in _matching(model, pattern):
            _add(parts.setdefault(name, PartPlan()), steps)
    cross = [name for name, part in model.named_modules() if _is_cross_attention(part)]
    return ShardingPlan(parts, cross, _require_shardable)


def _require_shardable(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raises ValueError if a forward with these arguments can't be right on a shard."""
    name = type(model).__name__
    if refused := [key for key in _REFUSED if given.get(key) is not None]:
        raise ValueError(
            f"{name} was given {' and '.join(refused)}, of which its plan for context parallelism "
            "says nothing: leave that out, or ulysses.unwrap the model"
        )
    if getattr(model, "is_cache_enabled", False):
        raise ValueError(
            f"{name} has a cache of diffusers', which decides by what this rank sees which layers "
            "are run, and ranks would part: disable_cache() it"
        )


def _require_native(model: Any) -> None:
    if getattr(model, "_parallel_config", None) and model._parallel_config.context_parallel_config:
        raise ValueError(
            f"{type(model).__name__} has diffusers' own context parallelism: make it without, and "
            "leave the sequence to ulysses"
        )
    active, _ = _AttentionBackendRegistry.get_active_backend()  # where a processor has none
    for name, part in model.named_modules():
        processor = getattr(part, "processor", None)
        backend = getattr(processor, "_attention_backend", None) or active
        if processor is not None and backend != AttentionBackendName.NATIVE:
            raise ValueError(
                f"{name} attends by diffusers' backend {str(backend.value)!r}: call "
                'model.set_attention_backend("native"), and choose the kernel by '
                "ulysses.parallelize(..., backend=...)"
            )


def _matching(model: nn.Module, pattern: str) -> list[str]:
    """The parts that a name of the plan means, which may hold one * for all layers of a list."""
    head, star, tail = pattern.partition(".*")
    if not star:
        return [pattern]
    layers = model.get_submodule(head)
    return [f"{head}.{name}{tail}" for name, _ in layers.named_children()]


def _add(part: PartPlan, steps: Any) -> None:
    if not isinstance(steps, dict):
        outputs = [steps] if isinstance(steps, ContextParallelOutput) else steps
        part.gathered = tuple(_gathering(step) for step in outputs)
        return
    for name, step in steps.items():
        if isinstance(name, int):
            part.outputs[name] = _cut(step)
        else:
            part.inputs[name] = tuple(_cuts(step))


def _cuts(steps: Any) -> Iterable[Cut]:
    return [_cut(steps)] if isinstance(steps, ContextParallelInput) else map(_cut, steps)


def _cut(step: Any) -> Cut:
    return Cut(step.split_dim, step.expected_dims)


def _gathering(step: Any) -> Cut | None:
    return None if step is None else Cut(step.gather_dim, step.expected_dims)


def _is_cross_attention(part: nn.Module) -> bool:
    return hasattr(part, "processor") and bool(getattr(part, "is_cross_attention", False))
