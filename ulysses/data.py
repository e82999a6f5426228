"""Data for ranks that share a sequence: the same sample on all of them, and each one's shard of it.

    loader = ulysses.data_loader(dataset, mesh, batch_size=2, shuffle=True, targets="targets")
    for batch in loader:  # input_ids, labels, ...: this rank's tokens of its dp rank's samples
        ...

What makes it so: the sampler goes by the dp rank, everything random in a dataset or a collate
function is seeded by the dp rank, and the first batch of each epoch is compared over the sp ranks.
For a loader of your own keep to the same three, or wrap it in a `SequenceLoader`.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ulysses.draws import data_seed
from ulysses.group import process_group
from ulysses.sequence import Group, shard_batch, shift_labels

# The sequence's dim in what tokenizers and collate functions call by these names. An attention_mask
# is not among them: attention needs that of all keys, whole.
TOKEN_DIMS: Mapping[str, int] = {
    "input_ids": 1,
    "labels": 1,
    "loss_mask": 1,
    "position_ids": -1,
    "token_type_ids": 1,
}


def shard_tokens(
    batch: Mapping[str, Any],
    group: Group,
    *,
    dims: Mapping[str, int] = TOKEN_DIMS,
    targets: str | None = None,
    positions: str | None = None,
) -> dict[str, Any]:
    """A batch with this rank's part of everything that `dims` names; the rest stays as it is.

    `dims` maps a name to the sequence's dim. No name is dropped: `labels` stay `labels`, sharded
    and not shifted. Which other names a batch has, and whether they are None, changes nothing.
    With `targets` the next-token targets come in addition under that name, shifted before they are
    sharded; with `positions` each token's place in the whole, int64 [1, l], taken from input_ids.
    No communication.

    Raises ValueError naming the tensors if their lengths differ, KeyError if what `targets` or
    `positions` are made of is missing.
    """
    whole = dict(batch)
    named = {name: dims[name] for name in dims if name in whole}
    if targets is not None:
        whole[targets] = shift_labels(_needed(batch, "labels", f"targets={targets!r}"))
        named[targets] = dims.get("labels", 1)
    if positions is not None:
        ids = _needed(batch, "input_ids", f"positions={positions!r}")
        whole[positions] = torch.arange(ids.shape[dims.get("input_ids", 1)], device=ids.device)[
            None
        ]
        named[positions] = 1
    parts = shard_batch({name: whole[name] for name in named}, group, dim=named)
    return {**whole, **parts}


def check_same_across_ranks(batch: Any, group: Group) -> None:
    """Raises ValueError on every rank, naming the tensor, unless all hold the same batch.

    `batch` is a tensor or any nesting of mappings and sequences. Compares shape, dtype and every
    bit, of other values what they print. Collective: each rank sends a digest for each value.
    """
    found = process_group(group)
    if found is None:
        return
    digests = dict(_digests(batch, ""))
    views: list[Any] = [None] * dist.get_world_size(found)
    dist.all_gather_object(views, digests, group=found)
    names = dict.fromkeys(name for view in views for name in view)
    wrong = [line for name in names if (line := _difference(name, views))]
    if wrong:
        raise ValueError(
            f"ranks that share a sequence hold different batches: {'; '.join(wrong)}. Attention "
            "would mix different samples: sample by the dp rank and seed by it (data_loader does), "
            "not by the global rank"
        )


class SequenceLoader:
    """Iterates over another loader's whole batches and gives this rank's part of each.

    `loader` must give every sp rank of `mesh` the same batches; what is random in this process
    while it makes one is seeded alike on them, and `DataLoader` workers follow the loader's own
    `generator` (see `data_loader`). The first batch of each epoch is compared over the sp ranks,
    all of them with `check=True`. `options` go to `shard_tokens`.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        mesh: DeviceMesh,
        *,
        seed: int = 0,
        check: bool = False,
        **options: Any,
    ) -> None:
        self.loader = loader
        self.group = process_group(mesh["sp"])
        self.check = check
        self._seed = data_seed(mesh, seed)
        self._options = options
        self._epoch = 0

    def __len__(self) -> int:
        length: int = len(self.loader)  # type: ignore[arg-type]  # has one or says so itself
        return length

    def set_epoch(self, epoch: int) -> None:
        """Another order, and other draws, for the next pass: call it before each, on all ranks."""
        self._epoch = epoch
        sampler = getattr(self.loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        generator = getattr(self.loader, "generator", None)
        if generator is not None:
            generator.manual_seed(self._seed + _apart(epoch))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        seeds = torch.Generator().manual_seed(self._seed + _apart(self._epoch))
        batches = None
        for number in range(sys.maxsize):
            with _draws_from(int(torch.randint(2**32, (), generator=seeds, device="cpu"))):
                batches = iter(self.loader) if batches is None else batches
                batch = next(batches, None)
            if batch is None:
                return
            if self.check or number == 0:
                check_same_across_ranks(batch, self.group)
            yield shard_tokens(batch, self.group, **self._options)


def data_loader(
    dataset: Dataset[Any],
    mesh: DeviceMesh,
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    targets: str | None = None,
    positions: str | None = None,
    **options: Any,
) -> SequenceLoader:
    """A DataLoader whose samples are shared out over dp, and their tokens over sp.

    `batch_size` is that of one dp rank. All ranks of an sp group get the same samples, those of
    different dp ranks differ. `targets` and `positions` are as in `shard_tokens`, whose defaults
    hold; `options` go to torch's DataLoader. `seed` is the run's, equal on all ranks.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        num_replicas=mesh["dp"].size(),
        rank=mesh["dp"].get_local_rank(),
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(data_seed(mesh, seed)),
        **options,
    )
    return SequenceLoader(loader, mesh, seed=seed, targets=targets, positions=positions)


def _needed(batch: Mapping[str, Any], name: str, what_for: str) -> Tensor:
    tensor = batch.get(name)
    if tensor is None:
        raise KeyError(f"{what_for} is made from {name!r}, but the batch has only {sorted(batch)}")
    assert isinstance(tensor, Tensor), f"{name} is a {type(tensor).__name__}"
    return tensor


def _apart(epoch: int) -> int:
    """Far from all dp ranks' seeds of other epochs, in the 32 bits that torch's CPU draws go by."""
    return epoch * 0x9E3779B1 % 2**32


@contextmanager
def _draws_from(seed: int) -> Iterator[None]:
    """Within, CPU draws of torch, random and numpy come from `seed`; afterwards as before."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def _digests(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """(name, digest) of every value in a nesting: `images.0`, `labels`, ..."""
    if isinstance(value, Tensor):
        yield name or "the batch", _digest(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _digests(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _digests(inner, f"{name}.{place}" if name else str(place))
    else:
        yield name or "the batch", repr(value)


def _digest(tensor: Tensor) -> str:
    """Shape, dtype and a hash of the bits; torch has no view of memory without numpy."""
    held = tensor.detach().cpu().contiguous()
    bits = ctypes.string_at(held.data_ptr(), held.nbytes) if held.nbytes else b""
    return f"{tuple(held.shape)} {held.dtype} {hashlib.blake2b(bits, digest_size=8).hexdigest()}"


def _difference(name: str, views: list[dict[str, str]]) -> str | None:
    """How the ranks' digests of one value differ from the first rank's."""
    first, *others = (view.get(name, "none") for view in views)
    odd = [f"rank {rank} has {told}" for rank, told in enumerate(others, 1) if told != first]
    return f"{name}: {', '.join(odd)}, rank 0 {first}" if odd else None
