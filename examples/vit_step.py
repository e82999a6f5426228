"""Train a ViT classifier whose patches are spread over sp ranks: the model and its call unchanged.

    torchrun --nproc-per-node 4 examples/vit_step.py --sp 2 --steps 10

Images are drawn: a square is bright, and its place is the class. 197 tokens of a ViT-B/16 (or 17
with `--tiny`) go over any number of ranks. Needs transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ulysses

TINY = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--sp", type=int, default=1, help="ranks that share each image; dp is what is left")
    add("--steps", type=int, default=5)
    add("--global-batch", type=int, default=8, help="images of a step, over all dp ranks")
    add("--lr", type=float, default=1e-3)
    add("--bf16", action="store_true", help="compute in bfloat16, as NPU kernels need")
    add("--tiny", action="store_true", help="a small model of 32 x 32 images")
    add("--device", choices=("cpu", "npu", "cuda"), help="default: the first that there is")
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mesh = ulysses.init_mesh(sp=arguments.sp, device_type=arguments.device)
    losses = train(arguments, mesh)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at the last")
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, mesh: DeviceMesh) -> list[float]:
    """The whole batch's loss at each step, equal on all ranks."""
    group = ulysses.gradient_mesh(mesh)
    model: Any = load_model(arguments, mesh.device_type)
    model = DistributedDataParallel(
        ulysses.parallelize(model, mesh), process_group=group.get_group()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    count = arguments.steps * arguments.global_batch
    loader = ulysses.data_loader(
        dataset(arguments, count), mesh, batch_size=arguments.global_batch // mesh["dp"].size()
    )
    shown, losses = dist.get_rank() == 0, []
    for batch in track(
        islice(loader, arguments.steps),
        total=arguments.steps,
        console=Console(stderr=True),
        disable=not shown,
    ):
        images, classes = (batch[name].to(mesh.device_type) for name in ("images", "classes"))
        with torch.autocast(group.device_type, torch.bfloat16, enabled=arguments.bf16):
            logits = model(pixel_values=images).logits
        # Whole and equal on the ranks of an image: the mean over ranks is the loss as it stands.
        loss = cross_entropy(logits.float(), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(ulysses.mean_over_ranks(loss, group)))
    return losses


def load_model(arguments: argparse.Namespace, device_type: str) -> Any:
    """A ViT with random weights, for four classes."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(**(TINY if arguments.tiny else {}), num_labels=4)
    return ViTForImageClassification(config).to(device_type).train()


def dataset(arguments: argparse.Namespace, number: int) -> list[dict[str, Tensor]]:
    """Noise with one bright quarter; its place is the class."""
    size = TINY["image_size"] if arguments.tiny else 224
    draws = torch.Generator().manual_seed(0)
    samples = []
    for place in torch.randint(4, (number,), generator=draws):
        image = torch.randn(3, size, size, generator=draws)
        top, left = (int(step) * size // 2 for step in (place // 2, place % 2))
        image[:, top : top + size // 2, left : left + size // 2] += 3.0
        samples.append({"images": image, "classes": place})
    return samples


if __name__ == "__main__":
    main()
