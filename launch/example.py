"""A worked example: attention of a sharded sequence, compared with attention in one process.

    ulysses launch --config configs/demo.yaml -m ulysses.launch.example

Random tensors in the shape of the configuration's model, at most 256 tokens. A rank holds its shard
of the tokens and the heads that tp leaves it; each dp rank has a sequence of its own.
"""

from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

import ulysses
from ulysses.config import ModelConfig
from ulysses.launch import current_config, current_degrees
from ulysses.tiling import shard_lengths

MODEL = ModelConfig(num_heads=8, num_kv_heads=2, head_dim=64, value_dim=64, dtype="float32")
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-10}


def main() -> None:
    """Prints the largest difference of any rank; raises on every rank if it is too large."""
    config = current_config()
    model = config.model or MODEL
    mesh = ulysses.init_mesh(**asdict(current_degrees()))
    sp = mesh["sp"]

    whole = tensors_of_tp_rank(model, mesh)
    lengths = shard_lengths(whole[0].size(1), sp.size())
    q_blhd, k_blkd, v_blkd = (t.split(lengths, dim=1)[sp.get_local_rank()] for t in whole)
    attention = ulysses.UlyssesAttention(
        sp, backend=config.attention.backend, grid=config.attention.grid
    )
    out_blhd = attention(q_blhd, k_blkd, v_blkd, is_causal=model.is_causal, seq_lens=lengths)

    expected = one_process(*whole, is_causal=model.is_causal).split(lengths, dim=1)
    errors = (out_blhd.cpu() - expected[sp.get_local_rank()]).abs()
    largest = torch.zeros(1, device=mesh.device_type)
    if errors.numel():  # with more ranks than tokens a shard is empty
        largest += errors.max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not float(largest) <= TOLERANCE[model.dtype]:
        raise ArithmeticError(f"sharded and whole attention differ by {float(largest):.1e}")
    if dist.get_rank() == 0:
        shape = " x ".join(f"{axis} {mesh[axis].size()}" for axis in ("dp", "sp", "tp"))
        print(f"{shape}: largest difference from one process {float(largest):.1e}")
    dist.destroy_process_group()


def tensors_of_tp_rank(model: ModelConfig, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a whole sequence, [B, s, heads, dim], with the heads of this rank's tp place."""
    random = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    tp, place = mesh["tp"].size(), mesh["tp"].get_local_rank()
    seq_len = min(model.seq_len or 256, 256)

    def draw(num_heads: int, dim: int) -> Tensor:
        shape = (model.batch, seq_len, num_heads, dim)
        whole = torch.randn(shape, generator=random).to(
            mesh.device_type, getattr(torch, model.dtype)
        )
        first = place * num_heads // tp  # with more tp ranks than heads, several have the same
        return whole[:, :, first : first + max(1, num_heads // tp)]

    return (
        draw(model.num_heads, model.head_dim),
        draw(model.num_kv_heads, model.head_dim),
        draw(model.num_kv_heads, model.value_dim),
    )


def one_process(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """torch's own attention of the whole sequence in float64 on the CPU, [B, s, H, Dv]."""
    q, k, v = (tensor.transpose(1, 2).cpu().double() for tensor in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.transpose(1, 2)


if __name__ == "__main__":
    main()
