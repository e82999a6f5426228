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
    from ulysses.arguments import QueryRows as QueryRows
    from ulysses.arguments import Replicated as Replicated
    from ulysses.attention import UlyssesAttention as UlyssesAttention
    from ulysses.cache import KVCache as KVCache
    from ulysses.config import Config as Config
    from ulysses.config import load_config as load_config
    from ulysses.data import SequenceLoader as SequenceLoader
    from ulysses.data import check_same_across_ranks as check_same_across_ranks
    from ulysses.data import data_loader as data_loader
    from ulysses.data import shard_tokens as shard_tokens
    from ulysses.draws import data_generator as data_generator
    from ulysses.draws import data_seed as data_seed
    from ulysses.draws import own_draws as own_draws
    from ulysses.draws import replicated as replicated
    from ulysses.gradients import average_gradients as average_gradients
    from ulysses.gradients import clip_grad_norm_ as clip_grad_norm_
    from ulysses.gradients import grad_norm as grad_norm
    from ulysses.guidance import run_branches as run_branches
    from ulysses.loss import Averages as Averages
    from ulysses.loss import count_targets as count_targets
    from ulysses.loss import gradient_mesh as gradient_mesh
    from ulysses.loss import mean_over_ranks as mean_over_ranks
    from ulysses.loss import share_of_mean as share_of_mean
    from ulysses.loss import token_loss as token_loss
    from ulysses.mesh import init_mesh as init_mesh
    from ulysses.parallel import parallelize as parallelize
    from ulysses.sequence import documents_of as documents_of
    from ulysses.sequence import gather_sequence_slice_grads as gather_sequence_slice_grads
    from ulysses.sequence import gather_sequence_sum_grads as gather_sequence_sum_grads
    from ulysses.sequence import position_ids as position_ids
    from ulysses.sequence import shard_batch as shard_batch
    from ulysses.sequence import shard_sequence as shard_sequence
    from ulysses.sequence import shift_labels as shift_labels
    from ulysses.verification import verify as verify
    from ulysses.wrap_callable import wrap_function as wrap_function
    from ulysses.wrapping import describe as describe
    from ulysses.wrapping import unwrap as unwrap
    from ulysses.wrapping import wrap as wrap

# Where each public name lives. It is loaded when it is first used: `ulysses --help` and reading a
# configuration must not wait for torch.
_HOMES = {
    "Averages": "ulysses.loss",
    "Config": "ulysses.config",
    "KVCache": "ulysses.cache",
    "QueryRows": "ulysses.arguments",
    "Replicated": "ulysses.arguments",
    "SequenceLoader": "ulysses.data",
    "UlyssesAttention": "ulysses.attention",
    "average_gradients": "ulysses.gradients",
    "check_same_across_ranks": "ulysses.data",
    "clip_grad_norm_": "ulysses.gradients",
    "count_targets": "ulysses.loss",
    "data_generator": "ulysses.draws",
    "data_loader": "ulysses.data",
    "data_seed": "ulysses.draws",
    "describe": "ulysses.wrapping",
    "documents_of": "ulysses.sequence",
    "gather_sequence_slice_grads": "ulysses.sequence",
    "gather_sequence_sum_grads": "ulysses.sequence",
    "grad_norm": "ulysses.gradients",
    "gradient_mesh": "ulysses.loss",
    "init_mesh": "ulysses.mesh",
    "load_config": "ulysses.config",
    "mean_over_ranks": "ulysses.loss",
    "own_draws": "ulysses.draws",
    "parallelize": "ulysses.parallel",
    "position_ids": "ulysses.sequence",
    "replicated": "ulysses.draws",
    "run_branches": "ulysses.guidance",
    "shard_batch": "ulysses.sequence",
    "shard_sequence": "ulysses.sequence",
    "shard_tokens": "ulysses.data",
    "share_of_mean": "ulysses.loss",
    "shift_labels": "ulysses.sequence",
    "token_loss": "ulysses.loss",
    "unwrap": "ulysses.wrapping",
    "verify": "ulysses.verification",
    "wrap": "ulysses.wrapping",
    "wrap_function": "ulysses.wrap_callable",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ulysses' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
