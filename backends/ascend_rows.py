"""What is made of the operators' results, row by row: empty rows, and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses.backends.ascend_sparse import rows_with_keys
from ulysses.backends.base import Problem


def without_empty_rows(
    problem: Problem, empty_rows: Tensor | None, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """-inf as the LSE of a row that sees nothing: one operator says +inf, the other about -3e38.

    A mask's rows are zeroed, too. They are asked of the operator, but only a band's are those that
    it knows of by itself.
    """
    if empty_rows is not None:
        out = out.masked_fill(empty_rows.unsqueeze(3), 0.0)
        return out, lse if lse is None else lse.masked_fill(empty_rows, -torch.inf)
    if lse is not None:
        rows = rows_with_keys(problem.band, problem.num_queries, problem.num_keys)
        lse[:, : rows.start] = -torch.inf
        lse[:, rows.stop :] = -torch.inf
    return out, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Sinks [H] take their part of each row's weight afterwards: exact, where no gradient is asked.

    The operators' own argument for them came late (torch_npu 2.9, CANN 8.5) and to one of the two.
    """
    sinks = sinks.float()
    kept = torch.sigmoid(lse - sinks).unsqueeze(3)
    return (out * kept).to(out.dtype), lse.logaddexp(sinks)
