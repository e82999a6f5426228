"""Ascend's fused attention through torch_npu.

`npu_fused_infer_attention_score` runs what needs no gradient, `npu_fusion_attention` everything
else: gradients, dropout, float32, a mask for each head, and the few problems that only the first
refuses. Both are exact attention; nothing falls back to another kernel. Every band is a sparse mode
(ascend_sparse.py), so that an Sq x Sk mask is built only out of a caller's mask (ascend_mask.py);
the layout is the one that copies least (ascend_layout.py).

torch_npu's versions differ in more than their numbers tell, so nothing here reads one: the calls
use only arguments that every recorded schema has, under the same names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ulysses.backends.ascend_layout import choose_layout
from ulysses.backends.ascend_limits import choose_operator, needs_float32, refusals
from ulysses.backends.ascend_mask import Written, write_out
from ulysses.backends.ascend_operators import INFERENCE, Call, infer, load_operators, train
from ulysses.backends.ascend_rows import with_sinks, without_empty_rows
from ulysses.backends.ascend_sparse import WRITTEN_OUT, sparse_arguments
from ulysses.backends.base import Alibi, Band, Dropout, Problem, cut_mask, no_attention

# The inference operator reads head dims in steps of 32 bytes.
_INFERENCE_STEP = 16
_TRIANGLE = 2048


class AscendAttention:
    """Local attention by the fused operators of torch_npu."""

    name = "ascend"
    contiguous = True

    def __init__(self, namespace: str = "npu") -> None:
        """`namespace` holds the operators, in torch.ops; torch_npu's own unless given."""
        if namespace == "npu":
            load_operators()
        self._namespace = namespace
        self._triangles: dict[torch.device, Tensor] = {}

    def unsupported(self, problem: Problem) -> str | None:
        """The first limit of the operator that the problem would break."""
        operator = self._operator(choose_operator(problem))
        return next(refusals(problem, operator), None)

    def materialises(self, problem: Problem) -> bool:
        """For a caller's mask or ALiBi only: a 2048 x 2048 triangle serves every band."""
        return problem.mask_shape is not None or problem.alibi

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `ulysses.backends.base.LocalAttention`."""
        problem = self._accepted(query, key, value, band, dropout, mask, alibi, sinks)
        if _shows_nothing(problem):
            return no_attention(query, key, value, *_learned(mask, alibi, sinks))
        asked = _Asked(problem, scale, dropout, mask, alibi, with_lse=sinks is not None)
        out, lse = self._attend(asked, query, key, value)
        if sinks is None:
            return out
        assert lse is not None
        return with_sinks(out, lse, sinks)[0]

    def attend_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of each row's scores, float32 [B, Sq, H].

        Natural logarithm, -inf for a row that sees no key, and no gradient through it: the
        operators have none. A sink counts as a score.
        """
        problem = self._accepted(query, key, value, band, dropout, mask, alibi, sinks)
        if _shows_nothing(problem):
            out = no_attention(query, key, value, *_learned(mask, alibi, sinks))
            lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        else:
            asked = _Asked(problem, scale, dropout, mask, alibi, with_lse=True)
            out, some_lse = self._attend(asked, query, key, value)
            assert some_lse is not None
            lse = some_lse
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def _attend(
        self, asked: _Asked, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Lay the tensors out, call the operator, and bring its results back to [B, Sq, H, ...]."""
        problem, mask, alibi = asked.problem, asked.mask, asked.alibi
        band = problem.band
        if problem.num_queries == 1:
            # The inference operator ignores sparse modes here. One row sees one interval of keys.
            seen = band.keys(range(1), problem.num_keys)
            key, value = key[:, seen.start : seen.stop], value[:, seen.start : seen.stop]
            mask = mask if mask is None else cut_mask(mask, queries=range(1), keys=seen)
            alibi = alibi and replace(alibi, distance=alibi.distance + seen.start)
            band = Band()
        if needs_float32(problem):
            query, key, value = query.float(), key.float(), value.float()
        written = write_out(band, query.shape[1], key.shape[1], mask, alibi)
        name = choose_operator(problem)
        call = self._call(name, query, key, value, band, asked.scale, written)
        if name == INFERENCE:
            out, lse = infer(self._operator(name), call, with_lse=asked.with_lse)
        else:
            out, lse = train(self._operator(name), call, asked.dropout, with_lse=asked.with_lse)
        out = call.layout.restore(out, problem.batch, problem.value_dim).to(problem.dtype)
        if lse is not None:
            lse = call.layout.restore_rows(lse, problem.batch)
        return without_empty_rows(problem, written.empty_rows, out, lse)

    def _call(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        band: Band,
        scale: float,
        written: Written,
    ) -> Call:
        batch, num_queries, num_heads, _ = query.shape
        layout = choose_layout(query, key, value, may_fold=written.is_for_all_heads)
        width = max(query.shape[3], value.shape[3])
        value_width = value.shape[3]
        if name == INFERENCE:  # one head dim for all three, in steps of 32 bytes
            width = value_width = -(-width // _INFERENCE_STEP) * _INFERENCE_STEP
        mask = written.hidden_for(1 if layout.folds_batch else batch, num_queries)
        sparse = WRITTEN_OUT
        if mask is None:
            sparse = sparse_arguments(band, num_queries, key.shape[1])
            mask = None if sparse.mode == 0 else self._triangle(query.device)
        # FIA adds to the scaled scores, FA (pse_type 1) to those that it scales afterwards.
        over = 1.0 if name == INFERENCE else scale
        return Call(
            layout.lay(query, width),
            layout.lay(key, width),
            layout.lay(value, value_width),
            layout=layout,
            scale=scale,
            sparse=sparse,
            mask=mask,
            bias=written.bias_for(over, num_heads, num_queries, key.shape[1], query.dtype),
        )

    def _operator(self, name: str) -> torch._ops.OpOverload:
        operator: torch._ops.OpOverload = getattr(getattr(torch.ops, self._namespace), name).default
        return operator

    def _triangle(self, device: torch.device) -> Tensor:
        """Bool [2048, 2048], True above the diagonal: True hides, the opposite of SDPA's mask."""
        if device not in self._triangles:
            with torch.inference_mode(False):  # or autograd could not save it later
                ones = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device)
                self._triangles[device] = ones.triu(1)
        return self._triangles[device]

    def _accepted(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        band: Band,
        dropout: Dropout | None,
        mask: Tensor | None,
        alibi: Alibi | None,
        sinks: Tensor | None,
    ) -> Problem:
        learned = (query, key, value, *_learned(mask, alibi, sinks))
        problem = Problem(
            batch=query.shape[0],
            num_queries=query.shape[1],
            num_keys=key.shape[1],
            num_heads=query.shape[2],
            num_kv_heads=key.shape[2],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            dtype=query.dtype,
            device_type=query.device.type,
            requires_grad=torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in learned),
            band=band,
            dropout_p=dropout.p if dropout else 0.0,
            mask_dtype=None if mask is None else mask.dtype,
            mask_shape=None if mask is None else (*mask.shape,),
            alibi=alibi is not None,
            sinks=sinks is not None,
        )
        if refusal := self.unsupported(problem):
            raise ValueError(refusal)
        return problem


class _Asked(NamedTuple):
    """An accepted call, but for its tensors and sinks."""

    problem: Problem
    scale: float
    dropout: Dropout | None
    mask: Tensor | None
    alibi: Alibi | None
    with_lse: bool


def _learned(mask: Tensor | None, alibi: Alibi | None, sinks: Tensor | None) -> list[Tensor]:
    """What a call has of these, which may have gradients."""
    given = (mask, None if alibi is None else alibi.slopes, sinks)
    return [tensor for tensor in given if tensor is not None]


def _shows_nothing(problem: Problem) -> bool:
    """True if no row sees any key: the operators refuse such a band."""
    return problem.band.area(range(problem.num_queries), problem.num_keys) == 0
