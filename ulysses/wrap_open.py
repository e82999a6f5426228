"""Opening a scope: while it is open, torch's own attention calls in this thread go to it.

A `Scope` is open while a wrapped module runs, in the thread that runs it, and is closed however
that ends. Nothing outside the module sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ulysses.wrap_lengths import Lengths
from ulysses.wrap_policy import Policy
from ulysses.wrap_scope import Scope, Wrapping

# Attention that a function mode can see but not look into; `ulysses.wrap` has routes around them.
_OPAQUE = {
    functional.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
}
# The scopes that this thread has open, outermost first: a dynamic scope, as torch's modes are.
_OPEN: ContextVar[tuple[Scope, ...]] = ContextVar("ulysses_open_scopes", default=())


@contextmanager
def opened(wrapping: Wrapping) -> Iterator[Scope]:
    """The scope that this thread has open for this wrapping, or a new one."""
    found = open_scope(wrapping)
    if found is not None:
        yield found
        return
    with new_scope(wrapping, Lengths(wrapping.attention)) as scope:
        yield scope


@contextmanager
def new_scope(
    wrapping: Wrapping,
    lengths: Lengths,
    *,
    neutral: bool = False,
    policy: Policy = Policy.EXCHANGED,
) -> Iterator[Scope]:
    """A scope of its own, within one that is open."""
    neutral = neutral or any(scope.neutral for scope in _OPEN.get())
    scope = Scope(wrapping, lengths, neutral=neutral, policy=policy)
    token = _OPEN.set((*_OPEN.get(), scope))
    try:
        with _TakeOver(scope):
            yield scope
    finally:
        _OPEN.reset(token)


def open_scope(wrapping: Wrapping) -> Scope | None:
    """This thread's innermost open scope of this wrapping."""
    return next((scope for scope in reversed(_OPEN.get()) if scope.wrapping is wrapping), None)


def current_scope() -> Scope | None:
    """This thread's innermost open scope, for attention functions that are called by name."""
    scopes = _OPEN.get()
    return scopes[-1] if scopes else None


class _TakeOver(TorchFunctionMode):
    """Hands every scaled_dot_product_attention to a scope."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            if self._scope.policy is Policy.LOCAL:
                self._scope.num_calls += 1
                return func(*args, **kwargs)
            return _sdpa(self._scope, *args, **kwargs)
        if func in _OPAQUE and self._scope.policy is not Policy.LOCAL:
            raise RuntimeError(
                f"{self._scope.site} calls {func.__name__} itself, which attends where ulysses "
                "can't reach: use nn.MultiheadAttention, or scaled_dot_product_attention"
            )
        return func(*args, **kwargs)


def _sdpa(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA's own [B, H, l, D], or [B, l, D] of one head, on shards."""
    if query.ndim not in (3, 4):
        raise ValueError(
            f"{scope.site} attends with query {tuple(query.shape)}: [batch, heads, seq, dim] or "
            "[batch, seq, dim] is needed"
        )
    if not enable_gqa and query.ndim == 4 and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{scope.site} attends with query {tuple(query.shape)}, key {tuple(key.shape)}: head "
            "counts differ and enable_gqa is not set"
        )
    heads = (1,) if query.ndim == 3 else ()
    q_blhd, k_blhd, v_blhd = (
        (tensor.unsqueeze(1) if heads else tensor).transpose(1, 2) for tensor in (query, key, value)
    )
    if heads and attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unsqueeze(1)
    out: Tensor = scope.attend(q_blhd, k_blhd, v_blhd, attn_mask, dropout_p, is_causal, scale)
    return out.squeeze(2) if heads else out.transpose(1, 2)
