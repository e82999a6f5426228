"""The one exchange: shards of a sequence to tiles of attention work, and back.

A shard tensor is [B, l, heads, D]: this rank's rows, all heads. A tile tensor is [B, rows, h, D]:
the rows and heads of this rank's tile. `shard_to_tile` sends each rank the part of its tile that
lies in this shard; `tile_to_shard` is its transpose, and sums where a row and head had been sent
to several ranks. Each is the other's backward pass.

That is one copy a tensor and direction, since messages are laid out as `ulysses.layout` says: into
the send buffer on the way to tiles, out of the receive buffer on the way back. On the way to
tiles, tensors may share one message, row by row, which saves collectives where messages are small.
On the way back they never do: that would take a second copy, so their messages are under way at
the same time instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses.layout import Layout, layout
from ulysses.route import Route
from ulysses.workspace import Workspace

# Messages under way to tiles: the next is packed while the last is sent, and the first one's buffer
# is given back before a third is needed.
_UNDER_WAY = 2
_WORKSPACE = Workspace()


def shard_to_tile(
    tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup, *, fused: bool
) -> tuple[Tensor, ...]:
    """Scatter heads and gather rows: [B, l, heads, D] shards to [B, rows, h, D] tiles.

    Differentiable, twice too. Every rank of `group` must pass the same number of tensors with the
    same dtypes, B and D, and the same routes; `fused` packs tensors whose rows travel alike into
    one collective.
    """
    return _apply(_ShardToTile, partial(_to_tiles, fused=fused), tensors, routes, group)


def tile_to_shard(
    tensors: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Scatter rows and gather heads: the transpose of `shard_to_tile`, with the same routes.

    What several tiles hold of one (row, head) is summed; what no tile holds is zero.
    """
    return _apply(_TileToShard, _to_shards, tensors, routes, group)


_Move = Callable[[Sequence[Tensor], Sequence[Route], dist.ProcessGroup], tuple[Tensor, ...]]


