"""`parallelize`: a whole model over ranks that share its sequences, called as before.

    model = ulysses.parallelize(model, mesh)
    out = model(input_ids=ids, attention_mask=mask, labels=labels)  # whole ones, on every rank
    out.loss.backward()  # then average gradients over dp x sp: see ulysses.gradient_mesh

Sharding happens on the way in, at one of two places. At the inputs, every layer works on this
rank's tokens alone, embeddings and logits too: right for models that are told positions. At a
region, the model's stack of layers, what comes before and after is computed whole by every rank:
right for any model whose attention lies in one stack. A model of diffusers that has a plan of its
own for context parallelism is sharded where that says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from torch import nn

from ulysses.backends.base import LocalAttention
from ulysses.parallel_inputs import Outputs, shard_inputs
from ulysses.parallel_plan import shard_by_plan
from ulysses.parallel_region import find_region, shard_region
from ulysses.wrap_callable import Mesh
from ulysses.wrap_families import families, plan_of
from ulysses.wrapping import Names

_Module = TypeVar("_Module", bound=nn.Module)


def parallelize(
    model: _Module,
    mesh: Mesh,
    *,
    region: str | None = "auto",
    dims: Mapping[str, int] | None = None,
    outputs: Outputs = "gathered",
    replicated: Names = (),
    local: Names = (),
    handled: Names = (),
    probe: bool = True,
    backend: str | LocalAttention = "auto",
    grid: tuple[int, int] | Literal["auto"] = "auto",
) -> _Module:
    """Shard a model's sequences over the ranks of `mesh`, its axis "sp", or a group.

    The model then takes whole inputs, equal on all ranks of the group; `ulysses.unwrap` undoes it.
    `region` names the stack of layers to shard, None shards the inputs; "auto" shards the inputs of
    transformers' language models, follows the plan of diffusers' models (which is not probed), and
    shards the layers of anything else. For inputs, `dims` has the
    sequence's dim of each argument of forward that is sharded; by default all tensors but masks are
    that are as long as the first, in dim 1. `outputs` are whole on every rank, or with sharded
    inputs may stay this rank's rows ("sharded"), which spares a long text's logits. The other
    options are those of `ulysses.wrap`.

    Gradients follow the one rule of `ulysses.loss`: averaged over the ranks they are those of one
    process, be it of a loss that the model makes of labels, or of one that every rank computes
    alike from whole outputs. With a mesh of dp and sp, a loss of labels is the mean over all
    tokens of both.

    Returns the model itself. Raises ValueError as `ulysses.wrap` does, and for a model without one
    stack of layers.
    """
    options: dict[str, Any] = {
        "replicated": replicated,
        "local": local,
        "handled": handled,
        "probe": probe,
        "backend": backend,
        "grid": grid,
    }
    if outputs not in ("gathered", "sharded"):
        raise ValueError(f'outputs={outputs!r}: pass "gathered" or "sharded"')
    by_inputs = any(family.shards_inputs(model) for family in families())
    if region is None or (region == "auto" and by_inputs) or dims is not None:
        shard_inputs(model, mesh, dims=dims, outputs=outputs, **options)
        return model
    if outputs == "sharded":
        raise ValueError(
            f"region={region!r} with outputs='sharded': behind a region all is whole; pass "
            "region=None if this model's inputs can be sharded"
        )
    if region == "auto" and (plan := plan_of(model)) is not None:
        del options["probe"]
        shard_by_plan(model, mesh, plan, **options)
        return model
    name = find_region(model, local) if region == "auto" else region
    shard_region(model, mesh, name, **options)
    return model
