"""`parallelize` at a region: a model's stack of layers is sharded, all around it is whole.

The first layer cuts what it is given, later ones what still comes whole from outside (positions,
conditions), and the last one's output is gathered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ulysses.attention import UlyssesAttention
from ulysses.sequence import gather_sequence_sum_grads, shard_sequence
from ulysses.tiling import shard_lengths
from ulysses.wrap_callable import Mesh, sequence_group
from ulysses.wrap_lengths import Lengths, tell
from ulysses.wrap_open import new_scope, open_scope, opened
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope, Site, Wrapping
from ulysses.wrap_sites import find_sites
from ulysses.wrapping import (
    Around,
    Forward,
    Names,
    as_root,
    default_seq_dim,
    probe_once,
    require_no_mixers,
    require_reached,
    require_unwrapped,
    require_whole_heads,
    take_over,
)

_LENGTH = "region"  # the key of the whole sequence's length in a scope's notes


def find_region(model: nn.Module, local: Collection[str | type] = ()) -> str:
    """The innermost list of layers that holds all attention; without one, the part that does."""
    found = find_sites(model, (), local)
    names = [name for name, site in found.items() if site.policy is not Policy.LOCAL]
    paths = [name.split(".") for name in names]
    common = []
    for step in zip(*paths, strict=False):
        if len(set(step)) > 1:
            break
        common.append(step[0])
    while common and len(names) > 1:
        if isinstance(model.get_submodule(".".join(common)), (nn.ModuleList, nn.Sequential)):
            break
        common.pop()
    return ".".join(common)


def shard_region(
    model: nn.Module,
    mesh: Mesh,
    region: str,
    *,
    replicated: Names,
    local: Names,
    handled: Names,
    probe: bool,
    **options: Any,
) -> None:
    """Gives a model's layers forwards that shard, and the model one around them."""
    require_unwrapped(model)
    part = model.get_submodule(region)
    prefix = f"{region}." if region else ""
    stacked = isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 0
    layers = [f"{prefix}{name}" for name, _ in part.named_children()] if stacked else [region]
    found = {
        name: site if name.startswith(prefix) or name == region else _left_alone(site)
        for name, site in find_sites(model, replicated, local).items()
    }
    if all(site.policy is Policy.LOCAL for site in found.values()):
        raise ValueError(
            f"region={region!r} holds no attention; it is in {', '.join(found)}: name the list of "
            "layers around that"
        )
    require_no_mixers(part, handled)
    require_whole_heads(model, found, mesh)
    wrapping = Wrapping(
        UlyssesAttention(sequence_group(mesh), **options),
        found,
        seq_dim=default_seq_dim(part),
        unprobed=set(layers) if probe and not handled else set(),
    )
    around: dict[str, Around] = {
        name: functools.partial(
            _layer, name=name, is_first=name == layers[0], is_last=name == layers[-1]
        )
        for name in layers
    }
    around[""] = _around_region if "" not in around else _both(around[""])
    take_over(model, wrapping, around)


def _left_alone(site: Site) -> Site:
    return Site(site.name, site.kind, site.route, Policy.LOCAL)


def _both(layer: Around) -> Around:
    """Of a model that is its own region."""

    def around(inner: Forward, wrapping: Wrapping) -> Forward:
        return _around_region(layer(inner, wrapping), wrapping)

    return around


def _around_region(inner: Forward, wrapping: Wrapping) -> Forward:
    """The model's forward, which leaves alone what attends outside of the region."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if open_scope(wrapping) is not None:
            return inner(self, *args, **kwargs)
        lengths = Lengths(wrapping.attention)
        with new_scope(wrapping, lengths, policy=Policy.LOCAL) as scope:
            out = inner(self, *args, **kwargs)
            require_reached(self, scope)
            return out

    return as_root(forward)


def _layer(
    inner: Forward, wrapping: Wrapping, *, name: str, is_first: bool, is_last: bool
) -> Forward:
    """A layer's forward on this rank's rows of what it is given."""
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        with opened(wrapping) as scope:
            lens = _lens(scope, (args, kwargs), is_first)
            own = {n: _own_rows(n, v, lens, wrapping) for n, v in _but_self(bound).items()}
            bound.arguments.update(own)
            lengths = Lengths(wrapping.attention, [lens])
            inputs = bound.args[1:], bound.kwargs
            probe_once(name, self, inner, inputs, wrapping, lengths)
            scope.lengths = lengths
            with scope.at(Site(name, type(self).__name__, "region")):
                out = inner(*bound.args, **bound.kwargs)
            return _gathered(out, lens, wrapping) if is_last else out

    return forward


def _but_self(bound: inspect.BoundArguments) -> dict[str, Any]:
    return dict(list(bound.arguments.items())[1:])


def _lens(scope: Scope, inputs: Any, is_first: bool) -> tuple[int, ...]:
    """Every rank's length of the hidden states, which are the first tensor that a layer is given.

    A layer that is recomputed in backward stands alone, and asks the other ranks.
    """
    attention, dim = scope.attention, scope.wrapping.seq_dim
    hidden = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    if is_first:
        scope.notes[_LENGTH] = hidden.shape[dim]
    elif _LENGTH not in scope.notes:
        told = tell([hidden.shape[dim]], attention.group, hidden.device)
        scope.notes[_LENGTH] = sum(lens[0] for lens in told)
    return shard_lengths(scope.notes[_LENGTH], attention.num_ranks)


def _own_rows(name: str, value: Any, lens: tuple[int, ...], wrapping: Wrapping) -> Any:
    """This rank's rows of every tensor in an argument that has all of them; masks stay whole."""
    dim, group = wrapping.seq_dim, wrapping.attention.group

    def of_tensor(tensor: Tensor) -> Tensor:
        if tensor.ndim <= max(dim, 1) or tensor.shape[dim] != sum(lens):
            return tensor
        return shard_sequence(tensor, group, dim=dim, seq_lens=lens)

    if "mask" in name or group is None:
        return value
    if isinstance(value, dict):
        return {key: _own_rows(str(key), held, lens, wrapping) for key, held in value.items()}
    return tree_map_only(Tensor, of_tensor, value)


def _gathered(out: Any, lens: tuple[int, ...], wrapping: Wrapping) -> Any:
    dim, group, rank = wrapping.seq_dim, wrapping.attention.group, wrapping.attention.rank

    def of_tensor(tensor: Tensor) -> Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != lens[rank]:
            return tensor
        return gather_sequence_sum_grads(tensor, group, dim=dim, seq_lens=lens)

    return out if group is None else tree_map_only(Tensor, of_tensor, out)
