"""`wrap`: a module that attends, unchanged, over ranks that share its sequence.

    model = ulysses.wrap(model, mesh)  # the same object; or of mesh["sp"], or a group
    out = model(ulysses.shard_sequence(x, mesh["sp"]))
    print(ulysses.describe(model))  # what attends, and by which route

The module is given this rank's rows of every sequence, however many, and returns this rank's rows.
Its attention alone sees the others'. Nothing but the module is touched, and of it only the forward
of instances: parameters, state_dict and class stay. A deep copy is wrapped too; a pickled module is
not, since groups can't travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses import wrap_probe
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import LocalAttention
from ulysses.eager import in_eager
from ulysses.loaded import is_dtensor
from ulysses.wrap_callable import Mesh, sequence_group
from ulysses.wrap_families import families, plan_of
from ulysses.wrap_lengths import Lengths, lengths_of_inputs
from ulysses.wrap_mixers import mixers
from ulysses.wrap_multihead import multihead_attention
from ulysses.wrap_open import new_scope, open_scope, opened
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope, Site, Wrapping
from ulysses.wrap_sites import declared_heads, find_sites
from ulysses.wrap_table import Row, Table

Names = Collection[str | type]  # parts by name, by the name of their class, or by class
_Module = TypeVar("_Module", bound=nn.Module)
Forward = Callable[..., Any]  # a forward as it stands in a class: the module comes first
Around = Callable[[Forward, Wrapping], Forward]


def wrap(
    module: _Module,
    mesh: Mesh,
    *,
    replicated: Names = (),
    local: Names = (),
    handled: Names = (),
    seq_dim: int | None = None,
    probe: bool = True,
    backend: str | LocalAttention = "auto",
    grid: tuple[int, int] | Literal["auto"] = "auto",
) -> _Module:
    """Make a module attend over the ranks of `mesh`, a mesh with an axis "sp", or a group.

    Of parts, by name, by class name or by class: `replicated` are attention whose keys and values
    are whole on every rank, as of a short text; `local` is attention that does not run along the
    sharded sequence, and is left alone; `handled` are layers that mix tokens otherwise and are
    right on a shard all the same. `seq_dim` is the sequence's dim in the inputs, 0 for a module
    with batch_first=False and else 1. `backend` and `grid` are those of `UlyssesAttention`.

    With `probe`, the first forward runs the module three times more, without attention and
    communication, to see that nothing else mixes tokens or counts positions; not where anything is
    `handled`. A module that has been verified can do without.

    Returns the module itself. Raises ValueError, naming the parts, if it is wrapped already, if
    nothing in it attends or something does by no known route, if a layer mixes tokens in another
    way, or if tensor parallelism does not divide its heads. A forward raises ValueError or
    RuntimeError if what it does can't be exact.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{type(module).__name__} is no nn.Module; for a function of query, key and value "
            "there is ulysses.wrap_function"
        )
    require_unwrapped(module)
    if plan_of(module) is not None:
        raise ValueError(
            f"{type(module).__name__} makes its tokens and positions of whole inputs: use "
            "ulysses.parallelize(model, mesh), or wrap its layers"
        )
    found = find_sites(module, replicated, local)
    require_no_mixers(module, handled)
    require_whole_heads(module, found, mesh)
    attention = UlyssesAttention(sequence_group(mesh), backend=backend, grid=grid)
    wrapping = Wrapping(
        attention,
        found,
        seq_dim=default_seq_dim(module) if seq_dim is None else seq_dim,
        unprobed={""} if probe and not handled else set(),
    )
    take_over(module, wrapping, {"": rooted})
    return module


def unwrap(module: _Module) -> _Module:
    """Undo `wrap`: the module computes bit for bit what it did before. Returns the module.

    Raises ValueError if it is not the module that was wrapped.
    """
    if not _is_root(module):
        wrapped = [name for name, part in module.named_modules() if wrapping_of(part)]
        raise ValueError(
            f"{type(module).__name__} is not wrapped"
            + (
                f", but its parts {', '.join(wrapped)} are: unwrap what was wrapped"
                if wrapped
                else ""
            )
        )
    for part in module.modules():
        if wrapping_of(part):
            del part.forward
    for family in families():
        family.give_back(module)
    return module


def wrapping_of(module: nn.Module) -> Wrapping | None:
    """The wrapping to which this very module belongs."""
    found: Wrapping | None = getattr(module.forward, "ulysses_wrapping", None)
    return found


def describe(module: nn.Module) -> Table:
    """What attends in a module, wrapped or not, and by which route; print it.

    Head counts are the declared ones until a forward of the wrapped module has shown those that
    the layer gets, which are fewer under tensor parallelism.
    """
    wrapping = wrapping_of(module)
    found = wrapping.sites if wrapping else find_sites(module, (), ())
    rows = []
    for name, site in found.items():
        seen = wrapping.seen.get(site.name) if wrapping else None
        heads = declared_heads(module.get_submodule(name))
        rows.append(
            Row(
                name=site.name,
                kind=site.kind,
                route=site.route,
                policy=site.policy.value,
                num_heads=seen.num_heads if seen else heads[0],
                num_kv_heads=seen.num_kv_heads if seen else heads[1],
                mask=seen.mask if seen else None,
            )
        )
    return Table(type(module).__name__, tuple(rows), wrapping is not None)


