"""The one exchange: shards of a sequence to tiles of attention work, and back.

A shard tensor is [B, l, heads, D]: this rank's rows, all heads. A tile tensor is [B, rows, h, D]:
the rows and heads of this rank's tile. `shard_to_tile` sends each rank the part of its tile that
lies in this shard; `tile_to_shard` is its transpose, and sums where a row and head had been sent
to several ranks. Each is the other's backward pass.

Between ranks, memory is [rows, B, h, D]. Rows then concatenate in rank order into a whole tile, so
that what arrives is a view of what was received, and what a kernel leaves in that order is sent
as it lies. That is one copy a tensor and direction: into the send buffer on the way to tiles, out
of the receive buffer on the way back. Fused tensors share one message, row by row; on the way back
that takes a second copy, which is worth it for small messages only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup, *, fused: bool
) -> tuple[Tensor, ...]:
    """Scatter rows and gather heads: the transpose of `shard_to_tile`, with the same routes.

    What several tiles hold of one (row, head) is summed; what no tile holds is zero.
    """
    return _apply(_TileToShard, tensors, routes, group, fused)


def _apply(
    function: type[torch.autograd.Function],
    tensors: Sequence[Tensor],
    routes: Sequence[Route],
    group: dist.ProcessGroup,
    fused: bool,
) -> tuple[Tensor, ...]:
    """Run the tensors that change through one autograd node, and leave the others alone."""
    moving = [i for i, route in enumerate(routes) if not route.is_identity]
    result = list(tensors)
    if moving:
        moved = function.apply(
            tuple(routes[i] for i in moving), group, fused, *(tensors[i] for i in moving)
        )
        for i, tensor in zip(moving, moved, strict=True):
            result[i] = tensor
    return tuple(result)


class _ShardToTile(torch.autograd.Function):
    """y_j = sum_i S_ij x_i, where S_ij picks the rows and heads of shard i that tile j needs."""

    @staticmethod
    def forward(
        ctx: Any, routes: tuple[Route, ...], group: dist.ProcessGroup, fused: bool, *shards: Tensor
    ) -> tuple[Tensor, ...]:
        messages = [_ToTiles(*bundle, group) for bundle in _bundles(shards, routes, fused)]
        return _remember(ctx, routes, group, fused, _arrived(messages))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, tile_to_shard, grads)


class _TileToShard(torch.autograd.Function):
    """x_i = sum_j S_ij^T y_j: the transpose of `_ShardToTile`, hence its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, routes: tuple[Route, ...], group: dist.ProcessGroup, fused: bool, *tiles: Tensor
    ) -> tuple[Tensor, ...]:
        messages = [_ToShards(*bundle, group) for bundle in _bundles(tiles, routes, fused)]
        return _remember(ctx, routes, group, fused, _arrived(messages))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, shard_to_tile, grads)


