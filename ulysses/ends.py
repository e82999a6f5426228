"""Replicated rows before and behind the sharded ones: what joint attention adds to a call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Query [B, T, H, D], key [B, T, Hkv, D] and value [B, T, Hkv, Dv] of the same rows.
Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Ends:
    """Rows that every rank holds whole, on either end of the sequence."""

    prefix: Rows | None = None
    suffix: Rows | None = None

    @property
    def lens(self) -> tuple[int, int]:
        """How many rows there are before and behind."""
        before, behind = (0 if rows is None else rows[0].shape[1] for rows in self._both)
        return before, behind

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are there."""
        return tuple(tensor for rows in self._both if rows is not None for tensor in rows)

    def check(self, between: Rows) -> None:
        """Raise ValueError or TypeError unless the ends go with the sharded rows `between`."""
        for name, rows in zip(("prefix", "suffix"), self._both, strict=True):
            if rows is not None:
                _check(name, rows, between)

    @property
    def _both(self) -> tuple[Rows | None, Rows | None]:
        return self.prefix, self.suffix


NO_ENDS = Ends()


def _check(name: str, rows: Rows, between: Rows) -> None:
    if len(rows) != 3 or not all(isinstance(tensor, Tensor) for tensor in rows):
        raise TypeError(
            f"{name} is {type(rows).__name__} of {[type(part).__name__ for part in rows]}: pass "
            "its (query, key, value), whole on every rank"
        )
    given = ", ".join(str(tuple(tensor.shape)) for tensor in rows)
    length = rows[0].shape[1] if rows[0].ndim == 4 else 0
    wanted = [(tensor.shape[0], length, *tensor.shape[2:]) for tensor in between]
    if [tuple(tensor.shape) for tensor in rows] != wanted:
        raise ValueError(
            f"{name} of shapes {given}: query, key and value of a joint sequence must be "
            "[B, T, H, D], [B, T, Hkv, D] and [B, T, Hkv, Dv] with the sharded tensors' B, heads "
            f"and dims, {', '.join(str(tuple(tensor.shape)) for tensor in between)}"
        )
    for tensor, other in zip(rows, between, strict=True):
        if (tensor.dtype, tensor.device) != (other.dtype, other.device):
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device} where the sharded tensor is "
                f"{other.dtype} on {other.device}: one dtype and device is needed for all"
            )
