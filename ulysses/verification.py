"""`verify`: is the wrapped module still the same function, forward and backward?

    report = ulysses.verify(make_model, {"input_ids": ids, "position_ids": places}, mesh,
                            dims={"input_ids": 1, "position_ids": 1})
    print(report)
    assert report.agrees

Runs the module plain in this process and distributed over the ranks, on the same whole inputs, and
compares outputs, a loss and every gradient. `ulysses verify` starts the processes for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import keystr, tree_flatten_with_path

from ulysses.data import check_same_across_ranks
from ulysses.gradients import average_gradients
from ulysses.sequence import shard_sequence
from ulysses.tiling import shard_lengths
from ulysses.verify_compare import Run, compared, cut_dim, sights
from ulysses.verify_report import Report
from ulysses.wrapping import describe, wrap

# What rounding may differ by, relative to the largest element. What is wrong in kind, such as a
# position or a missing token, differs by a thousandth and more.
TOLERANCES = {
    torch.float64: 1e-6,  # models compute their norms and positions in float32, whatever they hold
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}

Distribute = Callable[[nn.Module, DeviceMesh], Any]


def verify(
    factory: Callable[[], nn.Module],
    inputs: Mapping[str, Any],
    mesh: DeviceMesh,
    *,
    dims: Mapping[str, int],
    distribute: Distribute = wrap,
    shard_inputs: bool = True,
    token: int | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Report:
    """Compare a module in one process with the same module over `mesh["sp"]`.

    `factory()` makes the module; all ranks take the first rank's weights, in `dtype` and in eval
    mode, so that nothing is dropped at random. `inputs` are forward's keyword arguments, whole and
    equal on all ranks; `dims` has the sequence's dim of those that are sharded. `distribute` is
    `wrap` or `parallelize`, or a function that calls it with options; `shard_inputs=False` hands it
    whole inputs. Outputs that have this rank's tokens are compared with those rows of the whole,
    others as they are. The loss weighs all outputs at random; gradients are averaged over ranks as
    docs/gradients.md says. Then `token` (default: the middle one) of the first input in `dims` is
    changed, and the rows that see it are compared.

    `tolerance` is relative to the largest element, by default one for the dtype.

    Collective over the mesh; the report is equal on all ranks. Raises ValueError if inputs differ
    between ranks or their lengths differ, and whatever the module or `distribute` raises.
    """
    group = mesh["sp"]
    inputs = {name: _placed(value, mesh.device_type, dtype) for name, value in inputs.items()}
    check_same_across_ranks(inputs, group)
    lens = shard_lengths(_length(inputs, dims), group.size())
    token = sum(lens) // 2 if token is None else token
    alone, over_ranks = _modules(factory, distribute, mesh, dtype)

    cut = dims if shard_inputs else {}
    parts = _sharded(inputs, cut, group)
    expected = _run(alone, inputs, group)
    found = _run(over_ranks, parts, group, expected.outputs, cut)
    rate = TOLERANCES.get(dtype, 1e-4) if tolerance is None else tolerance
    rows = compared(expected, found, group, rate)

    changed = {**inputs, next(iter(dims)): _changed(inputs, dims, token)}
    again = _outputs(alone, changed), _outputs(over_ranks, _sharded(changed, cut, group))
    seen = sights((expected.outputs, again[0]), (found.outputs, again[1]), lens, group, rate)
    return Report(
        module=type(alone).__name__,
        lens=lens,
        token=token,
        attention=str(describe(over_ranks)),
        rows=rows,
        sights=seen,
    )


def _length(inputs: Mapping[str, Any], dims: Mapping[str, int]) -> int:
    """The whole sequence's length."""
    lengths = {name: inputs[name].shape[dim] for name, dim in dims.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"dims={dict(dims)} give the lengths {lengths}: name the sequence's dim of each input "
            "that is sharded, at least one, all of one length"
        )
    length: int = next(iter(lengths.values()))
    return length