def _apply(
    function: type[torch.autograd.Function],
    move: _Move,
    tensors: Sequence[Tensor],
    routes: Sequence[Route],
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Move the tensors that change, through one autograd node if need be; leave the others."""
    moving = [i for i, route in enumerate(routes) if not route.is_identity]
    result = list(tensors)
    if moving:
        some, ways = [tensors[i] for i in moving], [routes[i] for i in moving]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in some):
            moved = function.apply(move, ways, group, *some)
        else:
            moved = move(some, ways, group)
        for i, tensor in zip(moving, moved, strict=True):
            result[i] = tensor
    return tuple(result)


class _Exchange(torch.autograd.Function):
    """One way through one node, which keeps what the way back needs."""

    @staticmethod
    def forward(
        ctx: Any, move: _Move, routes: list[Route], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = move(tensors, routes, group)
        ctx.routes, ctx.group = routes, group
        needed = ctx.needs_input_grad[3:]
        # The output of a frozen input asks for no gradient either.
        ctx.mark_non_differentiable(
            *(output for output, need in zip(outputs, needed, strict=True) if not need)
        )
        return outputs


class _ShardToTile(_Exchange):
    """y_j = sum_i S_ij x_i, where S_ij picks the rows and heads of shard i that tile j needs."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, tile_to_shard, grads)


class _TileToShard(_Exchange):
    """x_i = sum_j S_ij^T y_j: the transpose of `_ShardToTile`, hence its backward pass."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _transposed(ctx, partial(shard_to_tile, fused=False), grads)


def _transposed(
    ctx: Any, dual: Callable[..., tuple[Tensor, ...]], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that need one, all through one exchange."""
    needed = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
    moved = dual([grads[i] for i in needed], [ctx.routes[i] for i in needed], ctx.group)
    result: list[Tensor | None] = [None] * len(grads)
    for i, grad in zip(needed, moved, strict=True):
        result[i] = grad
    return None, None, None, *result


def _to_tiles(
    shards: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup, *, fused: bool
) -> tuple[Tensor, ...]:
    """Pack, send; a tile is a view of what arrives."""
    tiles: dict[int, Tensor] = {}
    under_way: deque[tuple[list[int], Layout, _Message]] = deque()

    def arrive() -> None:
        some, way, message = under_way.popleft()
        received = message.wait()
        if received is not message.sent:
            _WORKSPACE.give_back(message.sent)
        tiles.update((i, view.of(received)) for i, view in zip(some, way.tiles, strict=True))

    for some in _bundles(shards, routes, fused):
        if len(under_way) == _UNDER_WAY:
            arrive()
        bundle = [shards[i] for i in some]
        way = _layout(bundle, [routes[i] for i in some], group)
        size = way.shard_size
        sent = bundle[0].new_empty(size) if way.is_local else _WORKSPACE.borrow(bundle[0], size)
        for shard, parts in zip(bundle, way.parts, strict=True):
            for part in parts:
                part.view.of(sent).copy_(part.of_shard(shard))
        received = sent if way.is_local else sent.new_empty(way.tile_size)
        message = _Message(sent, way.shard_splits, received, way.tile_splits, group)
        under_way.append((some, way, message))
    while under_way:
        arrive()
    return tuple(tiles[i] for i in range(len(shards)))


def _bundles(tensors: Sequence[Tensor], routes: Sequence[Route], fused: bool) -> list[list[int]]:
    """What travels in one message: a tensor, or all tensors whose rows travel alike."""
    alike: dict[object, list[int]] = {}
    for i, (tensor, route) in enumerate(zip(tensors, routes, strict=True)):
        alike.setdefault((route.shards, route.rows, tensor.dtype) if fused else i, []).append(i)
    return list(alike.values())


def _to_shards(
    tiles: Sequence[Tensor], routes: Sequence[Route], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Send tiles as they lie in memory where that fits; unpack, or sum, what arrives."""
    under_way = []
    for tile, route in zip(tiles, routes, strict=True):
        way = _layout([tile], [route], group)
        sent, size = tile.transpose(0, 1).contiguous().view(-1), way.shard_size
        if way.is_local:
            received = sent
        else:
            received = tile.new_empty(size) if way.is_whole else _WORKSPACE.borrow(tile, size)
        message = _Message(sent, way.tile_splits, received, way.shard_splits, group)
        under_way.append((way, route, message))
    return tuple(_arrived(*one) for one in under_way)


def _arrived(way: Layout, route: Route, message: _Message) -> Tensor:
    """The shard that a message brings."""
    (parts,), (shape,), memory = way.parts, way.shards, message.wait()
    if way.is_whole:
        batch, rows, heads, dim = shape
        return memory.view(rows, batch, heads, dim).transpose(0, 1)
    if route.is_partition:
        shard = memory.new_empty(shape)
        for part in parts:
            part.of_shard(shard).copy_(part.view.of(memory))
    else:
        # Sums are kept in float32 at least.
        total = memory.new_zeros(shape, dtype=torch.promote_types(memory.dtype, torch.float32))
        for part in parts:
            part.of_shard(total).add_(part.view.of(memory))
        shard = total.to(memory.dtype)
    if memory is not message.sent:
        _WORKSPACE.give_back(memory)
    return shard


def _layout(tensors: list[Tensor], routes: list[Route], group: dist.ProcessGroup) -> Layout:
    sizes = tuple((tensor.shape[0], tensor.shape[3]) for tensor in tensors)
    return layout(tuple(routes), group.rank(), sizes)


class _Message:
    """One collective under way; rows that stay on their rank, on all ranks, need none."""

    def __init__(
        self,
        sent: Tensor,
        send_splits: list[int] | None,
        received: Tensor,
        receive_splits: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.sent, self._received = sent, received  # alive until the collective is done
        self._work: dist.Work | None = None
        if received is not sent:
            self._work = dist.all_to_all_single(
                received, sent, receive_splits, send_splits, group=group, async_op=True
            )

    def wait(self) -> Tensor:
        """What has been received, once it has."""
        if self._work is not None:
            self._work.wait()
        return self._received
