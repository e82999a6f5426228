"""Random calls of the layer: a number stands for one call, the same on every rank."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests import dense, reference
from ulysses import QueryRows, Replicated
from ulysses.tiling import Grid, grids

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One call, in plain numbers that every rank draws alike."""

    number: int
    grid: Grid | None
    batch: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool
    shape: dense.Shape
    bias: str | None  # which causal bias says is_causal
    mask: tuple[str, tuple[int, ...], bool] | None  # kind, shape of the whole, in QueryRows
    dropout_p: float
    scale: float | None
    alibi: bool
    sinks: bool
    with_lse: bool
    check: bool
    learned: frozenset[str]
    order: tuple[int, ...]  # of the dims in memory


def ranks_of(number: int) -> int:
    """How many ranks make this call."""
    return number % 4 + 1


def draw(number: int) -> Drawn:
    """The call of that number."""
    rng = random.Random(number)
    num_ranks = ranks_of(number)
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2, 3, 4))
    batch = rng.choice((1, 1, 2, 3))
    kind = rng.choice(("self", "self", "self", "self", "cross", "replicated"))
    query_lens = _lengths(rng, num_ranks)
    key_lens = query_lens if kind == "self" else _lengths(rng, num_ranks)
    sizes = (batch, heads, sum(query_lens), sum(key_lens))
    shape, bias = _shape(rng, sizes[2], sizes[3], kind == "self")
    names = {"query", "key", "value", "mask", "alibi_slopes", "sinks"}
    if rng.random() < 0.3:
        names = {name for name in sorted(names) if rng.random() < 0.4}
    return Drawn(
        number=number,
        grid=rng.choice((None, *grids(num_ranks), *grids(num_ranks))),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        dims=(rng.randint(1, 8), rng.randint(1, 8)),
        query_lens=query_lens,
        key_lens=key_lens,
        dtype=rng.choice((torch.float64,) * 4 + DTYPES),
        replicated=kind == "replicated",
        shape=shape,
        bias=bias,
        mask=_mask(rng, sizes) if bias is None and rng.random() < 0.5 else None,
        dropout_p=rng.choice((0.0, 0.0, 0.0, 0.3)),
        scale=rng.choice((None, None, 0.7)),
        alibi=rng.random() < 0.25,
        sinks=rng.random() < 0.25,
        with_lse=rng.random() < 0.2,
        check=rng.random() < 0.1,
        learned=frozenset(names),
        order=tuple(rng.choice(((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)))),
    )


def tensors(drawn: Drawn) -> dict[str, Tensor]:
    """Whole tensors by the layer's names of them, in the call's dtype."""
    (dim, value_dim), seed = drawn.dims, drawn.number
    num_queries, num_keys = sum(drawn.query_lens), sum(drawn.key_lens)
    normal: Callable[..., Tensor] = partial(reference.draw, dtype=drawn.dtype)
    tensors = {
        "query": normal(drawn.batch, num_queries, drawn.heads, dim, seed=seed),
        "key": normal(drawn.batch, num_keys, drawn.kv_heads, dim, seed=seed + 1),
        "value": normal(drawn.batch, num_keys, drawn.kv_heads, value_dim, seed=seed + 2),
    }
    if drawn.mask is not None:
        kind, shape, _ = drawn.mask
        mask = reference.draw(*(1,) * (4 - len(shape)), *shape, seed=seed + 3)
        hidden = reference.draw(*mask.shape, seed=seed + 4) > 0.3
        mask = mask.to(torch.float32 if kind == "float32" else drawn.dtype)
        tensors["mask"] = ~hidden if kind == "bool" else mask.masked_fill(hidden, -torch.inf)
    if drawn.alibi:
        tensors["alibi_slopes"] = normal(drawn.heads, seed=seed + 5) / 4
    if drawn.sinks:
        tensors["sinks"] = normal(drawn.heads, seed=seed + 6)
    return tensors


def lens_of(drawn: Drawn, name: str) -> tuple[int, ...] | None:
    """The shard lengths of a tensor; None for one that each rank is given whole."""
    if name == "query" or (name == "mask" and drawn.mask is not None and drawn.mask[2]):
        return drawn.query_lens
    if name in ("key", "value") and not drawn.replicated:
        return drawn.key_lens
    return None


