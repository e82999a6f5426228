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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.tiling import Route


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
        messages = [_ToTiles(*bundle, group) for bundle in _bundles(shards, routes, fused)]
        tiles: dict[int, Tensor] = {}
        for message in messages:
            tiles.update(zip(message.indices, message.tiles(), strict=True))
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
        self.rank, self.ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self.route = routes[0]  # for rows, which all routes of a message share
        self.to_tiles = [self.route.between(self.rank, j) for j in self.ranks]
        self.shard_sizes = [len(rows) * self._width(j) for j, rows in enumerate(self.to_tiles)]
        self.tile_sizes = [
            len(self.route.between(i, self.rank)) * self._width(self.rank) for i in self.ranks
        ]

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
        return self.received

    def laid_out(self, memory: Tensor, num_rows: int, tile: int) -> list[Tensor]:
        """Views [B, rows, h, D] of each tensor's part of rows that go to or come from a tile."""
        widths = self._widths(tile)
        parts = memory.view(num_rows, sum(widths)).split(widths, dim=1)
        return [
            part.view(num_rows, tensor.shape[0], len(route.heads[tile]), tensor.shape[3]).transpose(
                0, 1
            )
            for part, tensor, route in zip(parts, self.tensors, self.routes, strict=True)
        ]

    def of_shard(self, tensor: Tensor, route: Route, tile: int) -> Tensor:
        """The part of a shard tensor, [B, rows, h, D], that a tile needs."""
        start, rows, heads = route.shards[self.rank].start, self.to_tiles[tile], route.heads[tile]
        return tensor[:, rows.start - start : rows.stop - start, heads.start : heads.stop]

    def _widths(self, tile: int) -> list[int]:
        return [
            tensor.shape[0] * len(route.heads[tile]) * tensor.shape[3]
            for tensor, route in zip(self.tensors, self.routes, strict=True)
        ]

    def _width(self, tile: int) -> int:
        return sum(self._widths(tile))


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
        for target, block in enumerate(sent.split(self.shard_sizes)):
            views = self.laid_out(block, len(self.to_tiles[target]), target)
            for shard, route, view in zip(shards, routes, views, strict=True):
                view.copy_(self.of_shard(shard, route, target))
        self.start(sent, self.shard_sizes, self.tile_sizes)

    def tiles(self) -> list[Tensor]:
        return self.laid_out(self.finish(), len(self.route.rows[self.rank]), self.rank)


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
        else:  # sums are kept in float32 at least
            shard = tile.new_zeros(shape, dtype=torch.promote_types(tile.dtype, torch.float32))
        for target, block in enumerate(received.split(self.shard_sizes)):
            (view,) = self.laid_out(block, len(self.to_tiles[target]), target)
            part = self.of_shard(shard, route, target)
            if route.is_partition:
                part.copy_(view)
            else:
                part.add_(view)
        return shard.to(tile.dtype)
