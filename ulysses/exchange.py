"""The one exchange: shards of a sequence to tiles of attention work, and back.

A shard tensor is [B, l, heads, D]: this rank's rows, all heads. A tile tensor is [B, rows, h, D]:
the rows and heads of this rank's tile. `shard_to_tile` sends each rank the part of its tile that
lies in this shard; `tile_to_shard` is its transpose, and sums where a row and head had been sent
to several ranks. Each is the other's backward pass.

Between ranks, memory is [rows, B, h, D]. Rows then concatenate in rank order into a whole tile, so
that what arrives is a view of what was received, and what a kernel leaves in that order is sent
as it lies. That is one copy a tensor and direction: into the send buffer on the way to tiles, out
of the receive buffer on the way back. On the way to tiles, tensors may share one message, row by
row, which saves collectives where messages are small. On the way back they never do: that would
take a second copy, so their messages are under way at the same time instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.tiling import Route

# Messages under way to tiles: the next is packed while the last is sent, and the first one's buffer
# is given back before a third is needed.
_UNDER_WAY = 2


def shard_to_tile(
    tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup, *, fused: bool
) -> tuple[Tensor, ...]:
    """Scatter heads and gather rows: [B, l, heads, D] shards to [B, rows, h, D] tiles.

    Differentiable, twice too. Every rank of `group` must pass the same number of tensors with the
    same dtypes, B and D, and the same routes; `fused` packs tensors whose rows travel alike into
    one collective.
    """
    return _apply(_ShardToTile, tensors, routes, group, fused)


def tile_to_shard(
    tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Scatter rows and gather heads: the transpose of `shard_to_tile`, with the same routes.

    What several tiles hold of one (row, head) is summed; what no tile holds is zero.
    """
    return _apply(_TileToShard, tensors, routes, group)


def _apply(
    function: type[torch.autograd.Function],
    tensors: Sequence[Tensor],
    routes: Sequence[Route],
    *group_and_options: Any,
) -> tuple[Tensor, ...]:
    """Run the tensors that change through one autograd node, and leave the others alone."""
    moving = [i for i, route in enumerate(routes) if not route.is_identity]
    result = list(tensors)
    if moving:
        moved = function.apply(
            [routes[i] for i in moving], group_and_options, *(tensors[i] for i in moving)
        )
        for i, tensor in zip(moving, moved, strict=True):
            result[i] = tensor
    return tuple(result)


