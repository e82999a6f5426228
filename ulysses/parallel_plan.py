"""`parallelize` by a model's own plan: what that names is cut and gathered around its parts.

Lengths are those of `shard_lengths`, of each sequence for itself: of joint attention, a rank's rows
are its text and its image. Their order over all ranks is not that of the model, which attention
without a mask of its own for each query does not see.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ulysses.attention import UlyssesAttention
from ulysses.sequence import gather_sequence_sum_grads, shard_sequence
from ulysses.sharding_plan import MAIN, Cut, PartPlan, ShardingPlan
from ulysses.tiling import shard_lengths
from ulysses.wrap_callable import Mesh, sequence_group
from ulysses.wrap_lengths import Lengths
from ulysses.wrap_open import new_scope, opened
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope, Wrapping
from ulysses.wrap_sites import find_sites
from ulysses.wrapping import (
    Around,
    Forward,
    Names,
    as_root,
    require_no_mixers,
    require_reached,
    require_unwrapped,
    require_whole_heads,
    take_over,
)

_CUT = "plan"  # the key of a forward's lengths, by the name of what was cut, in a scope's notes
Lens = tuple[int, ...]


def shard_by_plan(
    model: nn.Module,
    mesh: Mesh,
    plan: ShardingPlan,
    *,
    replicated: Names,
    local: Names,
    handled: Names,
    **options: Any,  # of `UlyssesAttention`
) -> None:
    """Gives the plan's parts forwards that shard, and the model one around them."""
    require_unwrapped(model)
    if replicated or local:
        raise ValueError(
            f"local or replicated for {type(model).__name__}, whose own plan says what is whole: "
            "leave them out, or name its list of layers in region=..."
        )
    found = {
        name: replace(site, policy=Policy.LOCAL) if name in plan.whole_keys else site
        for name, site in find_sites(model, (), ()).items()
    }
    exchanged = {name for name, site in found.items() if site.policy is not Policy.LOCAL}
    for top in {name.partition(".")[0] for name in exchanged}:
        require_no_mixers(model.get_submodule(top), handled)
    require_whole_heads(model, found, mesh)
    attention = UlyssesAttention(sequence_group(mesh), **options)
    wrapping = Wrapping(attention, found, seq_dim=1, by_plan=True)
    around: dict[str, Around] = {
        name: functools.partial(_planned, part=part) for name, part in plan.parts.items()
    }
    inside = around.get("", lambda inner, wrapping: inner)
    around[""] = functools.partial(_whole_model, inside=inside, plan=plan)
    take_over(model, wrapping, around)


def _whole_model(
    inner: Forward, wrapping: Wrapping, *, inside: Around, plan: ShardingPlan
) -> Forward:
    """The model's forward, given whole inputs; what attends at no site is left alone."""
    signature = inspect.signature(inner)
    inner = inside(inner, wrapping)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan.check(self, signature.bind(self, *args, **kwargs).arguments)
        cut: dict[str, Lens] = {}
        lengths = _LengthsOfPlan(wrapping.attention, cut)
        with new_scope(wrapping, lengths, policy=Policy.LOCAL) as scope:
            scope.notes[_CUT] = cut
            out = inner(self, *args, **kwargs)
            require_reached(self, scope)
            return out

    return as_root(forward)


def _planned(inner: Forward, wrapping: Wrapping, *, part: PartPlan) -> Forward:
    """A part's forward, with what the plan names cut before and behind it, or gathered."""
    names = list(inspect.signature(inner).parameters)[1:]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with opened(wrapping) as scope:
            # Arguments stay positional or named, as they were given: decorators look at that.
            given = list(args)
            for name, cuts in part.inputs.items():
                if name in kwargs:
                    kwargs[name] = _own_part(scope, name, kwargs[name], cuts)
                elif (place := names.index(name)) < len(given):
                    given[place] = _own_part(scope, name, given[place], cuts)
            out = inner(self, *given, **kwargs)
            if not part.outputs and not part.gathered:
                return out
            outputs = [out] if isinstance(out, Tensor) else list(out)
            for place, cut in part.outputs.items():
                name = f"{type(self).__name__}'s output {place}"
                outputs[place] = _own_rows(scope, name, outputs[place], cut)
            for place, gathering in enumerate(part.gathered):
                if gathering is not None:
                    outputs[place] = _gathered(scope, outputs[place], gathering)
            return outputs[0] if isinstance(out, Tensor) else tuple(outputs)

    return forward


def _own_part(scope: Scope, name: str, value: Any, cuts: tuple[Cut | None, ...]) -> Any:
    """This rank's rows of an argument: a tensor, or several with a cut each."""
    if isinstance(value, Tensor):
        assert cuts[0] is not None, "a plan's entry for one tensor is a cut"
        return _own_rows(scope, name, value, cuts[0])
    if value is None:
        return None
    pairs = zip(value, cuts, strict=True)
    return [t if cut is None else _own_rows(scope, name, t, cut) for t, cut in pairs]


def _own_rows(scope: Scope, name: str, tensor: Tensor, cut: Cut) -> Tensor:
    if cut.ndim not in (None, tensor.ndim):
        return tensor
    length, num_ranks = tensor.shape[cut.dim], scope.attention.num_ranks
    if length < num_ranks:
        raise ValueError(
            f"{name} has {length} tokens for {num_ranks} ranks, and each needs at least one: pad "
            "the text, with a mask if the model takes one, or use a smaller sp"
        )
    lens = shard_lengths(length, num_ranks)
    scope.notes.setdefault(_CUT, {})[name] = lens
    return shard_sequence(tensor, scope.attention.group, dim=cut.dim, seq_lens=lens)


def _gathered(scope: Scope, tensor: Tensor, cut: Cut) -> Tensor:
    group = scope.attention.group
    if group is None:
        return tensor
    lens = scope.notes[_CUT][MAIN]
    return gather_sequence_sum_grads(tensor, group, dim=cut.dim, seq_lens=lens)


class _LengthsOfPlan(Lengths):
    """Asked for once a forward, and held against what was cut: `cut`, by name."""

    def __init__(self, attention: UlyssesAttention, cut: Mapping[str, Lens]) -> None:
        super().__init__(attention)
        self._cut = cut

    def of(self, tensor: Tensor, dim: int, site: str) -> Lens:
        lens: Lens | None = None
        with suppress(ValueError):  # they are not the rows of the first attention
            lens = super().of(tensor, dim, site)
        main = self._cut.get(MAIN, ())
        others = (zip(main, other, strict=True) for other in self._cut.values())
        joined = [tuple(map(sum, pairs)) for pairs in others] if main else []
        if lens is None or lens not in (main, *joined):
            raise ValueError(
                f"{site} attends over {tensor.shape[dim]} rows on this rank, which are neither "
                f"those of {MAIN} nor these and another of what the model's plan shards, "
                f"{dict(self._cut)} (a rank each): unwrap the model, or shard its layers, with "
                "ulysses.parallelize(model, mesh, region=...)"
            )
        return lens
