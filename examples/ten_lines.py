import torch

import ulysses

mesh = ulysses.init_mesh(sp=2, device_type="cpu")
attention = ulysses.UlyssesAttention(mesh["sp"])
q, k, v = torch.randn(3, 1, 1000, 9, 64, generator=torch.Generator().manual_seed(0))
shards = [ulysses.shard_sequence(whole, mesh["sp"]) for whole in (q, k, v)]  # [1, 500, 9, 64]
out = ulysses.gather_sequence_slice_grads(attention(*shards, is_causal=True), mesh["sp"])
q, k, v = (whole.transpose(1, 2) for whole in (q, k, v))
alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
print(f"largest difference from one process: {(out - alone).abs().max():.0e}")
