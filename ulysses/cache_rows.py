"""Rows that grow as a sequence is generated, and which rank takes the next ones."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

# Room for new rows: an eighth of what is there, so that copying it is rare and little is left over.
_ROOM_SHARE = 8
_LEAST_ROOM = 16


class GrowingRows:
    """A tensor [B, n, ...] of its own memory to whose dim 1 rows are appended."""

    def __init__(self, rows: Tensor) -> None:
        self._memory = _allocated(rows, rows.shape[1])
        self._memory.copy_(rows)
        self._length = rows.shape[1]

    @property
    def rows(self) -> Tensor:
        """All rows so far, a view."""
        return self._memory[:, : self._length]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, room for more rows included."""
        return self._memory.nbytes

    def check_fit(self, rows: Tensor) -> None:
        """Raise ValueError unless these rows go with the others."""
        kept, given = self._memory, rows
        alike = (given.dtype, given.device) == (kept.dtype, kept.device)
        if not alike or (given.shape[0], given.shape[2:]) != (kept.shape[0], kept.shape[2:]):
            raise ValueError(
                f"new rows are {tuple(given.shape)}, {given.dtype} on {given.device}, the cache's "
                f"{tuple(self.rows.shape)}, {kept.dtype} on {kept.device}: only dim 1 may differ"
            )

    def append(self, rows: Tensor) -> None:
        """Copy rows behind the others."""
        stop = self._length + rows.shape[1]
        if stop > self._memory.shape[1]:
            old = self.rows
            self._memory = _allocated(rows, stop + max(_LEAST_ROOM, stop // _ROOM_SHARE))
            self._memory[:, : self._length].copy_(old)
        self._memory[:, self._length : stop].copy_(rows)
        self._length = stop


def levelled(lens: Sequence[int], num_new: int) -> tuple[int, ...]:
    """How many of `num_new` rows each rank takes so that lengths come out as level as they can."""
    taken = [0] * len(lens)
    shortest = [(length, rank) for rank, length in enumerate(lens)]
    heapq.heapify(shortest)
    for _ in range(num_new):
        length, rank = shortest[0]
        taken[rank] += 1
        heapq.heapreplace(shortest, (length + 1, rank))
    return tuple(taken)


def _allocated(like: Tensor, length: int) -> Tensor:
    """Memory that can be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(
            like.shape[0], length, *like.shape[2:], dtype=like.dtype, device=like.device
        )
