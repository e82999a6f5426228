"""The kernel's self-test on packed documents, which it may run in one call and another layout.

One stack gave the average of the values for such a call of full attention (vllm-ascend#13699).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ulysses.backends.base import Band, LocalAttention, Piece
from ulysses.conformance import Case, reference_attention
from ulysses.launch import doctor_kernel
from ulysses.launch.doctor_check import KernelCheck
from ulysses.launch.doctor_compare import (
    Reference,
    error_of,
    explain_if_degenerate,
    referred,
    training_error,
    tried,
)
from ulysses.structure import packed

LAYOUT = "TND"
# What rows see of their own document: Ascend's sparse modes 0, 3 and 4.
SHOWS = {"all": Band(), "bottom right": Band(None, 0), "window": Band(-20, 0)}
_DOCUMENTS = (0, 37, 38, 64)
_ROWS = _DOCUMENTS[-1]
_CASE = Case(
    name=f"documents ending at {_DOCUMENTS[1:]}, head dim 64, 4/2 heads",
    batch=2,
    num_queries=_ROWS,
    num_keys=_ROWS,
    num_kv_heads=2,
    head_dim=64,
    value_dim=64,
    scale=64**-0.5,
    memory=("SBHD",) * 3,
)


def packed_checks(kernel: LocalAttention, device: torch.device) -> Iterator[KernelCheck]:
    """The kernel in every dtype and for all that rows see, with and without gradients."""
    if not hasattr(kernel, "attend_pieces"):
        return
    for dtype, (shows, band) in product(doctor_kernel.DTYPES, SHOWS.items()):
        pieces = packed(_DOCUMENTS, _ROWS, band).pieces
        reference = _reference(pieces, dtype)
        for training in (False, True):
            error, fault = tried(
                partial(_error, kernel, pieces, dtype, device, reference, training=training)
            )
            if error is None and fault is None:
                continue
            yield KernelCheck(
                operator=_operator_name(kernel, pieces, dtype, device, training=training),
                layout=LAYOUT,
                dtype=str(dtype).removeprefix("torch."),
                shows=shows,
                sizes=_CASE.name,
                error=error,
                fault=fault,
            )


def _operator_name(
    kernel: LocalAttention,
    pieces: tuple[Piece, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    training: bool,
) -> str:
    """What runs them: an Ascend operator by its own name."""
    if kernel.name == "ascend":
        from ulysses.backends.ascend_packed import pack, packed_operator

        problem = _CASE.problem(dtype, device.type, requires_grad=training)
        if (as_one := pack(pieces)) and (name := packed_operator(problem, as_one.sparse)):
            return name
    return f"{kernel.name}, {'training' if training else 'inference'}"


def _reference(pieces: tuple[Piece, ...], dtype: torch.dtype) -> Reference:
    drawn = _CASE.tensors(dtype, torch.device("cpu"))
    query, key, value = (tensor.double().requires_grad_() for tensor in drawn)
    rows = [
        reference_attention(
            *(
                tensor[:, piece.queries.start : piece.queries.stop]
                for tensor in (query, key, value)
            ),
            band=piece.band,
            scale=_CASE.scale,
        )[0]
        for piece in pieces
    ]
    return referred(torch.cat(rows, dim=1), (query, key, value), dtype)


def _error(
    kernel: LocalAttention,
    pieces: tuple[Piece, ...],
    dtype: torch.dtype,
    device: torch.device,
    reference: Reference,
    *,
    training: bool,
) -> float | None:
    """The largest relative error; None if the kernel runs these as calls of their own."""
    drawn = _CASE.tensors(dtype, device)
    query, key, value = (tensor.detach().requires_grad_(training) for tensor in drawn)
    attend_pieces = kernel.attend_pieces  # type: ignore[attr-defined]
    out: Tensor | None = attend_pieces(query, key, value, pieces=pieces, scale=_CASE.scale)
    if out is None:
        return None
    explain_if_degenerate(out, reference)
    if training:
        return training_error(out, (query, key, value), reference)
    return error_of([("output", out, reference.output)])
