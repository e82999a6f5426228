"""What is made of the operators' results where a row sees nothing."""

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
