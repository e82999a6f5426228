"""Ascend's fused attention through torch_npu.

`npu_fused_infer_attention_score` runs what needs no gradient, `npu_fusion_attention` everything
else: gradients, dropout, float32, and the few problems that only the first refuses. Both are exact
attention; nothing falls back to another kernel. Every band is a sparse mode (ascend_sparse.py), so
no Sq x Sk mask is ever built; the layout is the one that copies least (ascend_layout.py).

torch_npu's versions differ in more than their numbers tell, so nothing here reads one: the calls
use only arguments that every recorded schema has, under the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses.backends.ascend_layout import choose_layout
from ulysses.backends.ascend_limits import choose_operator, refusals
from ulysses.backends.ascend_operators import INFERENCE, Call, infer, load_operators, train
from ulysses.backends.ascend_sparse import rows_with_keys, sparse_arguments
from ulysses.backends.base import Band, Dropout, Problem, no_attention

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
        """Never: one 2048 x 2048 triangle serves every band and every length."""
        return False

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """See `ulysses.backends.base.LocalAttention`."""
        problem = self._accepted(query, key, value, band, dropout)
        if _shows_nothing(problem):
            return no_attention(query, key, value)
        return self._attend(problem, query, key, value, scale, dropout, with_lse=False)[0]

    def attend_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of each row's scaled scores, float32 [B, Sq, H].

        Natural logarithm, -inf for a row that sees no key, and no gradient through it: the
        operators have none.
        """
        problem = self._accepted(query, key, value, band, dropout)
        if _shows_nothing(problem):
            nothing = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
            return no_attention(query, key, value), nothing
        out, lse = self._attend(problem, query, key, value, scale, dropout, with_lse=True)
        assert lse is not None
        # Where a row sees nothing, one operator says +inf and the other about -3e38.
        rows = rows_with_keys(band, problem.num_queries, problem.num_keys)
        lse[:, : rows.start] = -torch.inf
        lse[:, rows.stop :] = -torch.inf
        return out, lse

    def _attend(
        self,
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        dropout: Dropout | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Lay the tensors out, call the operator, and bring its results back to [B, Sq, H, ...]."""
        band = problem.band
        if problem.num_queries == 1:
            # The inference operator ignores sparse modes here. One row sees one interval of keys.
            seen = band.keys(range(1), problem.num_keys)
            key, value = key[:, seen.start : seen.stop], value[:, seen.start : seen.stop]
            band = Band()
        name = choose_operator(problem)
        call = self._call(name, query, key, value, band, scale)
        if name == INFERENCE:
            out, lse = infer(self._operator(name), call, with_lse=with_lse)
        else:
            out, lse = train(self._operator(name), call, dropout, with_lse=with_lse)
        out = call.layout.restore(out, problem.batch, problem.value_dim)
        return out, lse if lse is None else call.layout.restore_rows(lse, problem.batch)

    def _call(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float
    ) -> Call:
        layout = choose_layout(query, key, value)
        width = max(query.shape[3], value.shape[3])
        value_width = value.shape[3]
        if name == INFERENCE:  # one head dim for all three, in steps of 32 bytes
            width = value_width = -(-width // _INFERENCE_STEP) * _INFERENCE_STEP
        sparse = sparse_arguments(band, query.shape[1], key.shape[1])
        return Call(
            layout.lay(query, width),
            layout.lay(key, width),
            layout.lay(value, value_width),
            layout=layout,
            scale=scale,
            sparse=sparse,
            mask=None if sparse.mode == 0 else self._triangle(query.device),
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
        self, query: Tensor, key: Tensor, value: Tensor, band: Band, dropout: Dropout | None
    ) -> Problem:
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
            and any(tensor.requires_grad for tensor in (query, key, value)),
            band=band,
            dropout_p=dropout.p if dropout else 0.0,
        )
        if refusal := self.unsupported(problem):
            raise ValueError(refusal)
        return problem


def _shows_nothing(problem: Problem) -> bool:
    """True if no row sees any key: the operators refuse such a band."""
    return problem.band.area(range(problem.num_queries), problem.num_keys) == 0
