"""Calls of the layer on NPUs, and how far they are from attention in one process on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ulysses
from tests import reference
from tests.npu_ops.examples import Recorder
from ulysses.backends.base import Band
from ulysses.tiling import shard_lengths


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of the layer with `options`, and the reference's band and mask for them."""

    heads: tuple[int, int] = (8, 8)
    length: int = 19
    lens: tuple[int, ...] | None = None
    batch: int = 2
    dims: tuple[int, int] = (16, 16)
    grid: tuple[int, int] | str = "auto"
    band: Band = Band()
    options: dict[str, Any] = field(default_factory=dict)
    mask: str = ""  # dims of B, H, Q, K that it has
    mask_is_bool: bool = True
    by_rows: bool = False
    documents: tuple[int, ...] = ()


CAUSAL = {"is_causal": True}
CASES = {
    "plain": Case(),
    "grouped heads": Case(heads=(12, 4)),
    "fewer heads than ranks": Case(heads=(3, 1)),
    "uneven heads": Case(heads=(10, 5)),
    "chosen lengths": Case(lens=(3, 0, 7, 1, 5, 0, 2, 4)),
    "narrow values": Case(dims=(24, 8)),
    "causal": Case(band=Band(None, 0), options=CAUSAL),
    "causal, grouped, uneven": Case(
        heads=(6, 2), band=Band(None, 0), options=CAUSAL, lens=(1, 9, 0, 4, 2, 2, 6, 1)
    ),
    "window": Case(band=Band(-4, 2), options={"window": (4, 2)}),
    "causal window": Case(band=Band(-4, 0), options={"window": (4, None), **CAUSAL}),
    "key padding": Case(mask="BK"),
    "key padding, causal": Case(mask="BK", band=Band(None, 0), options=CAUSAL),
    "mask of each head": Case(mask="HQK"),
    "rows of a mask": Case(mask="BQK", by_rows=True),
    "float mask": Case(mask="HQK", mask_is_bool=False),
    "rows of a float mask, causal": Case(
        mask="QK", mask_is_bool=False, by_rows=True, band=Band(None, 0), options=CAUSAL
    ),
    "documents": Case(documents=(0, 5, 6, 17), options=CAUSAL, band=Band(None, 0)),
}
# One block of all rows, rows and heads, blocks of rows only.
GRIDS = {2: [(1, 2)], 4: [(2, 2), (1, 4)], 8: [(4, 2), (2, 4)]}


@dataclass(frozen=True)
class Whole:
    """What a call is about on all ranks together; the mask as SDPA means it."""

    tensors: list[Tensor]
    mask: Tensor | None
    upstream: Tensor


def differences(rank: int, num_ranks: int, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Largest differences on this rank, in units of the largest value where that is over 1.

    Of an inference call's output, of a training call's, and of all its gradients.
    """
    torch.npu.set_device(rank)
    lens = case.lens[:num_ranks] if case.lens else shard_lengths(case.length, num_ranks)
    whole = _drawn(case, sum(lens), dtype)
    found = _on_npu(case, whole, lens, rank)
    expected = _expected(case, whole)
    assert found.keys() == expected.keys()
    return {
        name: _difference(found[name].cpu().double(), _own(case, name, of_all, lens, rank))
        for name, of_all in expected.items()
    }


def operators_called(
    rank: int, num_ranks: int, case: Case, dtype: torch.dtype
) -> list[tuple[str, str]]:
    """Each forward operator that an inference and a training call run, and its layout."""
    with Recorder() as recorder:
        differences(rank, num_ranks, case, dtype)
    return [(name, arguments["input_layout"]) for name, arguments in recorder.calls]


def _on_npu(case: Case, whole: Whole, lens: tuple[int, ...], rank: int) -> dict[str, Tensor]:
    """This rank's results; of a mask that every rank holds whole, the sum of all shares."""
    attention = ulysses.UlyssesAttention(dist.group.WORLD, grid=case.grid, check=True)
    query, key, value = (
        reference.shard(tensor, lens, rank).npu().requires_grad_() for tensor in whole.tensors
    )
    mask = whole.mask
    if mask is not None:
        mask = _own(case, "dmask", mask, lens, rank).contiguous().npu()
        mask.requires_grad_(not case.mask_is_bool)
    options = case.options | ({"documents": case.documents} if case.documents else {})

    def call() -> Tensor:
        given = ulysses.QueryRows(mask) if case.by_rows else mask
        return attention(query, key, value, given, seq_lens=lens, **options)

    with torch.no_grad():
        inferred = call()
    out = call()
    assert out.device.type == "npu"
    assert out.dtype == query.dtype
    out.backward(reference.shard(whole.upstream, lens, rank).npu())
    results = {"inference": inferred, "output": out}
    results |= {"dq": query.grad, "dk": key.grad, "dv": value.grad}
    if mask is not None and mask.requires_grad:
        if not case.by_rows:
            dist.all_reduce(mask.grad)
        results["dmask"] = mask.grad
    return results


def _expected(case: Case, whole: Whole) -> dict[str, Tensor]:
    """The same of all ranks together, in float64 on the CPU."""
    query, key, value = (tensor.double().requires_grad_() for tensor in whole.tensors)
    mask = _documents(case) if case.documents else whole.mask
    learns_mask = bool(case.mask) and not case.mask_is_bool
    if learns_mask:
        assert mask is not None
        mask = mask.double().requires_grad_()
    out = reference.attention(query, key, value, band=case.band, mask=mask)
    out.backward(whole.upstream.double())
    results = {"inference": out, "output": out}
    results |= {"dq": query.grad, "dk": key.grad, "dv": value.grad}
    return results | ({"dmask": mask.grad} if learns_mask else {})


def _own(case: Case, name: str, of_all: Tensor, lens: tuple[int, ...], rank: int) -> Tensor:
    """This rank's part of a result, or of a mask: its rows, or all of what every rank holds."""
    if name != "dmask":
        return reference.shard(of_all, lens, rank)
    if not case.by_rows:
        return of_all
    return reference.shard(of_all.transpose(1, 2), lens, rank).transpose(1, 2)


def _drawn(case: Case, length: int, dtype: torch.dtype) -> Whole:
    """Random numbers, the same on every rank, and a mask that hides a third."""
    (heads, kv_heads), (dim, value_dim) = case.heads, case.dims
    draw = reference.draw
    tensors = [
        draw(case.batch, length, heads, dim, seed=1, dtype=dtype),
        draw(case.batch, length, kv_heads, dim, seed=2, dtype=dtype),
        draw(case.batch, length, kv_heads, value_dim, seed=3, dtype=dtype),
    ]
    mask = None
    if case.mask:
        sizes = zip("BHQK", (case.batch, heads, length, length), strict=True)
        shape = [size if dim in case.mask else 1 for dim, size in sizes]
        hidden = draw(*shape, seed=5) > 0.4
        mask = ~hidden
        if not case.mask_is_bool:
            mask = draw(*shape, seed=6, dtype=dtype).masked_fill(hidden, -torch.inf)
    return Whole(tensors, mask, draw(case.batch, length, heads, value_dim, seed=4, dtype=dtype))


def _documents(case: Case) -> Tensor:
    """Documents are blocks along the diagonal."""
    visible = torch.zeros(case.length, case.length, dtype=torch.bool)
    for start, stop in pairwise(case.documents):
        visible[start:stop, start:stop] = True
    return visible


def _difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
