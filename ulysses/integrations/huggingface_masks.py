"""What transformers' mask functions mean: causal, windows, documents, padding; no dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import masking_utils

from ulysses.arguments import QueryRows
from ulysses.integrations.huggingface_cache import ShardedCache


@dataclass(frozen=True)
class Facts:
    """What is true of the whole sequence of a forward.

    lens: every rank's length, where it is known by then. padding: bool [B, S], True for a token.
    documents: borders of packed documents, the same in all rows of the batch. document_of: int
    [B, S], where they differ. cache: what new tokens, whole on every rank, come behind.
    """

    lens: tuple[int, ...] | None
    padding: Tensor | None = None
    documents: tuple[int, ...] | None = None
    document_of: Tensor | None = None
    cache: ShardedCache | None = None


@dataclass(frozen=True)
class Pattern:
    """Which keys a row sees by their places alone; a window is (keys left, keys right)."""

    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None

    def and_also(self, other: Pattern) -> Pattern:
        """What both see."""
        window = self.window or other.window
        if self.window and other.window and self.window != other.window:
            raise ValueError(f"two windows in one mask, {self.window} and {other.window}")
        return Pattern(self.is_causal or other.is_causal, window, self.chunk or other.chunk)


@dataclass(frozen=True)
class Visible:
    """What the mask function made: handed by transformers to each attention as its mask.

    It carries the facts itself, since a layer that is recomputed in backward gets it again.
    """

    pattern: Pattern
    facts: Facts

    def arguments(self, lens: tuple[int, ...], rank: int) -> dict[str, Any]:
        """For `Scope.attend`; `lens` are all ranks' lengths."""
        return {
            "attn_mask": self._tensor(lens, rank),
            "is_causal": self.pattern.is_causal,
            "window": self.pattern.window,
            "documents": self._documents(sum(lens)),
            "seq_lens": lens,
        }

    def behind_a_cache(self) -> dict[str, Any]:
        """For `Scope.attend_cached`, which is causal."""
        if not self.pattern.is_causal or self.pattern.chunk is not None:
            raise ValueError(
                f"attention that is not causal, or in chunks ({self.pattern}), has no sharded KV "
                "cache: pass use_cache=False"
            )
        return {"attn_mask": self._padding, "window": self.pattern.window}

    @property
    def _padding(self) -> Tensor | None:
        padding = self.facts.padding
        return None if padding is None else padding[:, None, None]

    def _documents(self, length: int) -> tuple[int, ...] | None:
        """Packed documents; chunks of attention are documents too."""
        chunk, documents = self.pattern.chunk, self.facts.documents
        if chunk is None:
            return documents
        if documents or self.facts.document_of is not None or self.facts.padding is not None:
            raise ValueError(
                f"chunked attention ({chunk} keys) with padding or packed documents: chunks then "
                "begin elsewhere in each; pass one document a row, without padding"
            )
        return (*range(0, length, chunk), length)

    def _tensor(self, lens: tuple[int, ...], rank: int) -> Tensor | QueryRows | None:
        """What is not structure: padding of keys, and documents that differ by row of the batch."""
        facts = self.facts
        if facts.document_of is None:
            return self._padding
        own = facts.document_of.narrow(1, sum(lens[:rank]), lens[rank])
        return QueryRows(own[:, None, :, None] == facts.document_of[:, None, None])


def read(function: Callable[..., Any]) -> Pattern:
    """A mask function's pattern.

    transformers composes them of nested functions, whose names and captured values are read here.
    Padding and packing it captured of this rank's shard: they are left to the facts. Raises
    ValueError for a function of another kind, which knows the shard's own places only.
    """
    kind = getattr(function, "__qualname__", "").partition(".<locals>")[0]
    held = _captured(function)
    if getattr(function, "__module__", "") == masking_utils.__name__:
        match kind:
            case "causal_mask_function":
                return Pattern(is_causal=True)
            case "and_masks":
                pattern = Pattern()
                for part in held["mask_functions"]:
                    pattern = pattern.and_also(read(part))
                return pattern
            case "sliding_window_overlay":
                return Pattern(window=(held["sliding_window"] - 1, None))
            case "sliding_window_bidirectional_overlay":
                return Pattern(window=(held["sliding_window"], held["sliding_window"]))
            case "chunked_overlay":
                return Pattern(chunk=held["chunk_size"])
            case "remap_positions_for_packed_sequence":
                return read(held["mask_function"])
            case (
                "bidirectional_mask_function"
                | "padding_mask_function"
                | "packed_sequence_mask_function"
            ):
                return Pattern()
    name = getattr(function, "__qualname__", repr(function))
    raise ValueError(
        f"a mask of its own kind, {name}: it says which tokens see each other by their places on "
        "this rank. Pass a whole [B, 1, S, S] attention_mask instead, or this rank's rows of it"
    )


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that a nested function holds, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
