"""A check that all ranks are about to make the same call, before any of them makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def require_agreement(
    fingerprint: Mapping[str, Any] | Exception, group: dist.ProcessGroup | None
) -> None:
    """Compare what each rank is about to do, and raise on every rank if they differ.

    `fingerprint` is a mapping of plain values, or the error that this rank met instead of one.
    Collective over `group`. Raises this rank's own error, or ValueError naming the ranks that
    differ or failed, and how.
    """
    views: list[Any] = [fingerprint]
    if group is not None:
        views = [None] * dist.get_world_size(group)
        told = _text(fingerprint) if isinstance(fingerprint, Exception) else dict(fingerprint)
        dist.all_gather_object(views, told, group=group)
    if isinstance(fingerprint, Exception):
        raise fingerprint
    failed = {rank: view for rank, view in enumerate(views) if isinstance(view, str)}
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise ValueError(f"attention was refused on other ranks of the group. {told}")
    differences = _differences(views)
    if differences:
        raise ValueError(
            "ranks of the group call attention differently, which would exchange wrong data: "
            + "; ".join(differences)
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _differences(views: list[Mapping[str, Any]]) -> list[str]:
    """One line for each field that is not equal everywhere: the odd ranks and the majority."""
    lines = []
    for field in views[0]:
        values = [repr(view[field]) for view in views]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        odd = ", ".join(f"rank {r} has {value}" for r, value in enumerate(values) if value != usual)
        lines.append(f"{field}: {odd}, the others {usual}")
    return lines
