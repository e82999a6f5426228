"""Denoise a video with a transformer in the shape of Wan2.2-T2V-A14B, with random weights.

    ulysses launch --config configs/wan2.2_t2v_a14b.yaml examples/denoise.py --layers 4
    ulysses launch --config configs/wan_tiny.yaml examples/denoise.py --latents 3,6,6 --compare

The first is for 8 NPUs: tp=2 leaves 20 of the 40 heads, sp=4 gives 5 of them to each rank. With
`cfg: 2` in the configuration the guided and the unguided branch run on ranks of their own. Two
steps without guidance come first, as schedules that warm up have them. `--compare` runs the same
in one process, and ends with an error if the result is another. Needs diffusers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ulysses
from ulysses.config import Config, ModelConfig
from ulysses.launch import current_config, current_degrees

SHIFT = 5.0  # of the schedule, towards noise, as Wan's for 720p
TOLERANCE = {"bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-4, "float64": 1e-6}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=10)
    add("--warm-up", type=int, default=2, metavar="N", help="first steps, without guidance")
    add("--guidance", type=float, default=4.0, help="how far from the branch without text")
    add("--latents", default="21,60,80", metavar="F,H,W", help="frames, height and width")
    add("--layers", type=int, help="fewer than the configuration has")
    add("--compare", action="store_true", help="with the same in one process")
    return parser.parse_args(words)


def main() -> None:
    arguments, config = parsed(), current_config()
    mesh = ulysses.init_mesh(**asdict(current_degrees()))
    latents = denoised(arguments, config, mesh)
    if dist.get_rank() == 0:
        print(f"latents {tuple(latents.shape)}, standard deviation {float(latents.std()):.3f}")
    if arguments.compare:
        compare(arguments, config, latents)
    dist.destroy_process_group()


def compare(arguments: argparse.Namespace, config: Config, latents: Tensor) -> None:
    """Raises ArithmeticError on a rank whose latents are not those of one process."""
    expected = denoised_in_one_process(arguments, config, latents.device.type)
    difference = float((latents - expected).abs().max() / expected.abs().max())
    if dist.get_rank() == 0:
        print(f"largest difference from one process: {difference:.1e} of the largest latent")
    assert config.model is not None, "a model was made of it"
    if not difference <= TOLERANCE[config.model.dtype]:
        raise ArithmeticError(f"ranks and one process differ by {difference:.1e}")


def denoised(arguments: argparse.Namespace, config: Config, mesh: DeviceMesh) -> Tensor:
    """The latents [1, C, F, H, W] after all steps, equal on all ranks of a sample."""
    transformer = split_over_ranks(made(arguments, config, mesh.device_type), mesh["tp"])
    attention = config.attention
    ulysses.parallelize(transformer, mesh, backend=attention.backend, grid=attention.grid)

    def run(branches: list[dict[str, Any]]) -> list[Tensor]:
        return ulysses.run_branches(lambda **branch: transformer(**branch)[0], branches, mesh)

    return steps(arguments, config, mesh.device_type, run, shown=dist.get_rank() == 0)


def denoised_in_one_process(
    arguments: argparse.Namespace, config: Config, device_type: str
) -> Tensor:
    """The same by diffusers' model alone."""
    transformer = made(arguments, config, device_type)

    def run(branches: list[dict[str, Any]]) -> list[Tensor]:
        return [transformer(**branch)[0] for branch in branches]

    return steps(arguments, config, device_type, run, shown=False)


@torch.no_grad()
def steps(
    arguments: argparse.Namespace,
    config: Config,
    device_type: str,
    run: Callable[[list[dict[str, Any]]], list[Tensor]],
    *,
    shown: bool,
) -> Tensor:
    """The loop: `run` gives the transformer's output for each branch, with text or without."""
    model = model_of(config)
    draws = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).to(device_type, getattr(torch, model.dtype))

    latents = draw(1, 16, *map(int, arguments.latents.split(","))).float()
    text, no_text = draw(1, 512, 4096), draw(1, 512, 4096)
    sigmas = torch.linspace(1, 0, arguments.steps + 1)
    sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
    for step in track(range(arguments.steps), console=Console(stderr=True), disable=not shown):
        given = {
            "hidden_states": latents.to(text.dtype),
            "timestep": (1000 * sigmas[step : step + 1]).to(device_type),
        }
        branches = [given | {"encoder_hidden_states": states} for states in (text, no_text)]
        found = run(branches if step >= arguments.warm_up else branches[:1])
        velocity = found[-1] + arguments.guidance * (found[0] - found[-1])
        latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity.float()
    return latents


def made(arguments: argparse.Namespace, config: Config, device_type: str) -> Any:
    """diffusers' Wan in the shape of the configuration, the same weights on every rank."""
    from diffusers import WanTransformer3DModel

    model = model_of(config)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, model.dtype))
    try:
        with torch.device(device_type):
            transformer = WanTransformer3DModel(
                num_attention_heads=model.num_heads,
                attention_head_dim=model.head_dim,
                num_layers=arguments.layers or model.num_layers,
                ffn_dim=27 * model.num_heads * model.head_dim // 10,
            )
    finally:
        torch.set_default_dtype(default)
    return transformer.eval()


def split_over_ranks(model: Any, mesh: DeviceMesh) -> Any:
    """Tensor parallelism: its heads and its part of the feed-forward on each rank of `mesh`.

    diffusers has no plan of Wan's for it. The weights must be equal on all ranks. Raises ValueError
    if the ranks can't share the heads.
    """
    num_ranks = mesh.size()
    if model.config.num_attention_heads % num_ranks:
        raise ValueError(
            f"{model.config.num_attention_heads} heads on tp={num_ranks}: each rank must hold "
            "whole heads, so use a tp that divides them"
        )
    plan = {"ffn.net.0.proj": ColwiseParallel(), "ffn.net.2": RowwiseParallel()}
    for name in ("attn1", "attn2"):
        plan |= {f"{name}.to_{projection}": ColwiseParallel() for projection in "qkv"}
        plan[f"{name}.to_out.0"] = RowwiseParallel()
    for block in model.blocks if num_ranks > 1 else ():
        parallelize_module(block, mesh, plan, src_data_rank=None)
        for attention in (block.attn1, block.attn2):
            attention.norm_q = NormOverRanks(attention.norm_q, mesh)
            attention.norm_k = NormOverRanks(attention.norm_k, mesh)
            attention.heads //= num_ranks
    return model


class NormOverRanks(nn.Module):
    """Wan's norm of queries and keys, which runs over the heads of all ranks: [.., dim / tp].

    Each rank has its heads' part of the weight, and the mean square is that of all ranks.
    """

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        assert norm.weight is not None, "Wan's norms have weights"
        weight = distribute_tensor(norm.weight, mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(weight)
        self.eps, self.size, self.group = norm.eps, norm.normalized_shape[0], mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        squares = _sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group)
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        return (normed * self.weight.to_local()).type_as(x)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors; its transpose is the same sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grad, ctx.group), None


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = _SumOverRanks.apply(tensor, group)
    return total


def model_of(config: Config) -> ModelConfig:
    if config.model is None:
        raise ValueError("the configuration has no model: give num_heads, head_dim, num_layers")
    return config.model


if __name__ == "__main__":
    main()
