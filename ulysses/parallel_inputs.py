"""`parallelize` at the inputs: tokens are sharded before the model and gathered behind it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from ulysses.group import process_group, rank_in
from ulysses.loss import count_targets, gradient_mesh, mean_over_ranks, token_loss
from ulysses.sequence import Group, gather_sequence_sum_grads, shard_sequence
from ulysses.tiling import shard_lengths
from ulysses.wrap_callable import Mesh, sequence_group
from ulysses.wrap_families import families
from ulysses.wrap_lengths import holds_tokens
from ulysses.wrapping import as_root, wrap, wrapping_of

Outputs = Literal["gathered", "sharded"]


@dataclass(frozen=True)
class _Sharding:
    """Where the sequence lies in a model's arguments, and over which ranks it is sharded."""

    group: Group
    loss_group: Group  # of all ranks whose tokens count in one loss
    seq_dim: int
    dims: Mapping[str, int] | None
    outputs: Outputs

    def lens(self, given: Mapping[str, Any]) -> tuple[int, ...]:
        """Every rank's length of the whole sequence in these arguments."""
        lengths = {name: tensor.shape[dim] for name, tensor, dim in self._by_token(given)}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"no one length of the sequence to be sharded: {lengths or list(given)}; name the "
                "sequence's dim of each argument in dims={...}"
            )
        _, num_ranks = rank_in(process_group(self.group))
        length = next(iter(lengths.values()))
        if length < num_ranks:
            raise ValueError(
                f"a sequence of {length} tokens over {num_ranks} ranks: each needs at least one"
            )
        return shard_lengths(length, num_ranks)

    def _by_token(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, int]]:
        """The arguments that `dims` names, or the first that holds tokens."""
        for name, value in given.items():
            if self.dims is not None:
                if name in self.dims and isinstance(value, Tensor):
                    yield name, value, self.dims[name]
            elif isinstance(value, Tensor) and "mask" not in name and holds_tokens(value):
                yield name, value, self.seq_dim
                return

    def part(self, name: str, value: Any, lens: tuple[int, ...]) -> Any:
        """This rank's part of an argument, or of the tensors in it."""
        if (self.dims is not None and name not in self.dims) or "mask" in name:
            return value
        dim = self.seq_dim if self.dims is None else self.dims[name]

        def of_tensor(tensor: Tensor) -> Tensor:
            if tensor.ndim <= max(dim, 1) or tensor.shape[dim] != sum(lens):
                return tensor
            return shard_sequence(tensor, self.group, dim=dim, seq_lens=lens)

        return tree_map_only(Tensor, of_tensor, value)

    def returned(self, out: Any, lens: tuple[int, ...], kept: tuple[int, ...] | None = None) -> Any:
        """The outputs, with every tensor gathered that has this rank's rows if so asked.

        `kept` are all ranks' numbers of logits where only some were asked for: these few are
        gathered in any case.
        """
        if kept is not None:
            rank, _ = rank_in(process_group(self.group))
            own = out.logits[:, out.logits.shape[1] - kept[rank] :]
            logits = gather_sequence_sum_grads(own, self.group, dim=1, seq_lens=kept)
            rest = {name: value for name, value in out.items() if name != "logits"}
            return type(out)(**self.returned(rest, lens), logits=logits)
        rank, num_ranks = rank_in(process_group(self.group))
        dim = self.seq_dim

        def of_tensor(tensor: Tensor) -> Tensor:
            if tensor.ndim <= dim or tensor.shape[dim] != lens[rank]:
                return tensor
            return gather_sequence_sum_grads(tensor, self.group, dim=dim, seq_lens=lens)

        if num_ranks == 1 or self.outputs == "sharded":
            return out
        return tree_map_only(Tensor, of_tensor, out)


def shard_inputs(
    model: nn.Module,
    mesh: Mesh,
    *,
    dims: Mapping[str, int] | None,
    outputs: Outputs,
    **options: Any,
) -> None:
    """Wraps a model, and shards what it is called with."""
    wrap(model, mesh, **options)
    wrapping = wrapping_of(model)
    assert wrapping is not None, "just wrapped"
    wrapping.cuts_inputs = True
    both = isinstance(mesh, DeviceMesh) and "dp" in (mesh.mesh_dim_names or ())
    group = sequence_group(mesh)
    sharding = _Sharding(
        group=group,
        loss_group=gradient_mesh(mesh) if both and isinstance(mesh, DeviceMesh) else group,
        seq_dim=wrapping.seq_dim,
        dims=dims,
        outputs=outputs,
    )
    forward = _on_whole_inputs(getattr(model.forward, "__func__"), sharding)  # noqa: B009
    forward.ulysses_wrapping = wrapping  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _on_whole_inputs(inner: Callable[..., Any], sharding: _Sharding) -> Callable[..., Any]:
    """A forward that is given whole inputs, around one of this rank's part."""
    signature = inspect.signature(inner)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    further = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        for name in further:
            given |= given.pop(name, {})
        if any(family.continues(given) for family in families()):
            return inner(self, *args, **kwargs)
        targets = _targets(self, given)
        count = given.pop("num_items_in_batch", None) if targets is not None else None
        lens = sharding.lens(given)
        kept = _kept_rows(given, lens, sharding.group)
        own = {name: sharding.part(name, value, lens) for name, value in given.items()}
        rest = {name: own.pop(name) for name in list(own) if name not in kinds}
        bound.arguments = {next(iter(kinds)): self, **own, **dict.fromkeys(further, rest)}
        out = inner(*bound.args, **bound.kwargs)
        if targets is None:
            return sharding.returned(out, lens, kept)
        own_targets = shard_sequence(targets, sharding.group, seq_lens=lens)
        loss = _loss(out.logits, own_targets, count, sharding.loss_group)
        return type(out)(**{"loss": loss, **sharding.returned(out, lens)})

    return as_root(forward)


def _kept_rows(
    given: dict[str, Any], lens: tuple[int, ...], group: Group
) -> tuple[int, ...] | None:
    """Every rank's number of rows of logits, where only some of the whole are asked for."""
    rank, _ = rank_in(process_group(group))
    found = (family.take_rows(given, lens, rank) for family in families())
    return next((counts for counts in found if counts is not None), None)


def _targets(model: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Whole targets of a loss that this model would make, taken out of its arguments."""
    found = (family.take_targets(model, given) for family in families())
    return next((targets for targets in found if targets is not None), None)


def _loss(logits: Tensor, targets: Tensor, count: Tensor | int | None, group: Group) -> Tensor:
    """The whole mean loss, equal on all ranks; its gradient is this rank's share."""
    if count is None:
        count = count_targets(targets, group)
    share = token_loss(logits, targets, count, group)
    return share + (mean_over_ranks(share, group) - share.detach())
