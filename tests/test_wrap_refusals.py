"""What would be wrong on a shard is refused, by the name of the part; nothing is left behind."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import ulysses
from tests import reference
from tests.wrapped_models import (
    DIM,
    HEADS,
    Block,
    Convolution,
    CountsPositions,
    CumulativeSum,
    Decoder,
    EitherKernel,
    MambaMixer,
    OwnKernel,
    OwnKernelAttention,
    Pools,
    TakesFunction,
    WithBlock,
    own_function,
)

LISTED = nn.Identity()
LISTED.config = type("Config", (), {"layer_types": ["full_attention", "linear_attention"]})()

AT_ONCE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no attention": (
        lambda: nn.Sequential(nn.Linear(DIM, DIM)),
        "no attention found in Sequential",
    ),
    "a kernel without a sign": (lambda: Wraps(OwnKernel()), "no attention found in Wraps"),
    "a kernel by its name": (
        lambda: WithBlock(OwnKernelAttention()),
        "no route to the attention of other (OwnKernelAttention)",
    ),
    "a function": (lambda: TakesFunction(own_function), "no attention found in TakesFunction"),
    "convolution": (
        lambda: WithBlock(Convolution()),
        "other.conv (Conv1d): a convolution over (3,), which would end at the shard's border",
    ),
    "recurrence": (lambda: WithBlock(nn.LSTM(DIM, DIM)), "other (LSTM): a recurrent layer"),
    "batch norm": (lambda: WithBlock(nn.BatchNorm1d(DIM)), "other (BatchNorm1d): statistics"),
    "pooling": (lambda: WithBlock(nn.AvgPool1d(3)), "other (AvgPool1d): pooling"),
    "state space": (lambda: WithBlock(MambaMixer()), "other (MambaMixer): by its name"),
    "layer list": (lambda: WithBlock(LISTED), "lists layers of type linear_attention"),
}


class Wraps(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


@pytest.mark.parametrize("case", AT_ONCE)
def test_refused_at_once(case: str) -> None:
    make, message = AT_ONCE[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        ulysses.wrap(make(), None)


@pytest.mark.parametrize(
    "handled", [["other.conv"], ["Conv1d"], [nn.Conv1d]], ids=["name", "class name", "class"]
)
def test_what_the_caller_handles_is_let_through(handled: list[Any]) -> None:
    module = ulysses.wrap(WithBlock(Convolution()), None, handled=handled)
    x = torch.randn(2, 5, DIM)
    torch.testing.assert_close(module(x), ulysses.unwrap(module)(x))


def test_a_convolution_of_single_rows_or_patches_is_no_mixer() -> None:
    for conv in (nn.Conv1d(DIM, DIM, 1), nn.Conv2d(3, DIM, 4, stride=4)):
        ulysses.wrap(WithBlock(conv), None)


BY_THE_FORWARD: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "a hidden mixer": (
        lambda: WithBlock(CumulativeSum()),
        ValueError,
        "other (CumulativeSum) mixes tokens otherwise than by attention",
    ),
    "a hidden kernel": (
        lambda: WithBlock(OwnKernel()),
        ValueError,
        "other (OwnKernel) mixes tokens otherwise than by attention",
    ),
    "its own positions": (
        lambda: WithBlock(CountsPositions()),
        ValueError,
        "other.table (Embedding) tells equal tokens apart",
    ),
    "pooled": (lambda: WithBlock(Pools()), ValueError, "WithBlock returns (2, 12), which depends"),
    "another kernel taken": (
        EitherKernel,
        RuntimeError,
        "the module itself (EitherKernel) ran, but its attention did not reach ulysses",
    ),
    "keys of its own": (
        lambda: WithBlock(nn.Identity()).requires_grad_(False),
        ValueError,
        "attend (MultiheadAttention) adds keys of its own",
    ),
}


@pytest.mark.parametrize("case", BY_THE_FORWARD)
def test_refused_by_the_first_forward(case: str) -> None:
    make, kind, message = BY_THE_FORWARD[case]
    module = make()
    if case == "keys of its own":
        module.attend = nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True, batch_first=True)
    training = [part.training for part in module.modules()]
    ulysses.wrap(module, None)
    with pytest.raises(kind, match=re.escape(message)):
        module(torch.randn(2, 5, DIM))
    assert [part.training for part in module.modules()] == training
    assert not torch.overrides._get_current_function_mode_stack()


class Recomputes(nn.Module):
    """Not a module but a method is recomputed, in which torch's SDPA is called."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, 3 * DIM)
        self.use_reentrant = use_reentrant

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = self.proj(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._attend, x, use_reentrant=self.use_reentrant)