class _ShardToTile(torch.autograd.Function):
    """y_j = sum_i S_ij x_i, where S_ij picks the rows and heads of shard i that tile j needs."""

    @staticmethod
    def forward(
        ctx: Any, routes: list[Route], options: tuple[dist.ProcessGroup, bool], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        group, fused = options
        tiles: dict[int, Tensor] = {}
        messages: deque[_ToTiles] = deque()
        for bundle in _bundles(shards, routes, fused):
            if len(messages) == _UNDER_WAY:
                messages.popleft().arrive(tiles)
            messages.append(_ToTiles(*bundle, group))
        for message in messages:
            message.arrive(tiles)
        return _remember(ctx, routes, group, tuple(tiles[i] for i in range(len(shards))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, tile_to_shard, grads)


class _TileToShard(torch.autograd.Function):
    """x_i = sum_j S_ij^T y_j: the transpose of `_ShardToTile`, hence its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, routes: list[Route], options: tuple[dist.ProcessGroup], *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        messages = [
            _ToShards(tile, route, options[0]) for tile, route in zip(tiles, routes, strict=True)
        ]
        return _remember(ctx, routes, options[0], tuple(message.shard() for message in messages))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, partial(shard_to_tile, fused=False), grads)


def _remember(
    ctx: Any, routes: list[Route], group: dist.ProcessGroup, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Keep what backward needs; the output of a frozen input asks for no gradient either."""
    ctx.routes, ctx.group = routes, group
    needed = ctx.needs_input_grad[2:]
    ctx.mark_non_differentiable(
        *(output for output, need in zip(outputs, needed, strict=True) if not need)
    )
    return outputs


def _transposed(
    ctx: Any, dual: Callable[..., tuple[Tensor, ...]], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that need one, all through one exchange."""
    needed = [i for i, need in enumerate(ctx.needs_input_grad[2:]) if need]
    moved = dual([grads[i] for i in needed], [ctx.routes[i] for i in needed], ctx.group)
    result: list[Tensor | None] = [None] * len(grads)
    for i, grad in zip(needed, moved, strict=True):
        result[i] = grad
    return None, None, *result


_Bundle = tuple[list[int], list[Tensor], list[Route]]


def _bundles(tensors: Sequence[Tensor], routes: Sequence[Route], fused: bool) -> list[_Bundle]:
    """What travels in one message: a tensor, or all tensors whose rows travel alike."""
    alike: dict[object, list[int]] = {}
    for i, (tensor, route) in enumerate(zip(tensors, routes, strict=True)):
        alike.setdefault((route.shards, route.rows, tensor.dtype) if fused else i, []).append(i)
    return [
        (some, [tensors[i] for i in some], [routes[i] for i in some]) for some in alike.values()
    ]


class _Message:
    """One collective: which rows go where, and what its memory looks like."""

    def __init__(
        self, tensors: list[Tensor], routes: list[Route], group: dist.ProcessGroup
    ) -> None:
        self.tensors, self.routes, self.group = tensors, routes, group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.route = routes[0]  # for rows, which all routes of a message share
        self.widths = [  # [tile][tensor]: elements of a row that goes to or comes from a tile
            [
                tensor.shape[0] * len(route.heads[tile]) * tensor.shape[3]
                for tensor, route in zip(tensors, routes, strict=True)
            ]
            for tile in range(self.num_ranks)
        ]
        self.to_tiles = self.route.between[self.rank]
        self.shard_sizes = [
            len(rows) * sum(widths) for rows, widths in zip(self.to_tiles, self.widths, strict=True)
        ]
        own_width = sum(self.widths[self.rank])
        self.tile_sizes = [len(row[self.rank]) * own_width for row in self.route.between]

    def start(self, sent: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> None:
        """Launch the collective; rows that stay on their rank, on all ranks, need none."""
        self.sent = sent  # alive until the collective is done
        self.work: dist.Work | None = None
        self.received = sent
        if not all(route.is_local for route in self.routes):
            self.received = sent.new_empty(sum(receive_sizes))
            self.work = dist.all_to_all_single(
                self.received, sent, receive_sizes, send_sizes, group=self.group, async_op=True
            )

    def finish(self) -> Tensor:
        """Wait for the collective; what it received."""
        if self.work is not None:
            self.work.wait()
        del self.sent
        return self.received

    def laid_out(self, memory: Tensor, num_rows: int, tile: int) -> list[Tensor]:
        """Views [B, rows, h, D] of each tensor's part of rows that go to or come from a tile."""
        parts = memory.view(num_rows, sum(self.widths[tile])).split(self.widths[tile], dim=1)
        return [
            part.view(num_rows, tensor.shape[0], len(route.heads[tile]), tensor.shape[3]).transpose(
                0, 1
            )
            for part, tensor, route in zip(parts, self.tensors, self.routes, strict=True)
        ]

    def pairs(self, memory: Tensor, shards: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts of a message beside the parts of the shards that they are, as views.

        Where all tiles are alike, those of all ranks are one view: [P, B, rows, h, D].
        """
        if all(route.is_even for route in self.routes):
            yield from self._pairs_of_all(memory, shards)
            return
        for tile, block in enumerate(memory.split(self.shard_sizes)):
            views = self.laid_out(block, len(self.to_tiles[tile]), tile)
            for view, shard, route in zip(views, shards, self.routes, strict=True):
                yield view, self._of_shard(shard, route, tile)

    def _pairs_of_all(
        self, memory: Tensor, shards: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        num_rows, widths = len(self.to_tiles[0]), self.widths[0]
        parts = memory.view(self.num_ranks, num_rows, sum(widths)).split(widths, dim=2)
        for part, shard in zip(parts, shards, strict=True):
            batch, _, num_heads, dim = shard.shape
            share = num_heads // self.num_ranks
            view = part.view(self.num_ranks, num_rows, batch, share, dim).transpose(1, 2)
            yield view, shard.unflatten(2, (self.num_ranks, share)).movedim(2, 0)

    def _of_shard(self, tensor: Tensor, route: Route, tile: int) -> Tensor:
        """The part of a shard tensor, [B, rows, h, D], that a tile needs."""
        start, rows, heads = route.shards[self.rank].start, self.to_tiles[tile], route.heads[tile]
        return tensor[:, rows.start - start : rows.stop - start, heads.start : heads.stop]


class _ToTiles(_Message):
    """Packs [rows, B, h, D] for each tile and sends; a tile is a view of what arrives."""

    def __init__(
        self,
        indices: list[int],
        shards: list[Tensor],
        routes: list[Route],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(shards, routes, group)
        self.indices = indices
        sent = shards[0].new_empty(sum(self.shard_sizes))
        for view, part in self.pairs(sent, shards):
            view.copy_(part)
        self.start(sent, self.shard_sizes, self.tile_sizes)

    def arrive(self, tiles: dict[int, Tensor]) -> None:
        """Wait, and put the tiles in their places."""
        received = self.laid_out(self.finish(), len(self.route.rows[self.rank]), self.rank)
        tiles.update(zip(self.indices, received, strict=True))


class _ToShards(_Message):
    """Sends a tile as it lies in memory where it can; unpacks, or sums, what arrives."""

    def __init__(self, tile: Tensor, route: Route, group: dist.ProcessGroup) -> None:
        super().__init__([tile], [route], group)
        sent = tile.transpose(0, 1).contiguous().view(-1)
        self.start(sent, self.tile_sizes, self.shard_sizes)

    def shard(self) -> Tensor:
        received, route, (tile,) = self.finish(), self.route, self.tensors
        num_rows = len(route.shards[self.rank])
        if route.is_partition and route.keeps_heads_together:
            return self.laid_out(received, num_rows, self.rank)[0]
        shape = (tile.shape[0], num_rows, route.num_heads, tile.shape[3])
        if route.is_partition:
            shard = tile.new_empty(shape)
            for view, part in self.pairs(received, [shard]):
                part.copy_(view)
            return shard
        # Sums are kept in float32 at least.
        exact = torch.promote_types(tile.dtype, torch.float32)
        total = tile.new_zeros(shape, dtype=exact)
        for view, part in self.pairs(received, [total]):
            part.add_(view)
        return total.to(tile.dtype)
