"""A small transformer trains on device npu: losses, gradients and weights equal the CPU's."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

from tests.npu.attention_cases import TRIANGLE

CLOSE = {"rtol": 0.0, "atol": 1e-4}
VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH = 50, 48, 6, 2, 12
DIM = WIDTH // HEADS


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of [B, S, N, D]."""
    exponents = torch.arange(0, DIM, 2, device=x.device) / DIM
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), 10000.0**-exponents)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The fused operator where there is an NPU, SDPA where there is none."""
    if query.device.type == "npu":
        mask = TRIANGLE.npu()
        options = {"scale": DIM**-0.5, "sparse_mode": 3, "atten_mask": mask}
        return torch_npu.npu_fusion_attention(query, key, value, HEADS, "BSND", **options)[0]
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by products and a softmax, causal."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    hidden = torch.ones(LENGTH, LENGTH, device=query.device, dtype=torch.bool).triu(1)
    scores = (query @ key.mT * DIM**-0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, attend, norm):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([norm(WIDTH), norm(WIDTH)])
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * KV_HEADS * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query = self.query(normed).unflatten(-1, (HEADS, DIM))
        key, value = self.key_value(normed).unflatten(-1, (2 * KV_HEADS, DIM)).chunk(2, -2)
        x = x + self.out(self.attend(rotate(query), rotate(key), value).flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, attend, norm):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(attend, norm) for _ in range(2)])
        self.norm = norm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.T


def step(model: nn.Module, optimiser: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    optimiser.zero_grad()
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


OPTIMISERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
ATTENTIONS = {"fused": fused, "products": products}
NORMS = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}


@pytest.mark.parametrize(
    ("optimiser", "attention", "norm"),
    [
        *((name, "fused", "RMSNorm") for name in OPTIMISERS),
        ("AdamW", "products", "LayerNorm"),
        ("SGD", "fused", "LayerNorm"),
    ],
)
def test_steps_equal_those_of_the_cpu(optimiser, attention, norm):
    torch.manual_seed(0)
    on_cpu = Model(ATTENTIONS[attention], NORMS[norm])
    on_npu = copy.deepcopy(on_cpu).to("npu")
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1))
    make = OPTIMISERS[optimiser]
    optimisers = [make(list(model.parameters())) for model in (on_cpu, on_npu)]
    for _ in range(2):
        loss = step(on_cpu, optimisers[0], tokens)
        torch.testing.assert_close(step(on_npu, optimisers[1], tokens.npu()).cpu(), loss, **CLOSE)
        for (name, ours), theirs in zip(
            on_npu.named_parameters(), on_cpu.parameters(), strict=True
        ):
            assert ours.grad.any(), name
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, **CLOSE)
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **CLOSE)


def test_autocast_computes_in_bfloat16():
    torch.manual_seed(0)
    model = Model(products, nn.LayerNorm)
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    exact = model(tokens)
    with torch.autocast("npu", torch.bfloat16):
        rounded = model.to("npu")(tokens.npu())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float().cpu(), exact, rtol=0.0, atol=0.3)


def test_a_checkpoint_comes_back(tmp_path):
    model = Model(products, nn.RMSNorm).to("npu")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = Model(products, nn.RMSNorm).to("npu")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    tokens = torch.randint(VOCABULARY, (3, LENGTH)).npu()
    assert torch.equal(model(tokens), other(tokens))
