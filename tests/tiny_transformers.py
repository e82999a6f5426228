"""Small random models of transformers, one of each kind that attends in its own way."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SplinterConfig,
    SplinterModel,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 40
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str) -> Any:
    """The model, with the same weights on every rank, in evaluation mode."""
    options = dict(_COMMON)
    if kind == "llama":
        model_type, config = LlamaForCausalLM, LlamaConfig(**options)
    elif kind == "wide llama":
        options |= {"num_attention_heads": 8, "num_key_value_heads": 4}
        options["tie_word_embeddings"] = False  # a plan cuts the two apart
        model_type, config = LlamaForCausalLM, LlamaConfig(**options)
    elif kind == "qwen3":
        model_type, config = Qwen3ForCausalLM, Qwen3Config(**options)
    elif kind == "mistral":
        model_type, config = MistralForCausalLM, MistralConfig(**options, sliding_window=3)
    elif kind == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        options |= {"layer_types": kinds, "sliding_window": 3, "query_pre_attn_scalar": 4}
        model_type, config = Gemma3ForCausalLM, Gemma3TextConfig(**options)
    elif kind == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"]
        options |= {"layer_types": kinds, "sliding_window": 4}
        options |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        model_type, config = GptOssForCausalLM, GptOssConfig(**options)
    elif kind == "bert":
        model_type, config = BertForMaskedLM, BertConfig(**_encoder())
    elif kind == "bert decoder":
        model_type, config = BertLMHeadModel, BertConfig(**_encoder(), is_decoder=True)
    elif kind == "albert":
        model_type, config = AlbertForMaskedLM, AlbertConfig(**_encoder(), embedding_size=8)
    elif kind == "splinter":
        model_type, config = SplinterModel, SplinterConfig(**_encoder())
    else:
        raise ValueError(kind)
    torch.manual_seed(1)
    # Its experts have a kernel for float32 and less.
    dtype = torch.float32 if kind == "gpt_oss" else torch.float64
    model = model_type(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # small initial weights would hide what a mask does
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _encoder() -> dict[str, Any]:
    return {k: v for k, v in _COMMON.items() if k not in ("num_key_value_heads", "head_dim")}


def ids(length: int, batch: int = 2) -> Tensor:
    """Tokens [batch, length], none of them a special one."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def vision(seed: int = 1) -> Any:
    """A ViT classifier of 4 x 4 patches and a class token: 17 tokens; float64."""
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=20,
        image_size=8,
        patch_size=2,
        num_labels=5,
    )
    torch.manual_seed(seed)
    return ViTForImageClassification(config).double().eval()


def pooled(kind: str) -> Any:
    """A classifier, BERT or DistilBERT, which looks at the first token alone; float64."""
    torch.manual_seed(1)
    if kind == "bert":
        config = BertConfig(**_encoder(), num_labels=5)
        return BertForSequenceClassification(config).double().eval()
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=24, hidden_dim=20, n_layers=2, n_heads=6, num_labels=5
    )
    return DistilBertForSequenceClassification(config).double().eval()
