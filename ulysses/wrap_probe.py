"""Is attention all that mixes tokens, and does nothing count positions by the shard?

Before the first forward of a wrapped module it is run with attention replaced by something that
each token computes alone. Whatever then still reaches from one token to another, or tells apart
tokens that are alike, would be computed from a shard as if it were the whole sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]
Outputs = list[tuple[str, Tensor]]  # in the order in which modules end; the module itself is ""

_MIXES = (
    "{place} mixes tokens otherwise than by attention: changing token 0 changed others. On a shard "
    "it sees this rank's tokens only. If it is right all the same, name it in handled=[...]; if "
    "only the layers can be sharded, use ulysses.parallelize(model, mesh, region=...)"
)
_COUNTS = (
    "{place} tells equal tokens apart, so it counts positions itself, and on a shard from 0 on "
    "each rank. Pass it the positions of the whole sequence (ulysses.position_ids), or use "
    "ulysses.parallelize(model, mesh, region=...), which shards behind it; if it is right all the "
    "same, name it in handled=[...]"
)
_POOLS = (
    "{place} returns {shape}, which depends on the tokens and has no dim of this rank's {length}: "
    "it is made from this rank's tokens only. Use ulysses.parallelize(model, mesh, region=...), "
    "which gathers before it; if it is right all the same, name it in handled=[...]"
)


def probe(module: nn.Module, forward: Forward, inputs: Inputs, length: int, seq_dim: int) -> None:
    """Raises ValueError naming the first part that mixes tokens or counts positions.

    `forward(*args, **kwargs)` is the module's, with attention neutral; `length` this rank's number
    of tokens, which `inputs` have in `seq_dim`. Three forwards without gradients, and one or two
    more to find a name. All ranks run as many, whatever their lengths.
    """
    changed = _altered(inputs, length, seq_dim, _with_first_changed)
    alike = _altered(inputs, length, seq_dim, _with_all_as_first)
    with _quiet(module):
        pairs = _pairs(module, forward, inputs, changed, watched=False)
        if any(_mixed(first, second, length, seq_dim) for _, first, second in pairs):
            pairs = _pairs(module, forward, inputs, changed, watched=True)
            _raise_mixed(module, pairs, length, seq_dim)
        if any(_differ_by_row(out, length, seq_dim) for _, out in _run(module, forward, alike)):
            outputs = _run(module, forward, alike, watched=True)
            name = next(name for name, out in outputs if _differ_by_row(out, length, seq_dim))
            raise ValueError(_COUNTS.format(place=_place(module, name)))


def _raise_mixed(
    module: nn.Module, pairs: list[tuple[str, Tensor, Tensor]], length: int, seq_dim: int
) -> None:
    for name, first, second in pairs:
        if _dim(first, length, seq_dim) is None and name:
            continue  # of a part this says nothing: it may have been given something without rows
        if _mixed(first, second, length, seq_dim):
            has_rows = _dim(first, length, seq_dim) is not None
            text = _MIXES if has_rows else _POOLS
            place, shape = _place(module, name), tuple(first.shape)
            raise ValueError(text.format(place=place, shape=shape, length=length))


def _place(module: nn.Module, name: str) -> str:
    part = module.get_submodule(name)
    return f"{name} ({type(part).__name__})" if name else type(part).__name__


def _pairs(
    module: nn.Module, forward: Forward, one: Inputs, other: Inputs, *, watched: bool
) -> list[tuple[str, Tensor, Tensor]]:
    """The outputs for two inputs, side by side as far as they correspond."""
    first = _run(module, forward, one, watched=watched)
    second = _run(module, forward, other, watched=watched)
    return [
        (name, a, b)
        for (name, a), (_, b) in zip(first, second, strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]


def _run(module: nn.Module, forward: Forward, inputs: Inputs, *, watched: bool = False) -> Outputs:
    """The module's tensors, after those of each of its parts if `watched`."""
    outputs: Outputs = []

    def keep(name: str, *call: Any) -> None:
        held = [leaf for leaf in tree_leaves(call[-1]) if isinstance(leaf, Tensor)]
        outputs.extend((name, tensor.clone()) for tensor in held if tensor.is_floating_point())

    with ExitStack() as stack, torch.no_grad():
        for name, part in module.named_modules() if watched else ():
            if name:
                stack.enter_context(_hook(part, partial(keep, name)))
        keep("", forward(*inputs[0], **inputs[1]))
    return outputs


@contextmanager
def _hook(module: nn.Module, function: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, so that nothing is random, recomputed or remembered."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with warnings.catch_warnings():
            # Reentrant checkpoints say so of every forward without gradients.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            yield
    finally:
        for part in trained:
            part.training = True


def _altered(
    inputs: Inputs, length: int, seq_dim: int, alter: Callable[[Tensor, int], Tensor]
) -> Inputs:
    """The inputs with every tensor altered that has the sequence in its dim."""

    def of_tensor(tensor: Tensor) -> Tensor:
        if length and tensor.ndim > seq_dim and tensor.shape[seq_dim] == length:
            return alter(tensor.detach(), seq_dim)
        return tensor

    altered: Inputs = tree_map_only(Tensor, of_tensor, inputs)
    return altered


def _with_first_changed(tensor: Tensor, dim: int) -> Tensor:
    """Another first token. An integer becomes one that occurs, or 0 or 1: it may be an index."""
    first = tensor.narrow(dim, 0, 1)
    if tensor.is_floating_point():
        other = 1 - 2 * first
    else:
        last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
        other = torch.where(last != first, last, (first == 0).to(tensor.dtype))
    rest = tensor.narrow(dim, 1, tensor.shape[dim] - 1)
    return torch.cat([other, rest], dim)


def _with_all_as_first(tensor: Tensor, dim: int) -> Tensor:
    """In the whole batch: an output may be as long in that dim as this rank has tokens."""
    first = tensor.narrow(dim, 0, 1).narrow(1 - dim, 0, 1) if dim < 2 else tensor.narrow(dim, 0, 1)
    return first.expand_as(tensor).contiguous()


def _dim(tensor: Tensor, length: int, seq_dim: int) -> int | None:
    """Where this rank's tokens lie in an output."""
    if tensor.ndim > seq_dim and tensor.shape[seq_dim] == length:
        return seq_dim
    return next((dim for dim, size in enumerate(tensor.shape) if size == length), None)


def _mixed(first: Tensor, second: Tensor, length: int, seq_dim: int) -> bool:
    """Whether more changed than token 0 of the output."""
    if length < 2:
        return False
    dim = _dim(first, length, seq_dim)
    if dim is not None:
        first, second = (each.narrow(dim, 1, length - 1) for each in (first, second))
    return _differ(first, second)


def _differ_by_row(tensor: Tensor, length: int, seq_dim: int) -> bool:
    dim = _dim(tensor, length, seq_dim)
    if dim is None or length < 2:
        return False
    return _differ(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))


def _differ(first: Tensor, second: Tensor) -> bool:
    """By more than rounding: the same row may be computed in another order."""
    if not first.numel():
        return False
    wide = (first.double(), second.double())
    scale = max(1e-30, wide[0].abs().max().item())
    return (wide[0] - wide[1]).abs().max().item() > 64 * torch.finfo(first.dtype).eps * scale
