"""Launched by npu/test_layer_launched: a config's heads over tp and sp, beside SDPA in one process.

Takes a config file and a sequence length.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import ulysses
from ulysses.tiling import shard_lengths

config = ulysses.load_config(sys.argv[1])
length = int(sys.argv[2])
parallel, model = config.parallel, config.model
mesh = ulysses.init_mesh(sp=parallel.sp, tp=parallel.tp, dp=parallel.dp)
tp, sp = mesh["tp"].get_local_rank(), mesh["sp"].get_local_rank()
draws = torch.Generator().manual_seed(0)
whole = [
    torch.randn(1, length, heads, model.head_dim, generator=draws).bfloat16().chunk(parallel.tp, 2)
    for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
]
heads = [parts[tp] for parts in whole]
lens = shard_lengths(length, parallel.sp)
shards = [tensor.split(lens, 1)[sp].to(mesh.device_type) for tensor in heads]
attention = ulysses.UlyssesAttention(mesh["sp"], grid=config.attention.grid)
out = attention(*shards, seq_lens=lens)

query, key, value = (tensor.float().transpose(1, 2) for tensor in heads)
expected = scaled_dot_product_attention(query, key, value).transpose(1, 2).split(lens, 1)[sp]
error = (out.float().cpu() - expected).abs().max().item()
assert attention.tiling is not None
num_heads = len(attention.tiling.tiles[sp].heads)
close = error <= 4 * torch.finfo(torch.bfloat16).eps * max(1.0, expected.abs().max().item())
# In one write: torchrun's processes are unbuffered and share the pipe.
sys.stdout.write(
    f"rank {dist.get_rank()}: {out.device} {dist.get_backend()}, {shards[0].shape[2]} heads after "
    f"tp, {num_heads} after sp, {'equal' if close else f'off by {error:.3g}'}\n"
)
dist.destroy_process_group()
