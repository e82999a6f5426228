"""The operators that the project and a transformer need, on device npu, against the CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# torch_npu asks for a private format and tells that it got the base one.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")


def draw(*shape: int, seed: int = 0, positive: bool = False) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return tensor.abs() + 0.5 if positive else tensor


@dataclass(frozen=True)
class Case:
    """`run(*inputs)` on both devices; float inputs get gradients unless `gradients` is off."""

    run: Callable
    inputs: tuple = field(default_factory=lambda: (draw(4, 6, seed=1), draw(4, 6, seed=2)))
    gradients: bool = True


X, Y = draw(4, 6, seed=1), draw(4, 6, seed=2)
POSITIVE = (draw(4, 6, seed=1, positive=True),)
INDEX = torch.tensor([3, 0, 0])
COLUMNS = torch.tensor([[0, 5], [1, 1], [4, 2], [3, 3]])
HIDDEN = draw(4, 6, seed=3) > 0
WHOLE = torch.arange(-12, 12).view(4, 6)
TARGET = torch.tensor([1, 5, -100, 0])
BATCH = (draw(3, 4, 5, seed=4), draw(3, 5, 2, seed=5))


def one(function, *inputs, gradients=True):
    return Case(function, inputs or (X,), gradients)


def plain(function, *inputs):
    return Case(function, inputs or (X, Y), gradients=False)


def filled(tensor, value):
    tensor[1:3, ::2] = value
    return tensor


def indexed(tensor, values):
    tensor[INDEX.to(tensor.device)] += values[:3]
    return tensor


CASES = {
    # copies
    "to half": one(lambda x: x.to(torch.bfloat16).float() + x.half()),
    "contiguous": one(lambda x: x.t().contiguous()),
    "strided copy": one(lambda x: filled(torch.zeros_like(x), x[1:3, ::2])),
    "cat": Case(lambda x, y: torch.cat([x, y[:2]])),
    "cat columns": Case(lambda x, y: torch.cat([x, y], -1)),
    "stack": Case(lambda x, y: torch.stack([x, y], 1)),
    "split": one(lambda x: torch.cat([part * 2 for part in x.split([1, 2, 1])])),
    "chunk": one(lambda x: torch.stack(x.chunk(2, -1))),
    "pad": one(lambda x: F.pad(x, (1, 2, 0, 1))),
    "repeat": one(lambda x: x.repeat(2, 1, 3)),
    "repeat_interleave": one(lambda x: x.repeat_interleave(3, 1)),
    "expand": one(lambda x: x[:, None].expand(4, 3, 6).contiguous()),
    "roll": one(lambda x: x.roll(2, 1)),
    "flip": one(lambda x: x.flip(0)),
    "to long": plain(lambda x: (x * 4).long(), X),
    # creation
    "arange": plain(lambda x: torch.arange(2, 9, 3, device=x.device), X),
    "arange float": plain(lambda x: torch.arange(0, 1, 0.25, device=x.device), X),
    "full": plain(lambda x: torch.full((2, 3), 2.5, device=x.device), X),
    "zeros ones": plain(lambda x: torch.zeros_like(x) + torch.ones(6, device=x.device), X),
    "eye": plain(lambda x: torch.eye(4, device=x.device), X),
    "linspace": plain(lambda x: torch.linspace(0, 1, 5, device=x.device), X),
    "triu": one(lambda x: x.triu(1)),
    "tril": one(lambda x: x.tril(-1)),
    "triangle": plain(lambda x: torch.ones(5, 5, device=x.device).triu(1).bool(), X),
    "one hot": plain(lambda x: F.one_hot(x, 6), INDEX),
    # indices
    "embedding": Case(lambda w, i: F.embedding(i, w), (X, INDEX)),
    "embedding padding": Case(lambda w, i: F.embedding(i, w, padding_idx=0), (X, INDEX)),
    "index_select": Case(lambda x, i: x.index_select(0, i), (X, INDEX)),
    "gather": Case(lambda x, i: x.gather(1, i), (X, COLUMNS)),
    "scatter": Case(lambda x, i: torch.zeros_like(x).scatter(1, i, x[:, :2]), (X, COLUMNS)),
    "scatter_add": Case(lambda x, i: x.scatter_add(1, i, x[:, :2]), (X, COLUMNS)),
    "index_add": Case(lambda x, i, y: x.index_add(0, i, y[:3]), (X, INDEX, Y)),
    "index": Case(lambda x, i: x[i], (X, INDEX)),
    "index column": Case(lambda x, i: x[:, i], (X, INDEX)),
    "index pair": Case(lambda x, i: x[i, i + 1], (X, INDEX)),
    "index put": plain(lambda x, y: indexed(x.clone(), y)),
    "mask select": plain(lambda x, m: x[m], X, HIDDEN),
    "mask assign": plain(lambda x, m: x.clone().masked_fill_(m, 2.0), X, HIDDEN),
    "nonzero": plain(lambda m: m.nonzero(), HIDDEN),
    "slice assign": plain(lambda x: filled(x.clone(), 7.0), X),
    # products
    "matmul": Case(lambda x, y: x @ y.T),
    "batched matmul": Case(lambda x, y: x @ y, BATCH),
    "broadcast matmul": Case(lambda x, y: x @ y, (BATCH[0], BATCH[1][0])),
    "bmm": Case(torch.bmm, BATCH),
    "linear": Case(lambda x, w: F.linear(x, w, w[:, 0])),
    "linear 3d": Case(lambda x, w: F.linear(x, w, w[:, 0]), (draw(2, 3, 6, seed=1), Y)),
    "linear no bias": Case(lambda x, w: F.linear(x, w), (draw(2, 3, 6, seed=1), Y)),
    "addmm": Case(lambda x, y: torch.addmm(x[:, :4], x, y.T, beta=0.5, alpha=2)),
    "baddbmm": Case(lambda x, y: torch.baddbmm(x[:, :, :2], x, y, beta=0.5, alpha=2), BATCH),
    "einsum": Case(lambda x, y: torch.einsum("bij,bjk->bki", x, y), BATCH),
    "matrix vector": Case(lambda x, y: x @ y[0]),
    # normalisations
    "softmax": one(lambda x: x.softmax(-1)),
    "softmax float": one(lambda x: x.bfloat16().softmax(0, dtype=torch.float32)),
    "log_softmax": one(lambda x: x.log_softmax(1)),
    "layer_norm": Case(lambda x, w: F.layer_norm(x, (6,), w[0], w[1])),
    "layer_norm plain": one(lambda x: F.layer_norm(x, (4, 6))),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (6,), w[0], 1e-5)),
    "rms_norm plain": one(lambda x: F.rms_norm(x, (6,))),
    # activations
    "silu": one(F.silu),
    "gelu tanh": one(lambda x: F.gelu(x, approximate="tanh")),
    "relu": one(F.relu),
    "leaky_relu": one(F.leaky_relu),
    "sigmoid": one(torch.sigmoid),
    "tanh": one(torch.tanh),
    "softplus": one(F.softplus),
    # losses
    "cross_entropy": Case(lambda x, t: F.cross_entropy(x, t), (X, TARGET)),
    "cross_entropy sum": Case(lambda x, t: F.cross_entropy(x, t, reduction="sum"), (X, TARGET)),
    "cross_entropy none": Case(lambda x, t: F.cross_entropy(x, t, reduction="none"), (X, TARGET)),
    "cross_entropy smooth": Case(
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (X, TARGET.abs() % 6)
    ),
    "nll_loss": Case(lambda x, t: F.nll_loss(x.log_softmax(1), t), (X, TARGET)),
    "mse_loss": Case(F.mse_loss),
    "l1 loss": Case(lambda x, y: (x - y).abs().mean()),
    "smooth_l1_loss": Case(F.smooth_l1_loss),
    # elements
    "add": Case(lambda x, y: torch.add(x, y, alpha=2) + 1.5),
    "sub": Case(lambda x, y: 1 - torch.sub(x, y, alpha=2)),
    "mul": Case(lambda x, y: x * y * 2),
    "div": Case(lambda x, y: x / (y + 9) / 2),
    "scalar": Case(lambda x, y: x * y[0, 0] + y.mean()),
    "in place": plain(lambda x, y: x.clone().add_(y).mul_(2).sub_(1).div_(y + 9).neg_()),
    "pow": one(lambda x: x**2 + (x * x + 1) ** -0.5 + 2**x),
    "rsqrt": one(lambda x: x.rsqrt() + x.sqrt() + x.log() + x.reciprocal(), *POSITIVE),
    "exp": one(lambda x: x.exp() + x.neg() + x.abs()),
    "sin cos": one(lambda x: x.sin() * x.cos()),
    "erf": one(torch.erf),
    "maximum": Case(lambda x, y: torch.maximum(x, y) + torch.minimum(x, y * 2)),
    "clamp": one(lambda x: x.clamp(-1, 0.5) + x.clamp(min=0) + x.clamp(max=0)),
    "lerp": Case(lambda x, y: torch.lerp(x, y, 0.25)),
    "addcmul": Case(lambda x, y: torch.addcmul(x, x, y, value=0.5)),
    "addcdiv": Case(lambda x, y: torch.addcdiv(x, y, x.abs() + 1, value=0.5)),
    "floor": plain(lambda x: x.floor() + x.ceil() + x.round() + x.sign(), X),
    "integers": plain(lambda i: (i // 3) * 2 + i % 5 + (i & 3), WHOLE),
    "remainder": plain(lambda i: torch.div(i, 4, rounding_mode="trunc"), WHOLE),
    # choices
    "compare": plain(lambda x, y: (x > y) & (x >= 0) | (x < -1) ^ (y <= 1)),
    "equal": plain(lambda i: (i == 3) | (i != i.flip(0)), WHOLE),
    "all any": plain(lambda x, y: torch.stack([(x > y).any(), (x > -9).all(), ~(x > y).all()])),
    "isfinite": plain(lambda x: torch.isfinite(x / x.relu()), X),
    "where": Case(lambda x, y: torch.where(x > y, x, y * 2)),
    "where scalar": one(lambda x: torch.where(x > 0, x, 0.0)),
    "masked_fill": Case(lambda x, m: x.masked_fill(m, -1e9), (X, HIDDEN)),
    "allclose": plain(lambda x, y: torch.tensor([torch.allclose(x, x), torch.equal(x, y)])),
    # reductions
    "sum": one(lambda x: x.sum() + x.sum(0, keepdim=True)),
    "sum of half": one(lambda x: x.bfloat16().sum(dtype=torch.float32)),
    "mean": one(lambda x: x.mean() + x.mean(-1, keepdim=True)),
    "amax": one(lambda x: x.amax(-1) + x.amin(-1)),
    "max": one(lambda x: x.max() + x.min() + x.max(0).values),
    "argmax": plain(lambda x: x.argmax(-1) + x.argmin(-1), X),
    "logsumexp": one(lambda x: x.logsumexp(-1)),
    "norm": one(lambda x: x.norm() + torch.linalg.vector_norm(x, dim=1)),
    "var": one(lambda x: x.var(-1) + x.std(-1, correction=0)),
    "prod": one(lambda x: x.prod(-1)),
    "cumsum": one(lambda x: x.cumsum(1)),
    "sort": plain(lambda x: torch.cat(x.sort(-1, descending=True)), X),
    "topk": one(lambda x: x.topk(2, -1).values),
    "argsort": plain(lambda x: x.argsort(-1), X),
    # convolutions of patch embeddings
    "conv2d": Case(
        lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], stride=2),
        (draw(2, 3, 8, 8, seed=6), draw(5, 3, 2, 2, seed=7)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_cpu(name):
    case = CASES[name]
    results = []
    for device in ("cpu", "npu"):
        inputs = [tensor.to(device) for tensor in case.inputs]
        if case.gradients:
            inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        out = case.run(*inputs)
        found = [out.detach().cpu()]
        if case.gradients:
            assert out.device.type == device
            leaves = [tensor for tensor in inputs if tensor.requires_grad]
            cotangent = draw(*out.shape, seed=9).to(device, out.dtype)
            found += [grad.cpu() for grad in torch.autograd.grad(out, leaves, cotangent)]
        results.append(found)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


ROTATED = (draw(2, 5, 3, 8, seed=6), draw(1, 5, 1, 8, seed=7), draw(1, 5, 1, 8, seed=8))


def rotated(x, cos, sin, mode):
    if mode == "half":
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


# torch_npu's own operator, and what it computes.
OWN = {
    "rotary half": (
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, "half"),
        lambda x, c, s: rotated(x, c, s, "half"),
        ROTATED,
    ),
    "rotary interleave": (
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, "interleave"),
        lambda x, c, s: rotated(x, c, s, "interleave"),
        ROTATED,
    ),
    "swiglu": (torch_npu.npu_swiglu, lambda x: F.silu(x[:, :3]) * x[:, 3:], (X,)),
    "rms_norm": (
        lambda x, w: torch_npu.npu_rms_norm(x, w, epsilon=1e-5)[0],
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
        (X, Y[0].clone()),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_operators_of_torch_npu(name):
    ours, theirs, inputs = OWN[name]
    results = []
    for function, device in ((ours, "npu"), (theirs, "cpu")):
        leaves = [tensor.to(device).clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        gradients = torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(device))
        results.append([tensor.detach().cpu() for tensor in (out, *gradients)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_gelu_is_the_tanh_form_whatever_is_asked():
    """CANN's Gelu has one formula (hicann/ops-nn, activation/gelu/README.md)."""
    exact = X.npu().requires_grad_()
    out = F.gelu(exact)
    torch.testing.assert_close(out.detach().cpu(), F.gelu(X, approximate="tanh"), **CLOSE)
    assert not torch.allclose(out.detach().cpu(), F.gelu(X), rtol=0, atol=1e-6)