def _placed(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    floating = value.is_floating_point()
    placed = value.detach().to(device_type, dtype if floating else value.dtype)
    return placed.clone().requires_grad_(floating)


def _modules(
    factory: Callable[[], nn.Module], distribute: Distribute, mesh: DeviceMesh, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    """The module plain and distributed, with the first rank's weights."""
    alone = factory().to(mesh.device_type, dtype).eval()
    _take_first_rank_s(list(alone.state_dict().values()), mesh["sp"])
    return alone, distribute(copy.deepcopy(alone), mesh)


def _take_first_rank_s(tensors: list[Tensor], group: DeviceMesh) -> None:
    """All on their way at once, in place where memory is contiguous."""
    received = [tensor.contiguous() for tensor in tensors]
    process = group.get_group()
    works = [dist.broadcast(t, group=process, group_src=0, async_op=True) for t in received]
    for tensor, whole, work in zip(tensors, received, works, strict=True):
        work.wait()
        if whole is not tensor:
            tensor.copy_(whole)


def _sharded(inputs: Mapping[str, Any], dims: Mapping[str, int], group: DeviceMesh) -> Any:
    """This rank's inputs, as leaves of a graph of their own."""
    parts = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            part = shard_sequence(value.detach(), group, dim=dims[name]) if name in dims else value
            value = part.detach().clone().requires_grad_(value.requires_grad)
        parts[name] = value
    return parts


def _outputs(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The floating-point tensors that a forward returns, by their place in it."""
    with torch.no_grad():
        return _named(module(**inputs))


def _named(returned: Any) -> dict[str, Tensor]:
    # Libraries' own output classes are mappings, and not all have told torch how to walk them.
    returned = dict(returned) if isinstance(returned, Mapping) else returned
    leaves, _ = tree_flatten_with_path(returned)
    return {
        f"output{keystr(path)}": leaf
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def _run(
    module: nn.Module,
    inputs: Mapping[str, Any],
    group: DeviceMesh,
    wholes: Mapping[str, Tensor] | None = None,
    cut: Collection[str] = (),
) -> Run:
    """Forward, a loss that weighs all outputs, and backward; over ranks if `wholes` are given.

    `wholes` are the outputs in one process, `cut` the inputs of which this rank has its part.
    """
    outputs = _named(module(**inputs))
    shares = []
    for seed, (name, output) in enumerate(outputs.items()):
        whole = output if wholes is None else wholes[name]
        weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed))
        weights = weights.to(output) / max(1, whole.numel())
        dim = cut_dim(name, output, whole)
        if dim is not None:  # the mean over ranks of such shares is the sum over all rows
            weights = shard_sequence(weights, group, dim=dim) * group.size()
        shares.append((output * weights).sum())
    loss = torch.stack(shares).sum()
    if loss.requires_grad:
        loss.backward()
    leaves = {name: v for name, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    if wholes is not None:
        average_gradients(module.parameters(), group)
        average_gradients([leaf for name, leaf in leaves.items() if name not in cut], group)
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    for name, leaf in leaves.items():
        # A shard's gradient is whole, but of a loss that counts once for each rank.
        share = leaf.grad if leaf.grad is None or name not in cut else leaf.grad / group.size()
        gradients[f"gradient of input {name}"] = share
    plain = {name: output.detach() for name, output in outputs.items()}
    return Run(plain, loss.detach(), gradients)


def _changed(inputs: Mapping[str, Any], dims: Mapping[str, int], token: int) -> Tensor:
    """The first input in `dims` with one token changed."""
    name, dim = next(iter(dims.items()))
    whole: Tensor = inputs[name].detach().clone()
    row = whole.select(dim, token)
    if whole.is_floating_point():
        row += 1.0
        return whole
    others = (whole.select(dim, place) for place in range(whole.shape[dim]))
    other = next((other for other in others if not torch.equal(other, row)), None)
    if other is None:
        raise ValueError(f"all tokens of {name} are equal: give values that differ")
    row.copy_(other.clone())
    return whole
