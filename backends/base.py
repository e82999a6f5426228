"""What a local kernel is: attention on one rank's tile, and what a kernel may refuse.

A kernel knows nothing of ranks and groups. It is handed complete rows, reads every count from the
tensors it is given, and either returns exact attention or says beforehand, through `unsupported`,
why it can not. `Problem` is plain data so that each rank can ask about the tiles of all ranks: a
refusal is then raised everywhere, before any communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query row sees: column j is visible to row i iff i+lower <= j <= i+upper.

    None leaves that side open. Causal attention, its bottom-right form and sliding windows are all
    bands, and a tile cut out of a band is a band again (`shifted`).
    """

    lower: int | None = None
    upper: int | None = None

    @property
    def is_full(self) -> bool:
        return self.lower is None and self.upper is None

    def shifted(self, query_start: int, key_start: int) -> Band:
        """The same visibility, seen from a tile that begins at that row and column."""
        by = query_start - key_start
        return Band(
            None if self.lower is None else self.lower + by,
            None if self.upper is None else self.upper + by,
        )

    def clipped(self, num_queries: int, num_keys: int) -> Band:
        """The band without the sides that hide nothing in a num_queries x num_keys rectangle."""
        lower, upper = self.lower, self.upper
        if lower is not None and num_queries - 1 + lower <= 0:
            lower = None
        if upper is not None and upper >= num_keys - 1:
            upper = None
        return Band(lower, upper)

    def keys(self, queries: range, num_keys: int) -> range:
        """The columns that at least one of these rows may see: one interval, possibly empty."""
        if not queries:
            return range(0)
        start = 0 if self.lower is None else max(0, queries.start + self.lower)
        stop = num_keys if self.upper is None else min(num_keys, queries.stop + self.upper)
        return range(min(start, num_keys), max(stop, min(start, num_keys)))

    def area(self, queries: range, num_keys: int) -> int:
        """How many (row, column) pairs are visible in these rows."""
        stop = len(queries) * num_keys
        if self.upper is not None:
            stop = _clamped_sum(queries, self.upper + 1, num_keys)
        start = 0
        if self.lower is not None:
            start = _clamped_sum(queries, self.lower, num_keys)
        return max(0, stop - start)

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Bool [num_queries, num_keys], True where the key is visible (SDPA's meaning)."""
        rows = torch.arange(num_queries, device=device).unsqueeze(1)
        columns = torch.arange(num_keys, device=device)
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        if self.lower is not None:
            visible &= columns >= rows + self.lower
        if self.upper is not None:
            visible &= columns <= rows + self.upper
        return visible


def _clamped_sum(rows: range, offset: int, top: int) -> int:
    """The sum over the rows of row + offset, each clamped to 0..top."""
    rising_from = min(max(rows.start, -offset), rows.stop)
    rising_to = min(max(rising_from, top - offset), rows.stop)
    count = rising_to - rising_from
    rising = count * (rising_from + rising_to - 1) // 2 + count * offset
    return rising + (rows.stop - rising_to) * top


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows that see a band of an interval of keys; the band counts from its corner."""

    queries: range
    keys: range
    band: Band = Band()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One local call as plain data: sizes, dtype and options, for any rank's tile."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    band: Band = Band()
    dropout_p: float = 0.0
    mask_dtype: torch.dtype | None = None
    mask_shape: tuple[int, int, int, int] | None = None
    alibi: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Dropout of attention weights, addressed so that ranks never repeat each other's pattern.

    `seed` is the call's, 64 bits; `head`, `query` and `key` are the global indices of the tile's
    first head, row and column. A kernel that can keys its pattern by global position, and then
    gives the same pattern for every number of ranks; one that has a random stream of its own
    derives that stream's seed from all four.
    """

    p: float
    seed: int
    head: int = 0
    query: int = 0
    key: int = 0

    def shifted(self, *, head: int = 0, query: int = 0, key: int = 0) -> Dropout:
        """The same pattern, seen from a part that begins there."""
        place = {"head": self.head + head, "query": self.query + query, "key": self.key + key}
        return replace(self, **place)


@dataclass(frozen=True, slots=True)
class Alibi:
    """A bias of slope * (key position - query position) for each head: slopes [H], floating.

    `distance` is the global position of the tile's first key minus that of its first query.
    """

    slopes: Tensor
    distance: int = 0

    def bias(self, queries: range, keys: range) -> Tensor:
        """[1, H, Sq, Sk] for these rows and columns of the tile."""
        device = self.slopes.device
        columns = torch.arange(keys.start, keys.stop, device=device)
        rows = torch.arange(queries.start, queries.stop, device=device)
        distance = columns - rows.unsqueeze(1) + self.distance
        return self.slopes.view(1, -1, 1, 1) * distance


def cut_mask(mask: Tensor, *, heads: range | None = None, queries: range, keys: range) -> Tensor:
    """The part of a mask [B|1, H|1, Sq|1, Sk|1]; sides of size 1 broadcast and stay."""
    for dim, part in ((1, heads), (2, queries), (3, keys)):
        if part is not None and mask.shape[dim] != 1:
            mask = mask.narrow(dim, part.start, len(part))
    return mask


@runtime_checkable
class LocalAttention(Protocol):
    """A local attention kernel.

    Tensors are query [B, Sq, H, D], key [B, Sk, Hkv, D] and value [B, Sk, Hkv, Dv] with any
    strides; H is a multiple of Hkv, and query head i uses key/value head i // (H / Hkv). None of
    the sizes is 0. The result is [B, Sq, H, Dv] with any strides; a row that sees no key is zero
    and so are its gradients. `mask`, `alibi` and `sinks` are passed only where a call has them:
    a mask [B|1, H|1, Sq|1, Sk|1], bool (True attends) or added to the scores, that goes on top of
    the band; and sinks [H], each a score that takes weight and gives no value.

    A kernel may also have `attend_with_lse`, with the same arguments, which returns the output and
    the log-sum-exp [B, Sq, H] of each row's scores: natural logarithm, float32 at least, -inf for
    a row that sees no key. If gradients flow through that, it says `lse_has_gradient = True`.

    And it may have `attend_pieces`, with a sequence `pieces` of `Piece` in the place of `band`:
    packed documents, say, in one call of its operator. They cover the rows in order; one without
    keys sees nothing. The other arguments are those of a call for all rows and keys. It returns
    the output, or None for pieces that it has no such call for: each is then a call of its own,
    and has been accepted as one by `unsupported`.
    """

    @property
    def name(self) -> str:
        """The registry's name for it, used in messages."""
        ...

    @property
    def contiguous(self) -> bool:
        """True if it reads row-major tensors only, so that a strided view costs it a copy."""
        ...

    def unsupported(self, problem: Problem) -> str | None:
        """Why it can not run this problem, for a user to act on; None if it can."""
        ...

    def materialises(self, problem: Problem) -> bool:
        """True if it would have to build a mask tensor to run this problem."""
        ...

    def __hash__(self) -> int:
        """Decisions are remembered by call and kernel, so a kernel must be hashable."""
        ...

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        band: Band,
        scale: float,
        dropout: Dropout | None = None,
        mask: Tensor | None = None,
        alibi: Alibi | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of these rows over these keys."""
        ...


def no_attention(query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
    """The result where nothing is seen: zeros [B, Sq, H, Dv] that depend on all inputs.

    The dependence keeps the autograd graph whole, so that a rank with nothing to do still takes
    part in its peers' backward exchange. `more` are what may be learned besides: mask, slopes,
    sinks.
    """
    return query.new_zeros(*query.shape[:3], value.shape[3]) + nothing(query, key, value, *more)


def nothing(first: Tensor, *more: Tensor) -> Tensor:
    """Zero, which depends on all of these."""
    return sum((tensor[..., :0].sum() for tensor in more), first[..., :0].sum())
