"""The calls of the two Ascend operators, each with its arguments in its own names.

Both read the head counts from the tensors that they pass, in the very call: nothing here or above
keeps one. `scale` is always passed, as the operators' default is 1.0 and not 1/sqrt(D).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ulysses.backends.ascend_layout import Layout
from ulysses.backends.ascend_sparse import SparseArguments
from ulysses.backends.base import Dropout

INFERENCE = "npu_fused_infer_attention_score"
TRAINING = "npu_fusion_attention"

_INFERENCE_STEP = 16  # elements of 2 bytes
# Bit 1 of FIA's inner_precise, and FA's whole value 2: rows that see nothing give zeros. Without it
# they give the average of all values.
_ZERO_EMPTY_ROWS = 2


class Call(NamedTuple):
    """What both operators are asked: tensors [B, S, N, D], [B, N, S, D] or [T, N, D], and options.

    `mask` hides where it is True; `bias` [B|1, N, Sq, Sk] is added in the operator's own way.
    `query_ends` and `key_ends` are for layout TND: where in T each sequence ends.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: Layout
    scale: float
    sparse: SparseArguments
    mask: Tensor | None
    bias: Tensor | None = None
    query_ends: tuple[int, ...] | None = None
    key_ends: tuple[int, ...] | None = None

    @property
    def num_heads(self) -> int:
        return self.query.shape[self.layout.heads_dim]

    @property
    def inner_precise(self) -> int:
        return _ZERO_EMPTY_ROWS if self.sparse.has_empty_rows else 0


def load_operators() -> None:
    """Import torch_npu, which defines the operators, unless they are defined already."""
    if hasattr(torch.ops.npu, TRAINING):
        return
    try:
        import torch_npu  # noqa: F401 (registers the operators)
    except ImportError as error:
        raise ImportError(
            f"backend='ascend' needs torch_npu, which does not import here ({error}); install "
            "ulysses[npu] and source CANN's set_env.sh, or pass backend='sdpa'"
        ) from error


def lay_out(
    name: str, layout: Layout, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, H, D] tensors in a layout, with head dims that the operator takes."""
    width = max(query.shape[3], value.shape[3])
    value_width = value.shape[3]
    if name == INFERENCE:  # one head dim for all three, in steps of 32 bytes
        width = value_width = -(-width // _INFERENCE_STEP) * _INFERENCE_STEP
    return layout.lay(query, width), layout.lay(key, width), layout.lay(value, value_width)


def infer(operator: Any, call: Call, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The inference operator: output in the call's layout, and the LSE [B, N, Sq] if asked for.

    It has no autograd formula and no dropout.
    """
    out, lse = operator(
        call.query,
        call.key,
        call.value,
        num_heads=call.num_heads,
        num_key_value_heads=call.key.shape[call.layout.heads_dim],
        input_layout=call.layout.name,
        scale=call.scale,
        pse_shift=call.bias,
        atten_mask=call.mask,
        actual_seq_lengths=call.query_ends,
        actual_seq_lengths_kv=call.key_ends,
        sparse_mode=call.sparse.mode,
        pre_tokens=call.sparse.pre_tokens,
        next_tokens=call.sparse.next_tokens,
        inner_precise=call.inner_precise,
        softmax_lse_flag=with_lse,
    )
    return out, lse.squeeze(-1) if with_lse else None


def train(
    operator: Any, call: Call, dropout: Dropout | None, *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The training operator: output in the call's layout, and the LSE [B, N, Sq] if asked for.

    Its autograd formula drops a gradient that arrives at the softmax statistics without a word, so
    the LSE is detached from the graph.
    """
    out, largest, total, *_ = run_training(operator, call, dropout)
    if not with_lse:
        return out, None
    # Eight equal columns hold each row's statistics.
    return out, largest.detach()[..., 0] + total.detach()[..., 0].log()


def run_training(operator: Any, call: Call, dropout: Dropout | None) -> tuple[Any, ...]:
    """All that it returns: output, softmax maximum and sum, nothing, seed, offset, count."""
    with _own_stream(call.query.device, dropout):
        results: tuple[Any, ...] = operator(
            call.query,
            call.key,
            call.value,
            call.num_heads,
            call.layout.name,
            scale=call.scale,
            keep_prob=keep_prob(dropout),
            **training_options(call),
        )
    return results


def keep_prob(dropout: Dropout | None) -> float:
    return 1.0 - (dropout.p if dropout else 0.0)


def training_options(call: Call) -> dict[str, Any]:
    """What the training operator and its gradient call by the same names."""
    return {
        "pse": call.bias,
        "atten_mask": call.mask,
        "actual_seq_qlen": call.query_ends,
        "actual_seq_kvlen": call.key_ends,
        "pre_tockens": call.sparse.pre_tokens,
        "next_tockens": call.sparse.next_tokens,
        "inner_precise": call.inner_precise,
        "sparse_mode": call.sparse.mode,
    }


@contextlib.contextmanager
def _own_stream(device: torch.device, dropout: Dropout | None) -> Iterator[None]:
    """Dropout's random stream for one call; the device's own stream is as before afterwards.

    The operator draws from the device's default generator: its `seed` argument, where a version has
    one, is documented to be used and is overwritten by the generator's (op-plugin, Aug 2026). Ranks
    often hold equal generators, so the stream is set from the tile's place as well as the seed.
    """
    if dropout is None:
        yield
        return
    place = repr((dropout.seed, dropout.head, dropout.query, dropout.key)).encode()
    seed = int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "big")
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(torch.random.fork_rng([], device_type="cpu"))
            torch.default_generator.manual_seed(seed)
        else:
            module = torch.get_device_module(device)
            stack.enter_context(module.device(device))
            stack.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
            module.manual_seed(seed)
        yield
