"""The kernel's self-test: every way in which the layer calls it, beside a reference on the CPU.

Some stacks accept a call and return the plain average of the values, or read another mask than the
one given, so each operator, layout, sparse mode, dtype, head dim and grouping is compared by value.
The reference is attention written out in float64; the bounds are those of the dtype. Packed
documents have a layout of their own: doctor_packed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ulysses.backends.base import Band, LocalAttention
from ulysses.conformance import Case, reference_attention
from ulysses.launch.doctor_check import KernelCheck
from ulysses.launch.doctor_compare import (
    Reference,
    error_of,
    explain_if_degenerate,
    referred,
    training_error,
    tried,
)

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
# Head dim, heads, key/value heads: the first in every layout, the others in one of them. 72 has to
# be padded for one operator.
_HEADS = ((128, 4, 2), (128, 2, 2), (64, 4, 2), (72, 2, 2))
_HEADS_OF_LONG = ((64, 1, 1),)
_OF_ALL_HEADS = "SBND"


def cases() -> Iterator[tuple[str, Case, tuple[str, ...]]]:
    """What rows see, the case, and the layouts in which it is run."""
    for shows, (num_queries, num_keys, band) in SHOWS.items():
        long = num_keys > _LONG
        for number, (dim, heads, kv_heads) in enumerate(_HEADS_OF_LONG if long else _HEADS):
            sinks = shows == "mask" and kv_heads < heads
            case = Case(
                name=f"{num_queries} x {num_keys}, head dim {dim}, {heads}/{kv_heads} heads"
                + ", sinks" * sinks,
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
                sinks=sinks,
            )
            yield shows, case, (_OF_ALL_HEADS,) if number else (*LAYOUTS,)


def kernel_checks(kernel: LocalAttention, device: torch.device) -> Iterator[KernelCheck]:
    """The kernel in every case, dtype and layout, with and without gradients."""
    for dtype, (shows, case, layouts) in product(DTYPES, cases()):
        reference = _reference(case, dtype)
        for layout, training in product(layouts, (False, True)):
            laid_out = replace(case, memory=(LAYOUTS[layout],) * 3)
            error, fault = tried(
                partial(_error, kernel, laid_out, dtype, device, reference, training=training)
            )
            yield KernelCheck(
                operator=operator_name(kernel, case, dtype, device, training=training),
                layout=layout,
                dtype=str(dtype).removeprefix("torch."),
                shows=shows,
                sizes=case.name,
                error=error,
                fault=fault,
            )


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
    return referred(output, (query, key, value), dtype, lse)


def _error(
    kernel: LocalAttention,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    reference: Reference,
    *,
    training: bool,
) -> float:
    """The largest relative error of all results; raises Wrong if it is beyond the bound."""
    drawn = case.tensors(dtype, device)
    query, key, value = (tensor.detach().requires_grad_(training) for tensor in drawn)
    options: dict[str, Any] = {"band": case.band, "scale": case.scale}
    options |= case.added(dtype, device).arguments
    out = kernel(query, key, value, **options)
    explain_if_degenerate(out, reference)
    if training:
        return training_error(out, (query, key, value), reference)
    compared = [("output", out, reference.output)]
    if hasattr(kernel, "attend_with_lse"):
        again, lse = kernel.attend_with_lse(query, key, value, **options)
        compared.append(("output beside the log-sum-exp", again, reference.output))
        assert reference.lse is not None
        compared.append(("log-sum-exp", lse, reference.lse))
    return error_of(compared)
