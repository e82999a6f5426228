"""`UlyssesAttention`: attention over a sequence that is sharded across the ranks of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ulysses.agreement import require_agreement
from ulysses.arguments import Arguments, QueryRows, Replicated
from ulysses.autocast import in_autocast_dtype
from ulysses.backends.base import LocalAttention
from ulysses.backends.registry import get_backend
from ulysses.call import Call
from ulysses.eager import in_eager
from ulysses.ends import Ends, Rows
from ulysses.exchange import tile_to_shard
from ulysses.grid import checked_grid, plan
from ulysses.group import process_group, rank_in
from ulysses.inputs import described
from ulysses.joint import image_and_text
from ulysses.tile_inputs import tile_inputs
from ulysses.tile_kernel import (
    Attend,
    attend_tile,
    output_and_lse_of,
    output_of,
    refusing_gradients,
)
from ulysses.tiling import Tiling

_MOST_PLANS = 1024
# torch.compile would guard and break in each line of the planning.
ON_THE_HOST = "attention over ranks is planned on the host, around collectives and one kernel"


class UlyssesAttention(nn.Module):
    """Attention of sequence shards: [B, l, H, D] in, [B, l, H, Dv] out, as if on one device.

    `group` holds the ranks that share a sequence: a ProcessGroup, a 1-D DeviceMesh such as
    `mesh["sp"]`, or None for a single process. `backend` names the local kernel ("auto": by device
    type) or is one. `grid` is (u, r) or "auto"; see `ulysses.grid`. With `check=True` each call
    first compares shapes, dtypes and options over the group, and raises on all ranks if they
    differ; that costs a small collective a call.

    `tiling` shows the tiles of the last call, for inspection only.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        *,
        backend: str | LocalAttention = "auto",
        grid: tuple[int, int] | Literal["auto"] = "auto",
        check: bool = False,
    ) -> None:
        super().__init__()
        self.group = process_group(group)
        self.rank, self.num_ranks = rank_in(self.group)
        self.backend = backend
        self._kernels: dict[str, LocalAttention] = {}  # by device type, as first asked for
        self._plans: dict[object, tuple[Call, LocalAttention, Tiling]] = {}  # by all they depend on
        self.grid = checked_grid(grid, self.num_ranks)
        self.check = check
        self.tiling: Tiling | None = None

    @in_eager(ON_THE_HOST)
    def forward(
        self,
        query: Tensor,
        key: Tensor | Replicated,
        value: Tensor | Replicated,
        attn_mask: Tensor | QueryRows | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        *,
        seq_lens: Sequence[int] | None = None,
        key_lens: Sequence[int] | None = None,
        window: tuple[int | None, int | None] | None = None,
        documents: Sequence[int] | None = None,
        prefix_len: int | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the whole sequence; returns this rank's rows, [B, l, H, Dv].

        query is [B, l, H, D], key [B, l, Hkv, D], value [B, l, Hkv, Dv], all of one floating dtype
        and device; Hkv divides H. `seq_lens` are the lengths l of all ranks, by default all equal
        to this one's; any of them may be 0. For cross-attention, key and value have lengths of
        their own, `key_lens`, or are `Replicated`: whole on every rank and not exchanged.

        `attn_mask`, `dropout_p`, `is_causal` and `scale` (default 1/sqrt(D)) mean what they mean
        to torch's scaled_dot_product_attention; the mask is the whole one on every rank,
        broadcastable to [B, H, Sq, Sk] of the whole sequence, or this rank's rows of it in
        `QueryRows`, or a causal bias of torch.nn.attention.bias. A mask in `QueryRows` has its
        exact gradient; that of what is given whole on every rank (a mask, `Replicated`, slopes,
        sinks) is this rank's share, which sums to the whole over the group. Dropout draws its
        seed from torch's CPU generator: seed it alike on all ranks, and the pattern is the same
        for every number of them.

        Shapes of masks that need no tensor: `window` is (left, right), how many keys a row sees
        on each side of its own, None for all; `documents` are the borders (0, ..., end) of packed
        documents in the whole sequence, on the host, and rows behind them see nothing;
        `prefix_len` shows the first keys to all rows of causal attention. `alibi_slopes` [H] add
        slope * (key position - query position), `sinks` [H] are scores that take weight and give
        no value. Rows that see nothing are zero and have zero gradients. All of this combines.

        Raises ValueError or TypeError, before any communication, for what can not be exact.
        """
        (out,) = self._run(
            output_of,
            Arguments(
                query=query,
                key=key,
                value=value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                seq_lens=seq_lens,
                key_lens=key_lens,
                window=window,
                documents=documents,
                prefix_len=prefix_len,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
            ),
        )
        return out

    @in_eager(ON_THE_HOST)
    def with_lse(
        self,
        query: Tensor,
        key: Tensor | Replicated,
        value: Tensor | Replicated,
        attn_mask: Tensor | QueryRows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp [B, l, H] of each row's scores, for who merges.

        Takes what `forward` takes, by name. Natural logarithm, float32 at least, -inf for a row
        that sees nothing; differentiable where the kernel says so, as sdpa's is. Where it is not,
        a backward pass through it raises RuntimeError: use lse.detach().
        """
        arguments = Arguments(query=query, key=key, value=value, attn_mask=attn_mask, **options)
        out, lse = self._run(output_and_lse_of, arguments)
        if arguments.scores_are_learned and out.requires_grad and not lse.requires_grad:
            lse = refusing_gradients(lse, out)
        return out, lse

    @in_eager(ON_THE_HOST)
    def joint(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        prefix: Rows | None = None,
        suffix: Rows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Joint attention (MM-DiT): the sharded rows between text rows that every rank holds.

        `prefix` and `suffix` are each (query [B, T, H, D], key [B, T, Hkv, D], value
        [B, T, Hkv, Dv]), equal on all ranks; they are not exchanged. Returns this rank's rows
        [B, l, H, Dv], and the output of all text rows [B, T, H, Dv], the prefix's before the
        suffix's, on every rank.

        `options` are those of `forward`, by name. The whole sequence is prefix, sharded rows and
        suffix in this order, and masks, `documents` and the like count in it; only `seq_lens` are
        of the sharded rows alone. `QueryRows` and `Replicated` are refused.

        Gradients of prefix and suffix are this rank's share: their sum over the group is the
        whole. So is what a rank passes back to the text's output: a loss that all ranks compute
        alike from it is divided by their number, or computed on one of them.
        """
        ends = Ends(prefix, suffix)
        arguments = Arguments(query=query, key=key, value=value, ends=ends, **options)
        tiling, (out,) = self._attended(output_of, arguments)
        return image_and_text(out, tiling, self.rank, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesAttention:
        """A layer of its own in the same group: models are copied, as for an average of weights."""
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def extra_repr(self) -> str:
        return f"num_ranks={self.num_ranks}, backend={self.backend!r}, grid={self.grid!r}"

    def _run(
        self, results_of: Callable[[LocalAttention], Attend], arguments: Arguments
    ) -> tuple[Tensor, ...]:
        """Check, exchange, attend, exchange back."""
        tiling, results = self._attended(results_of, arguments)
        if self.group is None:
            return results
        # The log-sum-exp [B, Sq, h] travels as one more tensor, of dim 1.
        tiles = [result if result.ndim == 4 else result.unsqueeze(3) for result in results]
        shards = tile_to_shard(tiles, (tiling.query_route,) * len(tiles), self.group)
        return shards[0], *(shard.squeeze(3) for shard in shards[1:])

    def _attended(
        self, results_of: Callable[[LocalAttention], Attend], arguments: Arguments
    ) -> tuple[Tiling, tuple[Tensor, ...]]:
        """Check, exchange, attend: the tiles, and the kernel's results for this rank's."""
        arguments = in_autocast_dtype(arguments)
        call, kernel, tiling = self._planned(arguments)
        attend = results_of(kernel)
        self.tiling = tiling
        tensors, options = tile_inputs(arguments, call, tiling, self.rank, self.group)
        tile = tiling.tiles[self.rank]
        return tiling, attend_tile(attend, tile, call.structure, tensors, options)

    def _planned(self, arguments: Arguments) -> tuple[Call, LocalAttention, Tiling]:
        """The call, its kernel and its tiles, agreed upon with all ranks if that is asked for."""
        try:
            call, kernel, tiling = self._remembered(arguments)
        except (TypeError, ValueError) as error:
            if self.check:
                require_agreement(error, self.group)
            raise
        if self.check:
            options = {"backend": kernel.name, "grid": self.grid} | arguments.options
            sizes = {f.name: getattr(call, f.name) for f in fields(call) if f.name != "structure"}
            require_agreement(sizes | options, self.group)
        return call, kernel, tiling

    def _remembered(self, arguments: Arguments) -> tuple[Call, LocalAttention, Tiling]:
        """The same, planned once for each different call: planning takes as long as a kernel."""
        signature = arguments.signature
        if signature not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            call = described(arguments, self.rank, self.num_ranks)
            kernel = self._kernel(call.device_type)
            self._plans[signature] = call, kernel, plan(call, kernel, self.grid)
        return self._plans[signature]

    def _kernel(self, device_type: str) -> LocalAttention:
        if device_type not in self._kernels:
            self._kernels[device_type] = get_backend(self.backend, device_type)
        return self._kernels[device_type]
