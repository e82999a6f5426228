"""One process of `ulysses demo`: scores its shard of the text, and rank 0 then all of it alone.

    python -m ulysses.launch.worker -m ulysses.launch.demo_rank FOLDER

FOLDER holds the request and the model, and in the end the report. All ranks map the model's weights
into memory: however many they are, the machine holds one copy.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor

import ulysses
from ulysses.launch.demo_model import build
from ulysses.launch.demo_report import (
    MODEL,
    REPORT,
    REQUEST,
    Part,
    Report,
    Request,
    Score,
    progress_bars,
)
from ulysses.launch.demo_score import score
from ulysses.launch.environment import usable_cores
from ulysses.tiling import shard_lengths
from ulysses.wrapping import wrapping_of


def main() -> None:
    """Leaves the report, if this is rank 0."""
    folder = Path(sys.argv[1])
    request: Request = pickle.loads((folder / REQUEST).read_bytes())
    mesh = ulysses.init_mesh(sp=request.sp, device_type=request.device_type)
    rank = dist.get_rank()
    with progress_bars(shown=rank == 0) as progress:
        held = _loaded(folder / MODEL)
        tokens = held["tokens"].to(mesh.device_type)
        model = build(held["config"], held["weights"], tokens.device)
        # Without a probe: three forwards more would be timed with the rest.
        ulysses.wrap(model.model, mesh["sp"], grid=request.grid or "auto", probe=False)
        wrapping = wrapping_of(model.model)
        assert wrapping is not None, "just wrapped"
        attention = wrapping.attention
        part = _sharded(model, tokens, attention, progress)
        ulysses.unwrap(model.model)
        parts: list[Any] = [None] * request.sp
        dist.all_gather_object(parts, part)
        # Nobody waits for the run in one process: the others are done, and leave it the machine.
        dist.destroy_process_group()
        if rank != 0:
            return
        single = _single(model, tokens, progress) if request.reference else None
    assert attention.tiling is not None, "it has run"
    shared_bytes = sum(weight.nbytes for weight in model.parameters() if weight.is_cpu)
    report = Report(
        grid=attention.tiling.grid, parts=tuple(parts), single=single, shared_bytes=shared_bytes
    )
    (folder / REPORT).write_bytes(pickle.dumps(report))


def _loaded(path: Path) -> dict[str, Any]:
    """What the demo has read, on every rank: the same pages of one file."""
    held: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()  # the mappings keep it, and nothing is left behind however this ends
    return held


def _sharded(
    model: Any, tokens: Tensor, attention: ulysses.UlyssesAttention, progress: Progress
) -> Part:
    """This rank's share of the run over all ranks of `attention.group`."""
    lens = shard_lengths(tokens.shape[1], attention.num_ranks)
    ids, labels = (
        ulysses.shard_sequence(whole, attention.group)
        for whole in (tokens, ulysses.shift_labels(tokens))
    )
    positions = ulysses.position_ids(lens, attention.rank, device=tokens.device)[None]
    task = progress.add_task(f"{attention.num_ranks} ranks", total=len(model.model.layers))
    dist.barrier()
    own = score(model, ids, labels, positions, lambda: progress.advance(task))
    tiling, row = attention.tiling, model.config.head_dim * model.dtype.itemsize
    assert tiling is not None, "it has run"
    sent = len(model.model.layers) * tiling.bytes_sent(attention.rank, (row, 2 * row, row))
    return Part(score=own, tile=tiling.tiles[attention.rank], bytes_sent=sent)


def _single(model: Any, tokens: Tensor, progress: Progress) -> Score:
    """All tokens in this process, on all its cores, with the model's own attention."""
    if tokens.device.type == "cpu":
        torch.set_num_threads(usable_cores())
    positions = ulysses.position_ids([tokens.shape[1]], 0, device=tokens.device)[None]
    task = progress.add_task("one process", total=len(model.model.layers))
    labels = ulysses.shift_labels(tokens)
    return score(model, tokens, labels, positions, lambda: progress.advance(task))


if __name__ == "__main__":
    main()
