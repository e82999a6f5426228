"""Layers that mix tokens otherwise than by attention, which a shard alone would get wrong."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_TYPES: dict[tuple[type, ...], str] = {
    (nn.RNNBase,): "a recurrent layer, whose state would start anew on each rank",
    (nn.modules.batchnorm._BatchNorm,): "statistics of a batch, of this rank's tokens only",
    (nn.modules.instancenorm._InstanceNorm, nn.GroupNorm): (
        "statistics along the sequence, of this rank's tokens only"
    ),
    (
        nn.modules.pooling._AvgPoolNd,
        nn.modules.pooling._MaxPoolNd,
        nn.modules.pooling._AdaptiveAvgPoolNd,
        nn.modules.pooling._AdaptiveMaxPoolNd,
        nn.modules.pooling._LPPoolNd,
    ): "pooling, which would end at the shard's border",
}
_NAMES = re.compile(
    r"Mamba|R[Ww][Kk][Vv]|SSM|StateSpace|Hyena|Retention|DeltaNet|Linear_?Att|GatedLinear|Recurrent"
    r"|RG_?LRU|ShortConv|CausalConv"
)
# Of `layer_types` in a model's own configuration; sparse kinds pick tokens by what they see.
_LAYER_TYPES = re.compile(
    r"linear|conv|hybrid|recurrent|mamba|ssm|compressed|sparse|indexed", re.IGNORECASE
)


def mixers(module: nn.Module, handled: Collection[str | type]) -> list[str]:
    """One line for each layer that mixes tokens and is not among `handled`: name and reason.

    `handled` holds names of modules, names of classes, or classes.
    """
    lines = []
    for name, part in module.named_modules():
        reason = _reason(part)
        if reason and not is_named(name, part, handled):
            lines.append(f"{name or 'the module itself'} ({type(part).__name__}): {reason}")
    return lines


def is_named(name: str, module: nn.Module, among: Collection[str | type]) -> bool:
    """Whether a list of names, class names and classes holds this module."""
    kind = type(module)
    return any(
        isinstance(module, entry) if isinstance(entry, type) else entry in (name, kind.__name__)
        for entry in among
    )


def _reason(module: nn.Module) -> str | None:
    if isinstance(module, _CONVOLUTIONS):
        return _of_convolution(module)
    for kinds, reason in _TYPES.items():
        if isinstance(module, kinds):
            return reason
    if _NAMES.search(type(module).__name__):
        return "by its name a layer with a state along the sequence"
    listed = layer_types(getattr(module, "config", None))
    if strange := sorted({kind for kind in listed if _LAYER_TYPES.search(kind)}):
        return f"its configuration lists layers of type {', '.join(strange)}"
    return None


def layer_types(config: Any) -> list[str]:
    """A model configuration's own list of what its layers are, if it has one."""
    listed = getattr(config, "layer_types", None)
    return [str(kind) for kind in listed] if isinstance(listed, (list, tuple)) else []


def _of_convolution(module: Any) -> str | None:
    """None for one that sees each position, or each patch, alone."""
    sees_one = all(size == 1 for size in module.kernel_size)
    cuts_patches = (
        module.kernel_size == module.stride
        and not any(module.padding if isinstance(module.padding, tuple) else [module.padding])
        and all(step == 1 for step in module.dilation)
    )
    if sees_one or cuts_patches:
        return None
    return f"a convolution over {module.kernel_size}, which would end at the shard's border"
