"""Dropout of attention weights, seen directly: values that are the identity show every weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ulysses.backends.base import Dropout
from ulysses.conformance import Case
from ulysses.conformance_checks import Subject

_P = 0.25
_KEYS = 32
_CASE = Case(name="dropout", num_queries=40, num_keys=_KEYS, num_heads=4, value_dim=_KEYS)
_DROPOUT = Dropout(p=_P, seed=1234)


def check_dropout(subject: Subject) -> None:
    """A share p of the weights is dropped, the rest scaled, by seed and place, and replayed."""
    random_state = _random_state(subject.device)
    weights = _weights(subject, _DROPOUT)
    _check_share(subject, weights)
    assert torch.equal(weights, _weights(subject, _DROPOUT)), "the same seed gave another pattern"
    for change, other in {
        "seed": replace(_DROPOUT, seed=1235),
        "first head": replace(_DROPOUT, head=4),
        "first query": replace(_DROPOUT, query=40),
        "first key": replace(_DROPOUT, key=32),
    }.items():
        repeated = torch.equal(weights, _weights(subject, other))
        assert not repeated, f"another {change} gave the same pattern"
    heads_repeat = any(torch.equal(weights[:, :, 0], weights[:, :, h]) for h in range(1, 4))
    assert not heads_repeat, "two heads share one pattern"
    _check_replay(subject, weights)
    assert torch.equal(_random_state(subject.device), random_state), (
        "the device's random state was moved"
    )


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _weights(subject: Subject, dropout: Dropout) -> Tensor:
    """The weights [B, Sq, H, Sk] after dropout, which without it would all be 1/Sk."""
    query, key, value = _inputs(subject)
    with torch.no_grad():
        return subject.attend(_CASE, (query, key, value), dropout).cpu()


def _inputs(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    query, key, _ = _CASE.tensors(subject.dtype, subject.device)
    identity = torch.eye(_KEYS, dtype=subject.dtype, device=subject.device)
    value = identity.view(1, _KEYS, 1, _KEYS).expand(1, _KEYS, 4, _KEYS).contiguous()
    return torch.zeros_like(query), key, value


def _check_share(subject: Subject, weights: Tensor) -> None:
    kept = weights != 0
    uniform = torch.full_like(weights, 1 / _KEYS / (1 - _P), dtype=torch.float64)
    subject.compare("weights after dropout", weights, torch.where(kept, uniform, 0.0))
    share, count = kept.double().mean().item(), kept.numel()
    deviation = (_P * (1 - _P) / count) ** 0.5
    assert abs(share - (1 - _P)) < 5 * deviation, (
        f"dropout_p={_P} kept a share of {share:.4f} of {count} weights"
    )


def _check_replay(subject: Subject, weights: Tensor) -> None:
    """Backward drops what forward dropped: dv is the transpose of the weights seen above."""
    query, key, value = _inputs(subject)
    value.requires_grad_()
    out = subject.attend(_CASE, (query, key, value), _DROPOUT)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (gradient,) = torch.autograd.grad(out, value, upstream)
    expected = torch.einsum("bqhk,bqhd->bkhd", weights.double(), upstream.cpu().double())
    subject.compare("gradient of value under dropout", gradient, expected)
