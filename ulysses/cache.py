"""A key/value cache for generation over ranks: each keeps its own rows of the sequence.

Prefill leaves keys and values where the sequence is sharded. New tokens are on every rank: each
attends them to the rows that it keeps, and the partial results are merged by their log-sum-exp,
which is exact, with one collective. That needs no head per rank, and new rows go to the ranks that
keep fewest, so that memory and work stay level however long the generation runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ulysses.agreement import require_agreement
from ulysses.arguments import Arguments
from ulysses.backends.base import LocalAttention, Problem
from ulysses.backends.registry import get_backend
from ulysses.cache_rows import GrowingRows, levelled
from ulysses.cache_step import (
    attend_own,
    described_step,
    merged,
    own_mask,
    problems,
    structure_of,
)
from ulysses.group import process_group, rank_in
from ulysses.route import consecutive
from ulysses.sequence import lens_of_parts
from ulysses.tile_kernel import Options, output_and_lse_of


class KVCache:
    """The keys and values of one attention layer, sharded over `group` by sequence.

        cache.prefill(key, value)               # this rank's rows of the prompt
        out = cache.attend(query, key, value)   # new tokens, the same on every rank; any number

    `group`, `backend` and `check` are those of `UlyssesAttention`, which attends the prompt
    itself. The kernel must give the log-sum-exp. There is no backward pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        *,
        backend: str | LocalAttention = "auto",
        check: bool = False,
    ) -> None:
        self.group = process_group(group)
        self.rank, self.num_ranks = rank_in(self.group)
        self.backend = backend
        self.check = check
        self._lens = (0,) * self.num_ranks
        self._kept: tuple[GrowingRows, GrowingRows] | None = None
        # On the host, where a window looks up what it shows without waiting for the device.
        self._positions = GrowingRows(torch.empty(1, 0, dtype=torch.int64, device="cpu"))

    @property
    def lens(self) -> tuple[int, ...]:
        """How many rows each rank keeps."""
        return self._lens

    @property
    def length(self) -> int:
        """The whole sequence so far."""
        return sum(self._lens)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on this rank, room for more included."""
        return sum(rows.nbytes for rows in self._kept or ())

    def prefill(self, key: Tensor, value: Tensor, *, seq_lens: Sequence[int] | None = None) -> None:
        """Keep this rank's rows of the prompt, [B, l, Hkv, D] and [B, l, Hkv, Dv], as a copy.

        Without `seq_lens` the ranks first tell each other their lengths, one small collective.
        Raises ValueError or TypeError for what is no key and value or needs gradients, and if
        there are rows already.
        """
        arguments = Arguments(query=key, key=key, value=value, seq_lens=seq_lens)
        self._agreed(arguments, self._prompt)
        _, lens = lens_of_parts(key, self.group, 1, seq_lens)
        self._keep(key, value, consecutive(lens)[self.rank])
        self._lens = lens

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        *,
        window: tuple[int | None, int | None] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Append new tokens, and attend them causally to the whole sequence: [B, n, H, Dv].

        query is [B, n, H, D], key [B, n, Hkv, D], value [B, n, Hkv, Dv], whole and equal on every
        rank, as is the result. Each token sees all that came before, and itself; of a `window`
        (left, right), the last `left` of these and itself, what is on its right being hidden.

        `attn_mask` is of SDPA's meaning, on top of that, and broadcastable to [B, H, n, S], S being
        the whole sequence up to the last new token: for prompts padded to one length, say. `sinks`
        [H] are scores that take weight and give no value. Rows that see nothing are zero.

        Raises ValueError or TypeError before anything is kept or sent.
        """
        arguments = Arguments(
            query=query,
            key=key,
            value=value,
            attn_mask=attn_mask,
            scale=scale,
            window=window,
            sinks=sinks,
        )
        step = self._agreed(arguments, self._step)
        kernel = get_backend(self.backend, step.device_type)
        attend = output_and_lse_of(kernel)
        parts = consecutive(levelled(self._lens, step.num_queries))
        for problem in problems(step, self._lens, parts):
            if reason := kernel.unsupported(problem):
                raise ValueError(f"backend {kernel.name!r} can not run a decode step: {reason}")
        start, new = self.length, parts[self.rank]
        own = slice(new.start, new.stop)
        self._keep(key[:, own], value[:, own], range(start + new.start, start + new.stop))
        self._lens = tuple(n + len(part) for n, part in zip(self._lens, parts, strict=True))
        if not query.numel():
            return query.new_empty(*query.shape[:3], value.shape[3])
        with torch.no_grad():
            tensors, mask = self._visible(arguments, range(start, self.length))
            structure = structure_of(tensors[1].shape[1] - len(new), new, step.num_queries)
            scale = 1 / math.sqrt(step.head_dim) if scale is None else scale
            out, lse = attend_own(attend, tensors, structure, Options(scale=scale, mask=mask))
            return merged(out, lse, sinks, self.group)

    def _keep(self, key: Tensor, value: Tensor, positions: range) -> None:
        """Append these rows to this rank's."""
        places = torch.arange(positions.start, positions.stop, device="cpu").unsqueeze(0)
        self._positions.append(places)
        with torch.no_grad():
            if self._kept is None:
                self._kept = GrowingRows(key), GrowingRows(value)
                return
            for rows, new in zip(self._kept, (key, value), strict=True):
                rows.append(new)

    def _visible(
        self, arguments: Arguments, queries: range
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Queries at these positions, the rows kept here that any of them sees, and the mask."""
        assert self._kept is not None, "the new tokens have been kept"
        positions, first = self._positions.rows[0], 0
        left = None if arguments.window is None else arguments.window[0]
        if left is not None:
            first = int(torch.searchsorted(positions, queries.start - left))
        key, value = (rows.rows[:, first:] for rows in self._kept)
        mask = own_mask(arguments.mask, positions[first:].to(key.device), queries, left)
        return (arguments.query, key, value), mask

    def _agreed(self, arguments: Arguments, describe: Callable[[Arguments], Problem]) -> Problem:
        """What is asked for, with all ranks if that was asked to be checked."""
        try:
            problem = describe(arguments)
        except (TypeError, ValueError) as error:
            if self.check:
                require_agreement(error, self.group)
            raise
        if self.check:
            facts: dict[str, Any] = {f.name: getattr(problem, f.name) for f in fields(problem)}
            facts |= {"lens": self._lens, "seq_lens": arguments.seq_lens}
            require_agreement(facts | arguments.options, self.group)
        return problem

    def _prompt(self, arguments: Arguments) -> Problem:
        """The prompt without its length, which differs between ranks."""
        if self.length:
            raise ValueError(
                f"the cache holds {self.length} tokens: prefill comes first and once; append "
                "further tokens with attend, or make a new KVCache for another sequence"
            )
        step = described_step(replace(arguments, seq_lens=None), 0)
        return replace(step, num_queries=0, num_keys=0)

    def _step(self, arguments: Arguments) -> Problem:
        """New tokens as one process would attend them to the whole sequence."""
        step = described_step(arguments, self.length)
        for rows, new in zip(self._kept or (), arguments.tensors[1:], strict=False):
            rows.check_fit(new)
        return step