def _remember(
    ctx: Any,
    routes: tuple[Route, ...],
    group: dist.ProcessGroup,
    fused: bool,
    outputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Keep what backward needs; the output of a frozen input asks for no gradient either."""
    ctx.routes, ctx.group, ctx.fused = routes, group, fused
    needed = ctx.needs_input_grad[3:]
    ctx.mark_non_differentiable(
        *(output for output, need in zip(outputs, needed, strict=True) if not need)
    )
    return outputs


def _transposed(
    ctx: Any, dual: Callable[..., tuple[Tensor, ...]], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that need one, all through one exchange."""
    needed = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
    moved = dual(
        [grads[i] for i in needed], [ctx.routes[i] for i in needed], ctx.group, fused=ctx.fused
    )
    result: list[Tensor | None] = [None] * len(grads)
    for i, grad in zip(needed, moved, strict=True):
        result[i] = grad
    return None, None, None, *result


_Bundle = tuple[tuple[int, ...], list[Tensor], list[Route]]


def _bundles(tensors: Sequence[Tensor], routes: Sequence[Route], fused: bool) -> list[_Bundle]:
    """What travels in one message: a tensor, or all tensors whose rows travel alike."""
    alike: dict[object, list[int]] = {}
    for i, route in enumerate(routes):
        alike.setdefault((route.shards, route.rows) if fused else i, []).append(i)
    return [
        (tuple(some), [tensors[i] for i in some], [routes[i] for i in some])
        for some in alike.values()
    ]


def _arrived(messages: Sequence[_ToTiles | _ToShards]) -> tuple[Tensor, ...]:
    """The results of all messages, in the order of the tensors they were made from."""
    results: dict[int, Tensor] = {}
    for message in messages:
        results.update(zip(message.indices, message.wait(), strict=True))
    return tuple(results[i] for i in range(len(results)))


class _Message:
    """One collective over the tensors of a bundle: what both directions know of its memory."""

    def __init__(
        self,
        indices: tuple[int, ...],
        tensors: list[Tensor],
        routes: list[Route],
        group: dist.ProcessGroup,
    ) -> None:
        self.indices, self.tensors, self.routes, self.group = indices, tensors, routes, group
        self.rank, self.ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self.route = routes[0]  # for rows, which all routes of a bundle share
        self.to_tiles = [self.route.between(self.rank, j) for j in self.ranks]
        self.to_shards = [self.route.between(i, self.rank) for i in self.ranks]

    def sizes_by_target(self) -> list[int]:
        """Elements of this shard in each rank's tile."""
        return [len(rows) * self._width(j) for j, rows in enumerate(self.to_tiles)]

    def sizes_by_source(self) -> list[int]:
        """Elements of this tile in each rank's shard."""
        return [len(rows) * self._width(self.rank) for rows in self.to_shards]

    def start(self, sent: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> None:
        """Launch the collective; a route that stays on its rank needs none."""
        self.sent = sent  # alive until the collective is done
        self.work: dist.Work | None = None
        if all(route.is_local for route in self.routes):
            self.received = sent
            return
        self.received = sent.new_empty(sum(receive_sizes))
        self.work = dist.all_to_all_single(
            self.received, sent, receive_sizes, send_sizes, group=self.group, async_op=True
        )

    def finish(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received

    def laid_out(self, memory: Tensor, num_rows: int, tile: int) -> list[Tensor]:
        """Views [B, rows, h, D] of each tensor's part of rows that go to or come from a tile."""
        rows = memory.view(num_rows, self._width(tile))
        return [
            part.view(num_rows, tensor.shape[0], len(route.heads[tile]), tensor.shape[3]).transpose(
                0, 1
            )
            for part, tensor, route in zip(
                rows.split(self._widths(tile), dim=1), self.tensors, self.routes, strict=True
            )
        ]

    def _widths(self, tile: int) -> list[int]:
        return [
            tensor.shape[0] * len(route.heads[tile]) * tensor.shape[3]
            for tensor, route in zip(self.tensors, self.routes, strict=True)
        ]

    def _width(self, tile: int) -> int:
        return sum(self._widths(tile))

    def own_rows(self, rows: range) -> slice:
        """Global rows of this shard as a slice of it."""
        start = self.route.shards[self.rank].start
        return slice(rows.start - start, rows.stop - start)


class _ToTiles(_Message):
    """Packs [rows, B, h, D] for each tile and sends; a tile is a view of what arrives."""

    def __init__(self, *bundle_and_group: Any) -> None:
        super().__init__(*bundle_and_group)
        sizes = self.sizes_by_target()
        sent = self.tensors[0].new_empty(sum(sizes))
        for target, (rows, block) in enumerate(zip(self.to_tiles, sent.split(sizes), strict=True)):
            views = self.laid_out(block, len(rows), target)
            for tensor, route, view in zip(self.tensors, self.routes, views, strict=True):
                heads = route.heads[target]
                view.copy_(tensor[:, self.own_rows(rows), heads.start : heads.stop])
        self.start(sent, sizes, self.sizes_by_source())

    def wait(self) -> list[Tensor]:
        return self.laid_out(self.finish(), len(self.route.rows[self.rank]), self.rank)


class _ToShards(_Message):
    """Sends a tile as it lies in memory where it can; unpacks, or sums, what arrives."""

    def __init__(self, *bundle_and_group: Any) -> None:
        super().__init__(*bundle_and_group)
        if len(self.tensors) == 1:
            sent = self.tensors[0].transpose(0, 1).contiguous().view(-1)
        else:
            sent = self.tensors[0].new_empty(sum(tensor.numel() for tensor in self.tensors))
            views = self.laid_out(sent, self.tensors[0].shape[1], self.rank)
            for view, tensor in zip(views, self.tensors, strict=True):
                view.copy_(tensor)
        self.start(sent, self.sizes_by_source(), self.sizes_by_target())

    def wait(self) -> list[Tensor]:
        received = self.finish()
        if all(route.is_partition and route.keeps_heads_together for route in self.routes):
            return self.laid_out(received, len(self.route.shards[self.rank]), self.rank)
        shards = [self._blank(*pair) for pair in zip(self.tensors, self.routes, strict=True)]
        blocks = received.split(self.sizes_by_target())
        for target, (rows, block) in enumerate(zip(self.to_tiles, blocks, strict=True)):
            views = self.laid_out(block, len(rows), target)
            for shard, route, view in zip(shards, self.routes, views, strict=True):
                heads = route.heads[target]
                part = shard[:, self.own_rows(rows), heads.start : heads.stop]
                if route.is_partition:
                    part.copy_(view)
                else:
                    part.add_(view)
        return [part.to(tensor.dtype) for part, tensor in zip(shards, self.tensors, strict=True)]

    def _blank(self, tensor: Tensor, route: Route) -> Tensor:
        """Memory for a shard: to be filled, or zeros to sum into, in float32 at least."""
        rows = len(route.shards[self.rank])
        shape = (tensor.shape[0], rows, route.num_heads, tensor.shape[3])
        if route.is_partition:
            return tensor.new_empty(shape)
        return tensor.new_zeros(shape, dtype=torch.promote_types(tensor.dtype, torch.float32))
