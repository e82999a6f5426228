"""A forward of a wrapped module: where its attention calls go while it runs.

A `Wrapping` is what one `wrap` decided: the layer that exchanges, and the places in the module that
attend (`Site`). A `Scope` is one forward: `ulysses.wrap_open` opens it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ulysses.arguments import QueryRows, Replicated
from ulysses.attention import ON_THE_HOST, UlyssesAttention
from ulysses.cache import KVCache
from ulysses.eager import in_eager
from ulysses.sequence import gather_sequence_sum_grads
from ulysses.wrap_lengths import Lengths
from ulysses.wrap_policy import Policy


@dataclass(frozen=True, slots=True)
class Site:
    """A module that attends: its name in the wrapped module, and how it is taken over."""

    name: str
    kind: str  # the module's class
    route: str
    policy: Policy = Policy.EXCHANGED


@dataclass(slots=True)
class Seen:
    """What reached the layer from a site, last: head counts after any tensor parallelism."""

    num_heads: int
    num_kv_heads: int
    mask: str


@dataclass(eq=False)
class Wrapping:
    """What one `wrap` decided; deep copies of the wrapped module share it."""

    attention: UlyssesAttention
    sites: dict[str, Site]
    seq_dim: int
    unprobed: set[str] = field(default_factory=set)  # parts whose next forward is probed first
    seen: dict[str, Seen] = field(default_factory=dict)  # by the site's name
    cuts_inputs: bool = False  # the module is given whole sequences
    by_plan: bool = False  # rows are in no order of the model's, and masks of this rank's keys
    reopening: set[CodeType] = field(default_factory=set)  # of forwards that open its scope

    def reopened_by(self, forward: Any) -> None:
        """Remember a forward that opens this wrapping's scope, whenever it is run."""
        self.reopening.add(forward.__code__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapping:
        return self


class Scope:
    """One forward of a wrapped module in one thread.

    `neutral` replaces attention by something that each token computes alone, without communication:
    what then still mixes tokens is not attention (`ulysses.wrap_probe`). `policy` is that of what
    attends outside of all sites.
    `notes` is for integrations: what they found out about this forward, by their own key.
    """

    def __init__(
        self, wrapping: Wrapping, lengths: Lengths, *, neutral: bool, policy: Policy
    ) -> None:
        self.wrapping = wrapping
        self.lengths = lengths
        self.neutral = neutral
        self.notes: dict[str, Any] = {}
        self.num_calls = 0
        self._policy = policy
        self._sites: list[Site] = []

    @property
    def attention(self) -> UlyssesAttention:
        return self.wrapping.attention

    @property
    def site(self) -> str:
        """The attending module that runs now, for messages."""
        return f"{self._sites[-1].name} ({self._sites[-1].kind})" if self._sites else "the module"

    @property
    def policy(self) -> Policy:
        """What is done with the attention of the module that runs now."""
        return self._sites[-1].policy if self._sites else self._policy

    @property
    def takes_whole(self) -> bool:
        """True while what runs was given the whole sequence, around a region that is sharded."""
        return self._policy is Policy.LOCAL and not self._sites

    @contextmanager
    def at(self, site: Site) -> Iterator[None]:
        """While a part's forward runs."""
        self._sites.append(site)
        try:
            yield
        finally:
            self._sites.pop()

    @contextmanager
    def inside(self, site: Site) -> Iterator[None]:
        """While a site's forward runs. Raises RuntimeError if it ends without having attended."""
        before = self.num_calls
        with self.at(site):
            yield
            if self.num_calls == before and site.policy is not Policy.LOCAL:
                raise RuntimeError(
                    f"{self.site} ran, but its attention did not reach ulysses (route "
                    f"{site.route}): it took another kernel and attended to this rank's shard "
                    "only. Make it use torch's scaled_dot_product_attention, or wrap its kernel "
                    "with ulysses.wrap_function, or name it in local=[...]"
                )

    @in_eager(ON_THE_HOST)
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **structure: Any,
    ) -> Tensor:
        """[B, l, H, D] shards to [B, l, H, Dv], as `UlyssesAttention` takes them.

        `structure` are its other keyword arguments (window, documents, sinks, ...); None is left
        out. A mask of this rank's rows may be a plain tensor.
        """
        self.num_calls += 1
        self._require_reopened()
        structure = {name: value for name, value in structure.items() if value is not None}
        if self.neutral:
            return _each_token_alone(query, key, value)
        self._record(query, key, attn_mask, is_causal, structure)
        if "seq_lens" not in structure:
            structure["seq_lens"] = self.lengths.of(query, 1, self.site)
        keys_and_values: tuple[Tensor, Tensor] | tuple[Replicated, Replicated] = (key, value)
        if self.policy is Policy.REPLICATED:
            keys_and_values = (Replicated(key), Replicated(value))
        elif key.shape[1] != query.shape[1]:
            structure["key_lens"] = self.lengths.of(key, 1, self.site)
        if self.wrapping.by_plan:
            if is_causal:
                raise ValueError(f"{self.site} is causal, among rows that are in the ranks' order")
            if isinstance(attn_mask, Tensor):
                attn_mask = _of_all_keys(attn_mask, structure["seq_lens"], self)
        elif isinstance(attn_mask, Tensor) and attn_mask.ndim >= 2:
            attn_mask = _of_own_rows(attn_mask, structure["seq_lens"], query.shape[1])
        # Not only this scope's mode goes: another wrapping's would take the local kernel over.
        with torch._C.DisableTorchFunction():
            out: Tensor = self.attention(
                query, *keys_and_values, attn_mask, dropout_p, is_causal, scale, **structure
            )
        return out

    @in_eager(ON_THE_HOST)
    def attend_cached(
        self,
        cache: KVCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        **structure: Any,
    ) -> Tensor:
        """New tokens, whole on every rank, as `KVCache.attend` takes them: [B, n, H, Dv]."""
        self.num_calls += 1
        if dropout_p:
            raise ValueError(
                f"{self.site} drops {dropout_p} of its attention to a KV cache, which has no "
                "dropout: put the model in evaluation mode"
            )
        structure = {name: value for name, value in structure.items() if value is not None}
        self._record(query, key, attn_mask, True, structure)
        with torch._C.DisableTorchFunction():
            return cache.attend(query, key, value, attn_mask, scale, **structure)

    def _require_reopened(self) -> None:
        """Refuses attention that a reentrant checkpoint would run again outside of any scope.

        That is one with no part's forward of ours between it and the attention.
        """
        frame = None if torch.is_grad_enabled() else sys._getframe(1)
        while frame is not None and frame.f_code not in self.wrapping.reopening:
            if frame.f_code is CheckpointFunction.forward.__code__:
                raise ValueError(
                    f"{self.site} attends in a function under a reentrant checkpoint, which in "
                    "backward would run it again on this rank's shard alone: checkpoint the module "
                    "that attends, or pass use_reentrant=False"
                )
            frame = frame.f_back

    def _record(
        self, query: Tensor, key: Tensor, mask: Any, is_causal: bool, structure: dict[str, Any]
    ) -> None:
        words = ["causal"] * is_causal + sorted(structure) + ["mask"] * (mask is not None)
        if self._sites:
            self.wrapping.seen[self._sites[-1].name] = Seen(
                query.shape[2], key.shape[2], ", ".join(words) or "none"
            )


