"""torch_npu's fused attention operators on CPU, for runs without torch_npu.

The schemas are those of the real wheels (tests/data/torch_npu_schemas.json); the kernels behind
them reject what the real operators reject, with their texts, and give a wrong answer where those
do. What is not written here raises NotImplementedError rather than guess. With torch_npu itself in
the process only the CPU kernels are added, to its own schemas.

Names in the comments: OP = Ascend/op-plugin, CN = CANN's ops-transformer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.npu_ops.fused_infer import fused_infer_attention_score
from tests.npu_ops.fusion import FusionAttention, fusion_attention, fusion_attention_grad

_RECORD = Path(__file__).parents[1] / "data" / "torch_npu_schemas.json"
SCHEMAS: dict[str, dict[str, str]] = json.loads(_RECORD.read_text())["schemas"]
_INFER, _TRAIN = "npu_fused_infer_attention_score", "npu_fusion_attention"
_GRAD = f"{_TRAIN}_grad"
_libraries: dict[str, torch.library.Library] = {}


def install(namespace: str = "npu", version: str = "2.13.0") -> None:
    """Put a version's operators, with CPU kernels, into torch.ops.<namespace>, once a process."""
    if namespace in _libraries:
        return
    library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    operators = getattr(torch.ops, namespace)
    for name in (_INFER, _TRAIN, _GRAD):
        if not hasattr(operators, name):
            library.define(SCHEMAS[version][name])
    infer, train, grad = (getattr(operators, name).default for name in (_INFER, _TRAIN, _GRAD))
    for operator, kernel in (
        (infer, fused_infer_attention_score),
        (train, fusion_attention),
        (grad, fusion_attention_grad),
    ):
        library.impl(operator, _on_cpu(operator, kernel), "CPU")
    library.impl(infer, _without_formula(infer), "AutogradCPU")
    library.impl(train, _with_formula(train, grad), "AutogradCPU")


def _on_cpu(
    operator: torch._ops.OpOverload, kernel: Callable[[SimpleNamespace], Any]
) -> Callable[..., Any]:
    """The kernel, handed every argument of the schema by name, and invisible to autograd."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = kernel(SimpleNamespace(**_by_name(operator, args, kwargs)))
        return result[: len(operator._schema.returns)]  # the gradient of `sink` came with 2.9

    return run


def _without_formula(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """FIA has no autograd kernel: on a device it warns and gives no gradients; here it raises."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(f"{operator.name()} has no autograd formula")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return run


def _with_formula(
    operator: torch._ops.OpOverload, grad: torch._ops.OpOverload
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        options = _by_name(operator, args, kwargs)
        tensors = (options.pop(name) for name in ("query", "key", "value", "pse"))
        return FusionAttention.apply(*tensors, operator, grad, options)

    return run


def _by_name(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    arguments = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments}
    bound.update(zip((argument.name for argument in arguments), args, strict=False))
    return bound | kwargs
