"""Which loss a transformers model makes of its labels, and the targets of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ulysses.sequence import shift_labels

_SHIFTED = ("ForCausalLM", "ForConditionalGeneration")
_BY_TOKEN = (*_SHIFTED, "ForMaskedLM", "ForTokenClassification")


def shards_inputs(module: nn.Module) -> bool:
    """True for text models that are told positions and whose outputs are all by token."""
    if not isinstance(module, PreTrainedModel) or module.main_input_name != "input_ids":
        return False
    kind = module.loss_type
    pools = any("Pooler" in type(part).__name__ for part in module.modules())
    return kind in _BY_TOKEN if kind is not None else not pools


def take_targets(module: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Whole targets [B, S], shifted where the model's loss shifts; `given` loses the labels.

    Raises ValueError for a loss that is not a mean over tokens.
    """
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    if (labels is None and shifted is None) or not isinstance(module, PreTrainedModel):
        return None
    kind = module.loss_type or "ForCausalLM"
    if kind not in _BY_TOKEN:
        raise ValueError(
            f"{type(module).__name__} makes a loss of kind {kind}, which is no mean over tokens: "
            "use ulysses.parallelize(model, mesh, region=...), behind which all is whole"
        )
    cut = isinstance(kept := given.get("logits_to_keep", 0), Tensor) or kept > 0
    if given.get("output_router_logits") or given.get("return_dict") is False or cut:
        raise ValueError(
            "labels with output_router_logits=True, return_dict=False or logits_to_keep: the loss "
            "of sharded logits is made outside of the model, of all of them, without router "
            "losses, and returned by name"
        )
    if shifted is not None:
        return shifted if isinstance(shifted, Tensor) else None
    return shift_labels(labels) if kind in _SHIFTED else labels