def take_over(module: nn.Module, wrapping: Wrapping, around: Mapping[str, Around]) -> None:
    """Gives the module and those of its parts that need one a forward of their own.

    `around` are further forwards around those of parts, by name.
    """
    forwards: list[tuple[nn.Module, Forward]] = []
    for name, part in module.named_modules():
        forward = type(part).forward
        for family in families():
            forward = family.routed(part, forward, wrapping)
        if name in wrapping.sites:
            forward = _attending(forward, wrapping, wrapping.sites[name])
        elif isinstance(part, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            forward = _scoped(forward, wrapping)  # or called alone it takes torch's fused path
        if name in around:
            forward = around[name](forward, wrapping)
        if forward is not type(part).forward:
            _require_own_forward(name, part)
            forwards.append((part, forward))
    for family in families():
        family.take_over(module, wrapping)
    for part, forward in forwards:
        forward.ulysses_wrapping = wrapping  # type: ignore[attr-defined]
        # A bound method of this name pickles as the class's own, and is copied with its module.
        forward.__name__ = "forward"
        part.forward = MethodType(forward, part)


def _require_own_forward(name: str, part: nn.Module) -> None:
    if "forward" in vars(part):
        place = f"{name} ({type(part).__name__})" if name else type(part).__name__
        raise ValueError(
            f"{place} has had its forward replaced, which copies and pickles of a wrapped module "
            "could not follow: wrap it first, and replace the forward then"
        )


def _attending(inner: Forward, wrapping: Wrapping, site: Site) -> Forward:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with opened(wrapping) as scope, scope.inside(site):
            if isinstance(self, nn.MultiheadAttention) and site.policy is not Policy.LOCAL:
                return multihead_attention(scope, self, *args, **kwargs)
            return inner(self, *args, **kwargs)

    wrapping.reopened_by(forward)
    return forward


def _scoped(inner: Forward, wrapping: Wrapping) -> Forward:
    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with opened(wrapping):
            return inner(self, *args, **kwargs)

    wrapping.reopened_by(forward)
    return forward


def rooted(inner: Forward, wrapping: Wrapping) -> Forward:
    """The whole module's forward: lengths are asked for once, and the first is probed."""

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if open_scope(wrapping) is not None:
            return inner(self, *args, **kwargs)
        lengths = Lengths(wrapping.attention)
        if not any(family.continues((args, kwargs)) for family in families()):
            lengths = lengths_of_inputs(wrapping.attention, (args, kwargs), wrapping.seq_dim)
        probe_once("", self, inner, (args, kwargs), wrapping, lengths)
        with new_scope(wrapping, lengths) as scope:
            out = inner(self, *args, **kwargs)
            require_reached(self, scope)
            return out

    wrapping.reopened_by(forward)
    return as_root(forward)


def as_root(forward: Forward) -> Forward:
    """The forward of a whole wrapped module, marked as such.

    torch.compile leaves it in eager: a mode that looks at every function's call has no graph.
    """
    reason = "where a wrapped module's attention goes is decided on the host, call by call"
    marked: Any = in_eager(reason)(forward)
    marked.ulysses_root = True
    found: Forward = marked
    return found


def probe_once(
    name: str,
    module: nn.Module,
    inner: Forward,
    inputs: wrap_probe.Inputs,
    wrapping: Wrapping,
    lengths: Lengths,
) -> None:
    """Probes the wrapped module's part of that name, unless it has been."""
    if name in wrapping.unprobed and lengths.main is not None:
        with new_scope(wrapping, lengths, neutral=True):
            run = functools.partial(inner, module)
            wrap_probe.probe(module, run, inputs, lengths.main, wrapping.seq_dim)
        wrapping.unprobed.discard(name)


def require_reached(module: nn.Module, scope: Scope) -> None:
    if not scope.num_calls:
        names = ", ".join(site.name for site in scope.wrapping.sites.values())
        raise RuntimeError(
            f"{type(module).__name__} ran without any attention that ulysses takes over, of those "
            f"found ({names}): it computed from this rank's shard alone. Unwrap it, or wrap what "
            "attends"
        )


def _is_root(module: nn.Module) -> bool:
    return getattr(module.forward, "ulysses_root", False)


def require_unwrapped(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if wrapping_of(part):
            place = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise ValueError(f"{place} is wrapped already: ulysses.unwrap what was wrapped first")


def require_whole_heads(module: nn.Module, found: dict[str, Site], mesh: Mesh) -> None:
    """Refuses head counts that the mesh's tensor parallelism does not divide."""
    if not isinstance(mesh, DeviceMesh) or "tp" not in (mesh.mesh_dim_names or ()):
        return
    num_ranks = mesh["tp"].size() if mesh.ndim > 1 else mesh.size()
    for name, site in found.items():
        part = module.get_submodule(name)
        split = any(map(is_dtensor, part.parameters()))
        if split and not hasattr(part, "config"):
            continue  # a count of its own is what tensor parallelism has left it
        counts = [count for count in declared_heads(part) if count]
        if any(count % num_ranks for count in counts):
            told = " query and ".join(map(str, counts)) + " key/value heads"
            raise ValueError(
                f"{site.name} ({site.kind}) has {told}, which tp={num_ranks} does not divide: each "
                "rank must hold whole heads, so use a tp that divides both and a larger sp"
            )


def require_no_mixers(module: nn.Module, handled: Names) -> None:
    """Refuses layers that mix tokens otherwise than by attention, unless they are handled."""
    if unhandled := mixers(module, handled):
        raise ValueError(
            f"{len(unhandled)} layers mix tokens otherwise than by attention, so a shard alone "
            f"would be wrong: {'; '.join(unhandled)}. Name those that are right all the same in "
            "handled=[...], or shard behind them: ulysses.parallelize(model, mesh, region=...)"
        )


def default_seq_dim(module: nn.Module) -> int:
    """0 for what torch's modules call batch_first=False, else 1."""
    first = next((p for p in module.modules() if hasattr(p, "batch_first")), None)
    return 1 if first is None or first.batch_first else 0
