"""Ascend's fused attention through torch_npu.

`npu_fused_infer_attention_score` runs what needs no gradient, `npu_fusion_attention` everything
else: gradients, dropout, float32, a mask for each head, and the few problems that only the first
refuses. Both are exact attention; nothing falls back to another kernel. Every band is a sparse mode
(ascend_sparse.py), so that an Sq x Sk mask is built only out of a caller's mask (ascend_mask.py);
the layout is the one that copies least (ascend_layout.py), and packed documents are one call
(ascend_packed.py).

torch_npu's versions differ in more than their numbers tell, so nothing here reads one: the calls
use only arguments that every recorded schema has, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ulysses.backends.ascend_layout import TND, choose_layout
from ulysses.backends.ascend_limits import choose_operator, needs_float32, refusals
from ulysses.backends.ascend_mask import Written, write_out
from ulysses.backends.ascend_operators import (
    INFERENCE,
    TRAINING,
    Call,
    infer,
    lay_out,
    load_operators,
    train,
)
from ulysses.backends.ascend_packed import pack, packed_operator
from ulysses.backends.ascend_rows import without_empty_rows
from ulysses.backends.ascend_sinks import beside_sinks, train_with_sinks
from ulysses.backends.ascend_sparse import WRITTEN_OUT, SparseArguments, sparse_arguments
from ulysses.backends.base import Alibi, Band, Dropout, Piece, Problem, cut_mask, no_attention

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
        asked = _Asked(band, scale, dropout, mask, alibi, sinks)
        return self._attend(query, key, value, asked, with_lse=False)[0]

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
        asked = _Asked(band, scale, dropout, mask, alibi, sinks)
        out, lse = self._attend(query, key, value, asked, with_lse=True)
        assert lse is not None
        return out, lse if sinks is None else lse.logaddexp(sinks.detach().float())

    def attend_pieces(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pieces: Sequence[Piece],
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Packed documents in one call; None with anything on top of them."""
        asked = _Asked(Band(), scale, dropout, mask, alibi, sinks)
        packed = pack(pieces)
        if packed is None or asked.added:
            return None
        problem = asked.problem(query, key, value)
        name = packed_operator(problem, packed.sparse)
        if name is None:
            return None
        num_rows, num_keys = packed.query_ends[-1], packed.key_ends[-1]
        call = Call(
            *lay_out(name, TND, query[:, :num_rows], key[:, :num_keys], value[:, :num_keys]),
            layout=TND,
            scale=scale,
            sparse=packed.sparse,
            mask=self._triangle_for(packed.sparse, query.device),
            query_ends=packed.query_ends,
            key_ends=packed.key_ends,
        )
        out, _ = self._run(name, call, asked, with_lse=False)
        out = TND.restore(out, problem.batch, problem.value_dim)
        return functional.pad(out, (0, 0, 0, 0, 0, problem.num_queries - num_rows))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, asked: _Asked, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and the LSE [B, Sq, H] of the keys alone if asked for or needed."""
        problem = asked.problem(query, key, value)
        if refusal := self.unsupported(problem):
            raise ValueError(refusal)
        if problem.band.area(range(problem.num_queries), problem.num_keys) == 0:
            out = no_attention(query, key, value, *asked.added)  # the operators refuse such a band
            return out, query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        if problem.num_queries == 1:
            key, value, asked = _seen_by_one_row(key, value, asked)
        if needs_float32(problem):
            query, key, value = query.float(), key.float(), value.float()
        written = write_out(asked.band, query.shape[1], key.shape[1], asked.mask, asked.alibi)
        name = choose_operator(problem)
        call = self._call(name, query, key, value, asked, written)
        out, lse = self._run(name, call, asked, with_lse=with_lse)
        out = call.layout.restore(out, problem.batch, problem.value_dim).to(problem.dtype)
        if lse is not None:
            lse = call.layout.restore_rows(lse, problem.batch)
        out, lse = without_empty_rows(problem, written.empty_rows, out, lse)
        if asked.sinks is not None and name == INFERENCE:
            assert lse is not None
            out = beside_sinks(out, lse, asked.sinks)
        return out, lse

    def _call(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        asked: _Asked,
        written: Written,
    ) -> Call:
        batch, num_queries, num_heads, _ = query.shape
        num_keys = key.shape[1]
        layout = choose_layout(query, key, value, may_fold=written.is_for_all_heads)
        mask = written.hidden_for(1 if layout.folds_batch else batch, num_queries)
        sparse = WRITTEN_OUT
        if mask is None:
            sparse = sparse_arguments(asked.band, num_queries, num_keys)
            mask = self._triangle_for(sparse, query.device)
        # FIA adds to the scaled scores, FA (pse_type 1) to those that it scales afterwards.
        over = 1.0 if name == INFERENCE else asked.scale
        return Call(
            *lay_out(name, layout, query, key, value),
            layout=layout,
            scale=asked.scale,
            sparse=sparse,
            mask=mask,
            bias=written.bias_for(over, num_heads, num_queries, num_keys, query.dtype),
        )

    def _run(
        self, name: str, call: Call, asked: _Asked, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output in the call's layout, and the LSE [B, N, Sq] if asked for, or needed for sinks."""
        operator = self._operator(name)
        if name == INFERENCE:
            return infer(operator, call, with_lse=with_lse or asked.sinks is not None)
        if asked.sinks is None:
            return train(operator, call, asked.dropout, with_lse=with_lse)
        gradient = self._operator(f"{TRAINING}_grad")
        return train_with_sinks(operator, gradient, call, asked.dropout, asked.sinks)

    def _operator(self, name: str) -> torch._ops.OpOverload:
        operator: torch._ops.OpOverload = getattr(getattr(torch.ops, self._namespace), name).default
        return operator

    def _triangle_for(self, sparse: SparseArguments, device: torch.device) -> Tensor | None:
        """Bool [2048, 2048], True above the diagonal: True hides, the opposite of SDPA's mask."""
        if sparse.mode == 0:
            return None
        if device not in self._triangles:
            with torch.inference_mode(False):  # or autograd could not save it later
                ones = torch.ones(_TRIANGLE, _TRIANGLE, dtype=torch.bool, device=device)
                self._triangles[device] = ones.triu(1)
        return self._triangles[device]