def test_a_method_that_would_be_recomputed_on_the_shard() -> None:
    x = torch.randn(2, 5, DIM, requires_grad=True)
    module = ulysses.wrap(Recomputes(use_reentrant=True), None)
    with pytest.raises(ValueError, match="attends in a function under a reentrant checkpoint"):
        module(x)


def _recomputed_on_the_shard(rank: int, num_ranks: int) -> None:
    module = ulysses.wrap(Recomputes(use_reentrant=False), dist.group.WORLD)
    out = module(torch.randn(2, 5, DIM, requires_grad=True))
    with pytest.raises(CheckpointError, match=r"torch.utils.checkpoint: .* tensors"):
        out.sum().backward()


def test_what_is_not_reentrant_tells_by_itself(pool) -> None:
    pool(2).run(_recomputed_on_the_shard)


class SkipsAttention(Block):
    """Does not call the attention that it holds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def test_attention_that_a_forward_never_reaches() -> None:
    module = ulysses.wrap(SkipsAttention(nn.MultiheadAttention(DIM, HEADS)), None)
    message = (
        "SkipsAttention ran without any attention that ulysses takes over, of those found (att"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        module(torch.randn(2, 5, DIM))


def test_wrapping_twice_is_refused() -> None:
    module = ulysses.wrap(Decoder(), None)
    with pytest.raises(ValueError, match="Decoder is wrapped already"):
        ulysses.wrap(module, None)
    with pytest.raises(ValueError, match=re.escape("part (Decoder) is wrapped already")):
        ulysses.wrap(Wraps(module), None)
    with pytest.raises(ValueError, match=re.escape("its parts part, part.layers.0.attention, ")):
        ulysses.unwrap(Wraps(module))
    ulysses.wrap(ulysses.unwrap(module), None)
    with pytest.raises(ValueError, match=re.escape("Linear is not wrapped")):
        ulysses.unwrap(nn.Linear(2, 2))


def test_a_function_is_no_module() -> None:
    with pytest.raises(TypeError, match=re.escape("there is ulysses.wrap_function")):
        ulysses.wrap(own_function, None)


def test_a_replaced_forward_is_refused() -> None:
    module = Decoder()
    attend = module.layers[1].attention
    attend.forward = attend.forward
    message = "layers.1.attention (SelfAttention) has had its forward replaced"
    with pytest.raises(ValueError, match=re.escape(message)):
        ulysses.wrap(module, None)
    assert "forward" not in vars(module)


def _heads_and_axes(rank: int, num_ranks: int) -> list[str]:
    told = []
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 4), mesh_dim_names=("sp", "tp"))
    other = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for module, of in ((WithBlock(nn.Identity()), mesh), (WithBlock(nn.Identity()), other)):
        with pytest.raises(ValueError) as caught:
            ulysses.wrap(module, of)
        told.append(str(caught.value))
    return told


def test_heads_that_tensor_parallelism_does_not_divide(pool) -> None:
    for told in pool(4).run(_heads_and_axes):
        assert told[0].startswith(
            "attend (MultiheadAttention) has 6 query and 6 key/value heads, which tp=4 does not"
        )
        assert told[1].startswith("mesh has axes ('dp', 'tp'): one named \"sp\" is needed")


def _wrong_lengths(rank: int, num_ranks: int) -> list[str]:
    """Attention over other rows than the inputs have, and inputs that can't be told apart."""
    told = []
    for module, inputs in (
        (WithBlock(nn.Identity()), (torch.randn(2, 3, DIM).transpose(0, 1).contiguous(),)),
        (nn.TransformerDecoderLayer(DIM, HEADS, 8, batch_first=True), uneven_pair(rank)),
    ):
        seq_dim = 0 if isinstance(module, WithBlock) else None
        ulysses.wrap(module, dist.group.WORLD, seq_dim=seq_dim)
        with pytest.raises(ValueError) as caught:
            module(*inputs)
        told.append(str(caught.value))
    return told


def uneven_pair(rank: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, DIM), torch.randn(1, 4 - rank, DIM)


def test_rows_that_are_not_the_inputs_are_refused(pool) -> None:
    for told in pool(2).run(_wrong_lengths):
        assert told[0].startswith(
            "attend (MultiheadAttention) attends over 2 rows, but the inputs have 3 on this rank"
        )
        assert told[1].startswith("inputs of lengths [(4, 4), (4, 3)] (one a rank) are alike on")


def test_weights_are_not_returned_in_silence() -> None:
    attend = ulysses.wrap(nn.MultiheadAttention(DIM, HEADS, batch_first=True), None)
    x = reference.draw(2, 5, DIM, seed=1, dtype=torch.float32)
    assert attend(x, x, x)[1] is None
