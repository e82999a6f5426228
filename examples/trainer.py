"""transformers' Trainer on texts that sp ranks share: two methods of it are told what dp is.

    torchrun --nproc-per-node 4 examples/trainer.py --sp 2

The model is given whole texts and shards them itself, so Trainer's collator, arguments, schedule,
clipping and checkpoints stay as they are. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler

import ulysses


class Trainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """A Trainer of a model under `ulysses.parallelize`, over dp x sp ranks; tp is 1."""

    def __init__(self, model: Any, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(ulysses.parallelize(model, mesh), **options)
        self.mesh = mesh

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Samples are shared out over dp: every sp rank gets the same ones, whole."""
        options = {"num_replicas": self.mesh["dp"].size(), "rank": self.mesh["dp"].get_local_rank()}
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=DistributedSampler(self.train_dataset, **options, seed=self.args.seed),
            collate_fn=self.data_collator,
            drop_last=self.args.dataloader_drop_last,
        )

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean over all tokens of a step, on every rank; Trainer counted them on each of sp."""
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch / self.mesh["sp"].size()}
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sp", type=int, default=1, help="ranks that share each text; dp is what is left")
    add("--epochs", type=int, default=3)
    add("--length", type=int, default=61, help="tokens of a sample")
    add("--samples", type=int, default=4, help="of an epoch, over all dp ranks")
    add("--accumulate", type=int, default=1, help="micro-batches of a step; an epoch is one step")
    add("--lr", type=float, default=1e-2)
    add("--device", choices=("cpu", "npu", "cuda"), help="default: the first that there is")
    add("--out", default="runs/trainer")
    return parser.parse_args(words)


def load_model() -> Any:
    """A small random Llama of bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def dataset(arguments: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Texts of which each sample has a loss on another number of tokens."""
    text = "\n".join(topics.values()).encode()
    samples = []
    for number in range(arguments.samples):
        ids = torch.tensor(list(text[number * arguments.length :][: arguments.length]))
        labels = ids.clone()
        labels[: 7 * number] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def settings(arguments: argparse.Namespace, dp: int) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=arguments.out,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.samples // (dp * arguments.accumulate),
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=arguments.device == "cpu",
        dataloader_pin_memory=arguments.device != "cpu",
        disable_tqdm=dist.is_initialized() and dist.get_rank() > 0,
    )


def main() -> None:
    arguments = parsed()
    mesh = ulysses.init_mesh(sp=arguments.sp, device_type=arguments.device)
    options = {"args": settings(arguments, mesh["dp"].size()), "train_dataset": dataset(arguments)}
    Trainer(load_model(), mesh, **options).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