class _Asked(NamedTuple):
    """What a call has besides its tensors."""

    band: Band
    scale: float
    dropout: Dropout | None
    mask: Tensor | None
    alibi: Alibi | None
    sinks: Tensor | None

    @property
    def added(self) -> list[Tensor]:
        """What is added to the scores, and may have gradients."""
        given = (self.mask, None if self.alibi is None else self.alibi.slopes, self.sinks)
        return [tensor for tensor in given if tensor is not None]

    def problem(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        learned = (query, key, value, *self.added)
        return Problem(
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
            band=self.band,
            dropout_p=self.dropout.p if self.dropout else 0.0,
            mask_dtype=None if self.mask is None else self.mask.dtype,
            mask_shape=None if self.mask is None else (*self.mask.shape,),
            alibi=self.alibi is not None,
            sinks=self.sinks is not None,
        )


def _seen_by_one_row(key: Tensor, value: Tensor, asked: _Asked) -> tuple[Tensor, Tensor, _Asked]:
    """The one interval of keys that a single query sees: one operator ignores its sparse mode."""
    seen = asked.band.keys(range(1), key.shape[1])
    mask, alibi = asked.mask, asked.alibi
    if mask is not None:
        mask = cut_mask(mask, queries=range(1), keys=seen)
    if alibi is not None:
        alibi = replace(alibi, distance=alibi.distance + seen.start)
    key, value = key[:, seen.start : seen.stop], value[:, seen.start : seen.stop]
    return key, value, asked._replace(band=Band(), mask=mask, alibi=alibi)
