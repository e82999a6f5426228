"""Attention sinks: scores that take their part of each row's weight and give no value.

The operators' own argument for them came late (torch_npu 2.9, CANN 8.5) and to one of the two, so
that they are counted afterwards. That is exact: a sink makes each row's softmax sum larger and
leaves the ratios of the keys' weights alone. For gradients, the training operator's backward pass
is given the output and the statistics with the sinks in them, from which it derives the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ulysses.backends.ascend_layout import Layout
from ulysses.backends.ascend_operators import Call, keep_prob, run_training, training_options
from ulysses.backends.base import Dropout


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[B, Sq, H, Dv] with its part of each row's weight, from the LSE [B, Sq, H]; no gradient."""
    kept = torch.sigmoid(lse - sinks.float()).unsqueeze(3)
    return (out * kept).to(out.dtype)


def train_with_sinks(
    operator: Any, gradient: Any, call: Call, dropout: Dropout | None, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """The training operator beside sinks [H], which have gradients as its tensors have.

    Gives the output in the call's layout, and the LSE [B, N, Sq] of the keys alone, which has no
    gradient. `gradient` is the operator's backward pass.
    """
    of_all_heads = sinks.float().repeat(call.num_heads // len(sinks))  # a batch may be folded in
    tensors = call.query, call.key, call.value, call.bias, of_all_heads
    out: Tensor
    lse: Tensor
    out, lse = _TrainWithSinks.apply(*tensors, operator, gradient, call, dropout)  # type: ignore[no-untyped-call]
    return out, lse


class _TrainWithSinks(torch.autograd.Function):
    """The gradient of a score is its weight * (upstream . value - upstream . output).

    A sink is a score of each row without a value: -weight * upstream . output, summed over the
    rows. Weights are exp(score - largest) / sum, from the statistics that the backward pass is
    given, [B, N, Sq, 8].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor,
        operator: Any,
        gradient: Any,
        call: Call,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor]:
        call = call._replace(query=query, key=key, value=value, bias=bias)
        out, largest, total, nothing, *random = run_training(operator, call, dropout)
        scores = sinks[:, None, None]
        highest = largest.maximum(scores)
        of_keys, of_sinks = total * (largest - highest).exp(), (scores - highest).exp()
        sums = of_keys + of_sinks
        kept, taken = (part[..., :1] / sums[..., :1] for part in (of_keys, of_sinks))
        out = (out * _as_rows(kept, call.layout)).to(out.dtype)
        lse = largest[..., 0] + total[..., 0].log()
        saved = (query, key, value, bias, call.mask, out, highest, sums, nothing, taken)
        ctx.save_for_backward(*saved)
        ctx.gradient, ctx.num_heads, ctx.layout = gradient, call.num_heads, call.layout
        seed, offset, count = random
        ctx.options = training_options(call) | {
            "pse": None,
            "atten_mask": None,
            "scale_value": call.scale,
            "keep_prob": keep_prob(dropout),
            "seed": seed,
            "offset": offset,
            "numels": count,
        }
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, mask, out, highest, sums, nothing, taken = ctx.saved_tensors
        layout: Layout = ctx.layout
        d_query, d_key, d_value, d_bias, *_ = ctx.gradient(
            query,
            key,
            value,
            d_out.contiguous(),
            ctx.num_heads,
            layout.name,
            softmax_max=highest,
            softmax_sum=sums,
            softmax_in=nothing,
            attention_in=out,
            **ctx.options | {"pse": bias, "atten_mask": mask},
        )
        products = (d_out.float() * out.float()).sum(3, keepdim=True)
        d_sinks = -(taken * _as_rows(products, layout)).sum((0, 2, 3))
        gradients = d_query, d_key, d_value, None if bias is None else d_bias, d_sinks
        return (*gradients, None, None, None, None)


def _as_rows(rows: Tensor, layout: Layout) -> Tensor:
    """[B, N, Sq, 1] in the order of the layout's tensors, and back."""
    return rows if layout.name == "BNSD" else rows.transpose(1, 2)
