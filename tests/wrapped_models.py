"""Small models that attend in every way that `ulysses.wrap` knows, and some that it refuses."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ulysses.sequence import position_ids

DIM, HEADS, KV_HEADS = 12, 6, 2


class SelfAttention(nn.Module):
    """GQA through torch's SDPA, with rotary positions that the caller gives."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        size = DIM // HEADS
        self.q_proj = nn.Linear(DIM, HEADS * size)
        self.kv_proj = nn.Linear(DIM, 2 * KV_HEADS * size)
        self.out = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query = self.q_proj(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key, value = self.kv_proj(x).unflatten(2, (2, KV_HEADS, -1)).permute(2, 0, 3, 1, 4)
        angles = positions[:, None, :, None].to(x.dtype)
        query, key = (torch.cat([t * angles.cos(), t * angles.sin()], 3) for t in (query, key))
        out = scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=True, scale=0.7
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), positions)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Two blocks, recomputed in backward if `recomputed` ("reentrant" or "saved")."""

    def __init__(self, recomputed: str | None = None, is_causal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, DIM)
        self.layers = nn.ModuleList(Block(SelfAttention(is_causal)) for _ in range(2))
        self.recomputed = recomputed

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.recomputed:
                x = checkpoint(layer, x, positions, use_reentrant=self.recomputed == "reentrant")
            else:
                x = layer(x, positions)
        return x


class OwnKernel(nn.Module):
    """Attends by matrix products, which nothing can see."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.proj(x).chunk(3, -1)
        return (query @ key.transpose(1, 2) / math.sqrt(DIM)).softmax(-1) @ value


class OwnKernelAttention(OwnKernel):
    """The same under a name that says so."""


class EitherKernel(OwnKernel):
    """Has SDPA in its code and does not take it."""

    fast = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fast:
            query, key, value = self.proj(x).chunk(3, -1)
            return scaled_dot_product_attention(query, key, value)
        return super().forward(x)


class TakesFunction(nn.Module):
    """Is given its attention, [B, S, H, D]."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.proj(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        return self.function(query, key, value, causal=True).flatten(2)


class Processor:
    """What diffusers hands its attention modules: a callable of the module and its input."""

    def __call__(self, attention: "TakesProcessor", x: Tensor) -> Tensor:
        query, key, value = attention.proj(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(query=query, key=key, value=value, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class TakesProcessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


def own_function(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Attention of complete rows by matrix products, [B, S, H, D]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


class WithBlock(nn.Module):
    """A block that attends rightly, and one more part behind it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x + self.attend(x, x, x)[0])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class CumulativeSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class CountsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class Pools(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class MambaMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


def tokens(length: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Ids [batch, length] of a `Decoder`, and their positions."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(20, (batch, length), generator=generator)
    return ids, position_ids([length], 0)[None]