# --- failures ---------------------------------------------------------------------------------


def test_a_wrong_shape_is_an_error_of_the_call_and_leaves_the_stream_as_it_was():
    x = X.npu()
    with pytest.raises(RuntimeError, match="aclnnBatchMatMul failed, error code is 161002"):
        torch.bmm(x[None], x[None])
    torch.testing.assert_close((x + 1).cpu(), X + 1)


def test_the_cube_unit_has_no_double_precision():
    x = X.double().npu()
    with pytest.raises(RuntimeError, match="Tensor self not implemented for DT_DOUBLE"):
        x @ x.T


def test_an_operator_without_an_entry_is_named():
    text = "aclop operator Qr, .*opapi/entry.hpp tells how to add one"
    with pytest.raises(RuntimeError, match=text):
        torch.linalg.qr(X.npu())
    torch.testing.assert_close((X.npu() + 1).cpu(), X + 1)


# --- random numbers ---------------------------------------------------------------------------

RANDOM = {
    "randn": lambda: torch.randn(1000, device="npu"),
    "rand": lambda: torch.rand(1000, device="npu"),
    "randint": lambda: torch.randint(0, 1000, (1000,), device="npu"),
    "randperm": lambda: torch.randperm(1000, device="npu"),
    "normal_": lambda: torch.empty(1000, device="npu").normal_(2, 3),
    "uniform_": lambda: torch.empty(1000, device="npu").uniform_(2, 3),
    "bernoulli_": lambda: torch.empty(1000, device="npu").bernoulli_(0.3),
    "dropout": lambda: F.dropout(torch.ones(1000, device="npu"), 0.3),
    "multinomial": lambda: torch.ones(1000, device="npu").multinomial(900),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_generator(name):
    sample = RANDOM[name]
    torch.npu.manual_seed(7)
    first, state = sample(), torch.npu.get_rng_state()
    second = sample()
    torch.npu.set_rng_state(state)
    assert torch.equal(sample().cpu(), second.cpu())
    torch.npu.manual_seed(7)
    assert torch.equal(sample().cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("randn", 0.0, 1.0),
        ("rand", 0.5, 0.29),
        ("normal_", 2.0, 3.0),
        ("uniform_", 2.5, 0.29),
        ("bernoulli_", 0.3, 0.46),
        ("dropout", 1.0, 0.65),
    ],
)
def test_random_numbers_have_their_moments(name, mean, std):
    torch.npu.manual_seed(3)
    values = RANDOM[name]().cpu()
    assert abs(values.mean() - mean) < 0.15 * std
    assert abs(values.std() - std) < 0.1 * std


def test_the_gradient_of_dropout_has_its_mask():
    x = torch.ones(50, 50, device="npu", requires_grad=True)
    out = F.dropout(x, 0.25)
    out.sum().backward()
    assert torch.equal(out.detach().cpu(), x.grad.cpu())
    assert 0 < (x.grad == 0).sum().item() < 2500
