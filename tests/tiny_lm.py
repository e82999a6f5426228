"""A small language model of plain torch parts, and training it: alone or over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ulysses
from ulysses.tiling import shard_lengths

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH = 19, 12, 3, 1, 11

CLIPPED_TO = 1.13  # less than some steps' gradients, more than others'

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal [B, s, heads, d] attention in one process."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.attend = attend
        self.heads = [HEADS, KV_HEADS, KV_HEADS]
        self.qkv = nn.Linear(WIDTH, sum(self.heads) * dim)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (sum(self.heads), -1))
        hidden = hidden + self.out(self.attend(*heads.split(self.heads, 2)).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class TinyLM(nn.Module):
    """Logits [B, l, V] of input_ids and position_ids, both [B, l]."""

    def __init__(self, attend: Attend, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            if self.checkpointed:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def micro_batches(step: int, number: int) -> list[dict[str, Tensor]]:
    """`number` whole micro-batches of two sequences, with few and many targets in turn.

    In the first, only the last three tokens have a target: no shard but the last has one.
    """
    draws = torch.Generator().manual_seed(step)
    found = []
    for place in range(number):
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draws)
        labels = ids.clone()
        labels[:, : LENGTH - 3 if place % 2 == 0 else 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def training_curve(
    rank: int,
    num_ranks: int,
    sp: int,
    *,
    wrapper: str = "none",
    num_micro: int = 1,
    checkpointed: bool = False,
    dtype: torch.dtype = torch.float64,
    steps: int = 10,
) -> tuple[list[float], dict[str, Tensor]]:
    """The whole loss of each step, and all parameters after the last.

    `sp` 0 is the reference: one process, torch's own attention and loss, no function of ours.
    """
    mesh = ulysses.init_mesh(sp=sp, device_type="cpu") if sp else None
    attend = ulysses.UlyssesAttention(mesh["sp"]) if mesh else attend_alone
    lens = shard_lengths(LENGTH, sp) if sp else (LENGTH,)
    torch.manual_seed(1)
    model: Any = TinyLM(
        (lambda *qkv: attend(*qkv, is_causal=True, seq_lens=lens)) if mesh else attend,
        checkpointed=checkpointed,
    ).to(dtype)
    model, group = _wrapped(model, wrapper, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # minds the scale
    curve = []
    for step in range(steps):
        whole = micro_batches(step, num_micro)
        if mesh is None:
            curve.append(_step_alone(model, whole))
        else:
            curve.append(_step(model, [_own(batch, mesh) for batch in whole], group, wrapper))
        ulysses.clip_grad_norm_(model.parameters(), CLIPPED_TO)
        optimizer.step()
        optimizer.zero_grad()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    return curve, {name: value.detach() for name, value in full.items()}


def _wrapped(model: Any, wrapper: str, mesh: Any) -> tuple[Any, Any]:
    group = ulysses.gradient_mesh(mesh) if mesh else None
    if wrapper == "ddp":
        model = DistributedDataParallel(model, process_group=group.get_group())
    elif wrapper == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=group)
        fully_shard(model, mesh=group)
    return model, group


def _own(batch: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    """This dp rank's sequences, this sp rank's tokens."""
    rows = {n: t.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for n, t in batch.items()}
    return ulysses.shard_tokens(rows, mesh["sp"], targets="targets", positions="position_ids")


def _step_alone(model: TinyLM, whole: list[dict[str, Tensor]]) -> float:
    """Token sums of all micro-batches, over the targets of all."""
    positions = torch.arange(LENGTH)[None]
    losses, count = torch.zeros(()), 0
    for batch in whole:
        logits = model(batch["input_ids"], positions)[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = losses + nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        count += int((targets != -100).sum())
    loss = losses / count
    loss.backward()
    return float(loss.detach())


def _step(model: Any, parts: list[dict[str, Tensor]], group: Any, wrapper: str) -> float:
    count = ulysses.count_targets([part["targets"] for part in parts], group)
    losses = torch.zeros(())
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if wrapper == "ddp":
            model.require_backward_grad_sync = last
        elif wrapper == "fsdp2":
            model.set_requires_gradient_sync(last)
        logits = model(part["input_ids"], part["position_ids"])
        loss = ulysses.token_loss(logits, part["targets"], count, group)
        loss.backward()
        losses = losses + loss.detach()
    if wrapper == "none":
        ulysses.average_gradients(model.parameters(), group)
    return float(ulysses.mean_over_ranks(losses, group))
