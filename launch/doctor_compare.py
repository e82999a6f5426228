"""A kernel's results beside attention written out in float64, and what is told of a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

# Relative to the largest value. Half precisions round twice; float32 products may be rounded to
# fewer bits by a matrix unit. A wrong mask, scale or head is off by far more.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}
_OF_TENSORS = ("gradient of query", "gradient of key", "gradient of value")


class Wrong(Exception):
    """A result that is not attention's."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a case has to give: float64, on the CPU."""

    output: Tensor
    gradients: tuple[Tensor, ...]  # of query, key and value
    average: Tensor  # of the values, for each query head: what no attention at all gives
    lse: Tensor | None = None


def referred(
    output: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    lse: Tensor | None = None,
) -> Reference:
    """Of an output in float64 that came of these; the upstream gradient is that of `dtype`."""
    query, _, value = tensors
    gradients = _gradients(output, tensors, dtype)
    group = query.shape[2] // value.shape[2]
    average = value.detach().mean(1, keepdim=True).repeat_interleave(group, 2)
    return Reference(output.detach(), gradients, average, None if lse is None else lse.detach())


def _gradients(
    output: Tensor, tensors: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Of the tensors; the output's own has values of `dtype`, the same on every device."""
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    # Handed over as a gradient, torch would load sympy to look at its shape: a second a process.
    return torch.autograd.grad((output * drawn.to(dtype).to(output)).sum(), tensors)


def training_error(
    output: Tensor, tensors: tuple[Tensor, Tensor, Tensor], reference: Reference
) -> float:
    """The largest relative error of the output and the gradients; raises Wrong beyond the bound."""
    gradients = _gradients(output, tensors, output.dtype)
    compared = list(zip(_OF_TENSORS, gradients, reference.gradients, strict=True))
    return error_of([("output", output, reference.output), *compared])


def error_of(compared: Sequence[tuple[str, Tensor, Tensor]]) -> float:
    """The largest relative error of (what, found, expected); raises Wrong beyond the bound.

    The bound is that of the first one's dtype.
    """
    bound = BOUNDS[compared[0][1].dtype]
    return max(_difference(*each, bound) for each in compared)


def _difference(what: str, found: Tensor, expected: Tensor, bound: float) -> float:
    found = found.detach().cpu().double()
    if found.shape != expected.shape:
        raise Wrong(f"{what} has shape {list(found.shape)}, not {list(expected.shape)}")
    # Equal infinities have no distance.
    gap = torch.where(found == expected, 0.0, found - expected).abs().max().item()
    if not isfinite(gap):
        raise Wrong(f"{what} has a NaN or infinity where none belongs, or lacks -inf")
    error = gap / max(1.0, expected.nan_to_num(neginf=0.0).abs().max().item())
    if error > bound:
        raise Wrong(f"{what} is off by {error:.2g}, more than {bound:.2g}")
    return error


def explain_if_degenerate(out: Tensor, reference: Reference) -> None:
    """Raises Wrong for two answers that broken stacks are known to give."""
    found = out.detach().cpu().double()
    if found.shape != reference.output.shape:
        return
    if torch.allclose(found, reference.average.expand_as(found), atol=0.02):
        raise Wrong("output is the plain average of the values: scores have no effect")
    if not found.any():
        raise Wrong("output is all zeros")


def tried(error: Callable[[], float | None]) -> tuple[float | None, str | None]:
    """The error that a case comes to, or else its fault: whatever a kernel raises is a finding."""
    try:
        return error(), None
    except Exception as raised:
        line = " ".join(str(raised).split())[:300]
        return None, line if isinstance(raised, Wrong) else f"{type(raised).__name__}: {line}"