def own(drawn: Drawn, name: str, tensor: Tensor, rank: int) -> Tensor:
    """What a rank is given of a tensor, in memory of its own."""
    lens = lens_of(drawn, name)
    if lens is not None and name == "mask":
        tensor = reference.shard(tensor.transpose(1, 2), lens, rank).transpose(1, 2)
    elif lens is not None:
        tensor = reference.shard(tensor, lens, rank)
    return in_memory(tensor, drawn.order)


def in_memory(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose dims lie in another order."""
    if tensor.ndim != 4:
        return tensor.clone()
    back = [order.index(dim) for dim in range(4)]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def arguments(drawn: Drawn, own: dict[str, Tensor]) -> dict[str, Any]:
    """The layer's arguments."""
    arguments: dict[str, Any] = dict(own)
    shape, sizes = drawn.shape, (sum(drawn.query_lens), sum(drawn.key_lens))
    if drawn.replicated:
        arguments |= {name: Replicated(own[name]) for name in ("key", "value")}
    else:
        arguments["key_lens"] = drawn.key_lens
    if drawn.mask is not None:
        mask = arguments.pop("mask")
        mask = mask.view(mask.shape[4 - len(drawn.mask[1]) :]) if not drawn.mask[2] else mask
        arguments["attn_mask"] = QueryRows(mask) if drawn.mask[2] else mask
    elif drawn.bias is not None:
        make = causal_upper_left if drawn.bias == "upper left" else causal_lower_right
        with warnings.catch_warnings():  # of NaNs, where rows see nothing
            warnings.simplefilter("ignore")
            arguments["attn_mask"] = make(*sizes)
    return arguments | {
        "seq_lens": drawn.query_lens,
        "is_causal": shape.is_causal and drawn.bias is None,
        "window": shape.window,
        "documents": shape.documents,
        "prefix_len": shape.prefix_len,
        "dropout_p": drawn.dropout_p,
        "scale": drawn.scale,
    }


def _lengths(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """Shard lengths: even, chosen, or mostly empty."""
    longest = rng.choice((1, 4, 9, 9, 9, 9))
    if rng.random() < 0.4:
        return (rng.randint(1, longest),) * num_ranks
    return tuple(rng.randint(0, longest) for _ in range(num_ranks))


def _shape(
    rng: random.Random, num_queries: int, num_keys: int, is_self: bool
) -> tuple[dense.Shape, str | None]:
    """What is seen, and the causal bias that says it where is_causal does not."""
    bias = rng.choice((None, "upper left", "lower right")) if not is_self else None
    is_causal = rng.random() < 0.5 if is_self else bias is not None
    window = None
    if (is_self or bias) and rng.random() < 0.4:
        window = tuple(rng.choice((None, 0, 1, 3, 7)) for _ in range(2))
    shape = dense.Shape(
        is_causal=is_causal,
        diagonal=num_keys - num_queries if bias == "lower right" else 0,
        window=window,
    )
    if is_self and rng.random() < 0.3:
        shape = replace(shape, documents=_documents(rng, num_queries))
    elif is_causal and window is None and shape.diagonal == 0 and rng.random() < 0.3:
        shape = replace(shape, prefix_len=rng.randint(0, num_keys))
    return shape, bias


def _documents(rng: random.Random, length: int) -> tuple[int, ...]:
    """Long, single-token and empty ones, perhaps with padding behind the last."""
    end = length if rng.random() < 0.6 else rng.randint(0, length)
    return tuple(sorted([0, end, *(rng.randint(0, end) for _ in range(rng.randint(0, 6)))]))


def _mask(
    rng: random.Random, sizes: tuple[int, int, int, int]
) -> tuple[str, tuple[int, ...], bool]:
    in_rows = rng.random() < 0.4
    shape = [size if rng.random() < 0.6 else 1 for size in sizes]
    if in_rows:
        shape[2] = sizes[2]
    elif rng.random() < 0.3:
        shape = shape[rng.randint(1, 2) :]
    return rng.choice(("bool", "float", "float32")), tuple(shape), in_rows
