"""The kernel's self-test: every way in which the layer calls it, beside a reference on the CPU.

Some stacks accept a call and return the plain average of the values, or read another mask than the
one given, so each operator, layout, sparse mode, dtype, head dim and grouping is compared by value.
The reference is attention written out in float64; the bounds are those of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ulysses.backends.base import Band, LocalAttention
from ulysses.conformance import Case, reference_attention
from ulysses.launch.doctor_check import KernelCheck

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Orders of axes and the kit's names for them; SBND is what the exchange delivers.
LAYOUTS = {"BSND": "BSHD", "SBND": "SBHD", "BNSD": "BHSD"}
# What rows see, with numbers of queries and keys: Ascend's sparse modes 0, 2, 3, 4, 3, 0 and 3.
SHOWS = {
    "all": (37, 61, Band()),
    "top left": (37, 61, Band(None, 0)),
    "bottom right": (37, 61, Band(None, 24)),
    "window": (37, 61, Band(7, 33)),
    "empty rows": (61, 37, Band(None, -24)),
    "mask": (37, 61, Band()),  # a tensor, with rows that see nothing
    # Beyond the 2048 x 2048 triangle from which Ascend reads modes 2 to 4.
    "long": (100, 2500, Band(None, 2400)),
}
_LONG = 2048
# Head dim, heads, key/value heads; 72 has to be padded for one operator.
_HEADS = ((128, 2, 2), (128, 4, 2), (64, 4, 2), (72, 2, 2))
_HEADS_OF_LONG = ((64, 1, 1),)
# Relative to the largest value. Half precisions round twice; float32 products may be rounded to
# fewer bits by a matrix unit. A wrong mask, scale or head is off by far more.
_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}


class _Wrong(Exception):
    """A result that is not attention's."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a case has to give: float64, on the CPU."""

    output: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]  # of query, key and value
    average: Tensor  # of the values, for each query head: what no attention at all gives


def cases() -> Iterator[tuple[str, Case]]:
    """What rows see, and the case: every combination."""
    for shows, (num_queries, num_keys, band) in SHOWS.items():
        long = num_keys > _LONG
        for dim, heads, kv_heads in _HEADS_OF_LONG if long else _HEADS:
            case = Case(
                name=f"{num_queries} x {num_keys}, head dim {dim}, {heads}/{kv_heads} heads",
                batch=1 if long else 2,
                num_queries=num_queries,
                num_keys=num_keys,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                value_dim=dim,
                band=band,
                scale=dim**-0.5,
                bool_mask="BQK" if shows == "mask" else "",
            )
            yield shows, case


def kernel_checks(kernel: LocalAttention, device: torch.device) -> Iterator[KernelCheck]:
    """The kernel in every case, dtype and layout, with and without gradients."""
    for dtype, (shows, case) in product(DTYPES, cases()):
        reference = _reference(case, dtype)
        for (layout, memory), training in product(LAYOUTS.items(), (False, True)):
            laid_out = replace(case, memory=(memory,) * 3)
            error, fault = None, None
            try:
                error = _error(kernel, laid_out, dtype, device, reference, training=training)
            except Exception as raised:  # whatever a kernel raises is a finding
                fault = _told(raised)
            yield KernelCheck(
                operator=operator_name(kernel, case, dtype, device, training=training),
                layout=layout,
                dtype=str(dtype).removeprefix("torch."),
                shows=shows,
                sizes=case.name,
                error=error,
                fault=fault,
            )


def _told(raised: Exception) -> str:
    """An exception in one line."""
    line = " ".join(str(raised).split())[:300]
    return line if isinstance(raised, _Wrong) else f"{type(raised).__name__}: {line}"


def operator_name(
    kernel: LocalAttention, case: Case, dtype: torch.dtype, device: torch.device, *, training: bool
) -> str:
    """What runs the case: an Ascend operator by its own name."""
    if kernel.name == "ascend":
        from ulysses.backends.ascend_limits import choose_operator

        return choose_operator(case.problem(dtype, device.type, requires_grad=training))
    return f"{kernel.name}, {'training' if training else 'inference'}"


def _reference(case: Case, dtype: torch.dtype) -> Reference:
    """Of the very numbers that the kernel is given in this dtype."""
    drawn = case.tensors(dtype, torch.device("cpu"))
    query, key, value = (tensor.double().requires_grad_() for tensor in drawn)
    added = case.added(dtype, torch.device("cpu"))
    output, lse = reference_attention(
        query, key, value, band=case.band, scale=case.scale, added=added
    )
    upstream = _upstream(output.shape, dtype).double()
    gradients = torch.autograd.grad(output, (query, key, value), upstream)
    group = case.num_heads // case.num_kv_heads
    average = value.detach().mean(1, keepdim=True).repeat_interleave(group, 2)
    return Reference(output.detach(), lse.detach(), gradients, average)


def _upstream(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def _error(
    kernel: LocalAttention,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    reference: Reference,
    *,
    training: bool,
) -> float:
    """The largest relative error of all results; raises _Wrong if it is beyond the bound."""
    drawn = case.tensors(dtype, device)
    query, key, value = (tensor.detach().requires_grad_(training) for tensor in drawn)
    options: dict[str, Any] = {"band": case.band, "scale": case.scale}
    options |= case.added(dtype, device).arguments
    out = kernel(query, key, value, **options)
    _explain_if_degenerate(out, reference)
    compared = [("output", out, reference.output)]
    if training:
        upstream = _upstream(out.shape, dtype).to(device)
        gradients = torch.autograd.grad(out, (query, key, value), upstream)
        names = ("gradient of query", "gradient of key", "gradient of value")
        compared += zip(names, gradients, reference.gradients, strict=True)
    elif hasattr(kernel, "attend_with_lse"):
        again, lse = kernel.attend_with_lse(query, key, value, **options)
        compared += [("output beside the log-sum-exp", again, reference.output)]
        compared += [("log-sum-exp", lse, reference.lse)]
    return max(_difference(*each, _BOUNDS[dtype]) for each in compared)


def _difference(what: str, found: Tensor, expected: Tensor, bound: float) -> float:
    found = found.detach().cpu().double()
    if found.shape != expected.shape:
        raise _Wrong(f"{what} has shape {list(found.shape)}, not {list(expected.shape)}")
    # Equal infinities have no distance.
    gap = torch.where(found == expected, 0.0, found - expected).abs().max().item()
    if not isfinite(gap):
        raise _Wrong(f"{what} has a NaN or infinity where none belongs, or lacks -inf")
    error = gap / max(1.0, expected.nan_to_num(neginf=0.0).abs().max().item())
    if error > bound:
        raise _Wrong(f"{what} is off by {error:.2g}, more than {bound:.2g}")
    return error


def _explain_if_degenerate(out: Tensor, reference: Reference) -> None:
    """Raises _Wrong for two answers that broken stacks are known to give."""
    found = out.detach().cpu().double()
    if found.shape != reference.output.shape:
        return
    if torch.allclose(found, reference.average.expand_as(found), atol=0.02):
        raise _Wrong("output is the plain average of the values: scores have no effect")
    if not found.any():
        raise _Wrong("output is all zeros")
