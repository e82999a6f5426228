"""Memory for messages, kept between them: on the CPU, fresh pages cost more than copies into them.

Accelerators keep freed memory in an allocator of their own. The CPU's gives large blocks back to
the system, which maps and clears every page of the next one again.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

# Kept in a process, and of a block: with long sequences memory counts for more than time.
_MOST_BYTES, _LARGEST_BYTES = 24 << 20, 6 << 20


class Workspace:
    """Flat CPU tensors that no message uses now, by dtype and size."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.kept_bytes = 0
        self._lock = threading.Lock()

    def borrow(self, like: Tensor, numel: int) -> Tensor:
        """A tensor [numel] of `like`'s dtype and device, its content undefined."""
        with self._lock:
            free = self._free[like.dtype, numel] if _is_plain(like) else None
            if free:
                self.kept_bytes -= free[-1].nbytes
                return free.pop()
        with torch.inference_mode(False):  # one made in that mode can not be written to outside
            return like.new_empty(numel)

    def give_back(self, borrowed: Tensor) -> None:
        """Keep a borrowed tensor for the next message; nothing may use its memory any more."""
        if not _is_plain(borrowed) or borrowed.nbytes > _LARGEST_BYTES:
            return
        with self._lock:
            if self.kept_bytes + borrowed.nbytes > _MOST_BYTES:  # the shapes have changed
                self._free.clear()
                self.kept_bytes = 0
            self._free[borrowed.dtype, borrowed.numel()].append(borrowed)
            self.kept_bytes += borrowed.nbytes


def _is_plain(tensor: Tensor) -> bool:
    """Memory of the CPU, and no tensor of a mode that only looks at shapes."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor
