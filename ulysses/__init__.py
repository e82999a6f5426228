"""Sequence-parallel attention for PyTorch: two all-to-alls around an ordinary attention kernel.

Letters in shapes, here and in every name's suffix (`q_blhd` is what this rank holds):

    b  batch                h  query heads           p  ranks
    s  whole sequence       k  key/value heads       d  head dim
    l  local sequence       g  local query heads

Tensors are laid out as `[batch, seq, heads, dim]` everywhere.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ulysses.attention import UlyssesAttention as UlyssesAttention
    from ulysses.config import Config as Config
    from ulysses.config import load_config as load_config
    from ulysses.mesh import init_mesh as init_mesh
    from ulysses.sequence import gather_sequence_slice_grads as gather_sequence_slice_grads
    from ulysses.sequence import gather_sequence_sum_grads as gather_sequence_sum_grads
    from ulysses.sequence import position_ids as position_ids
    from ulysses.sequence import shard_batch as shard_batch
    from ulysses.sequence import shard_sequence as shard_sequence
    from ulysses.sequence import shift_labels as shift_labels

# Where each public name lives. It is loaded when it is first used: `ulysses --help` and reading a
# configuration must not wait for torch.
_HOMES = {
    "Config": "ulysses.config",
    "UlyssesAttention": "ulysses.attention",
    "gather_sequence_slice_grads": "ulysses.sequence",
    "gather_sequence_sum_grads": "ulysses.sequence",
    "init_mesh": "ulysses.mesh",
    "load_config": "ulysses.config",
    "position_ids": "ulysses.sequence",
    "shard_batch": "ulysses.sequence",
    "shard_sequence": "ulysses.sequence",
    "shift_labels": "ulysses.sequence",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ulysses' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