def _of_all_keys(mask: Tensor, lens: tuple[int, ...], scope: Scope) -> Tensor:
    """A mask [.., 1, l] of this rank's keys to one of all, [.., 1, S]; a small collective."""
    if mask.ndim != 4 or mask.shape[-2] != 1:
        raise ValueError(
            f"{scope.site} attends with a mask {tuple(mask.shape)}: only a mask of keys, the same "
            "for all queries, [batch, heads or 1, 1, keys], can be put together from ranks' parts"
        )
    bits = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    whole = gather_sequence_sum_grads(bits, scope.attention.group, dim=3, seq_lens=lens)
    return whole.to(mask.dtype)


def _of_own_rows(mask: Tensor, lens: tuple[int, ...], length: int) -> Tensor | QueryRows:
    """A mask [.., l, Sk] is of this rank's rows, and one of [.., 1 or S, Sk] is whole."""
    return QueryRows(mask) if mask.shape[-2] == length not in (1, sum(lens)) else mask


def _each_token_alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Something of attention's shape that depends on a token's own query, key and value only."""
    out = query.mean((2, 3), keepdim=True) + query[..., :1]
    if key.shape[1] == query.shape[1]:
        out = out + key.mean((2, 3), keepdim=True) + key[:, :, :1, :1]
        out = out + value.mean((2, 3), keepdim=True)
    return out.expand(*query.shape[:3], value.shape[3])
