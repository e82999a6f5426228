"""Shards of a sequence against the whole: values bit for bit, gradients, positions and labels."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ulysses
from tests import reference
from ulysses.sequence import (
    gather_sequence_slice_grads,
    gather_sequence_sum_grads,
    position_ids,
    shard_batch,
    shard_sequence,
    shift_labels,
)
from ulysses.tiling import shard_lengths

RANKS = [1, 2, 3, 4]
GATHERS = [gather_sequence_sum_grads, gather_sequence_slice_grads]


def all_lens(num_ranks: int) -> list[tuple[int, ...]]:
    """Level, uneven, shorter than the number of ranks, nothing at all, and as the caller likes."""
    chosen = tuple((3 * rank + 5) % 7 for rank in range(num_ranks))
    return [shard_lengths(n, num_ranks) for n in (8, 10, 11, 2, 0)] + [chosen]


def whole_tensors(length: int) -> dict[int, torch.Tensor]:
    """By the dim of the sequence: several dtypes, every other size different."""
    wide = reference.draw(3, length, 5, 2, seed=1)
    return {
        0: wide[0].bfloat16(),
        1: wide,
        2: torch.arange(3 * 1 * length * 2).view(3, 1, length, 2),
        -1: wide[0, :, :, 0].t() > 0,  # not contiguous
    }


def test_public_names() -> None:
    for name in ("shard_sequence", "shard_batch", "position_ids", "shift_labels"):
        assert getattr(ulysses, name) is globals()[name]
    for gather in GATHERS:
        assert getattr(ulysses, gather.__name__) is gather


def _round_trips(rank: int, num_ranks: int) -> list[str]:
    """What is not the same after sharding and gathering, with lengths told and exchanged."""
    wrong = []
    for lens in all_lens(num_ranks):
        start = sum(lens[:rank])
        for dim, whole in whole_tensors(sum(lens)).items():
            part = shard_sequence(whole, dist.group.WORLD, dim=dim, seq_lens=lens)
            if not torch.equal(part, whole.narrow(dim, start, lens[rank])):
                wrong.append(f"shard {lens} dim {dim}")
            for gather in GATHERS:
                for known in (lens, None):
                    back = gather(part, dist.group.WORLD, dim=dim, seq_lens=known)
                    if back.dtype != whole.dtype or not torch.equal(back, whole):
                        wrong.append(f"{gather.__name__} {lens} dim {dim} seq_lens={known}")
    return wrong


@pytest.mark.parametrize("num_ranks", RANKS)
def test_shards_are_slices_and_gather_back_bit_for_bit(pool, num_ranks):
    assert pool(num_ranks).run(_round_trips) == [[]] * num_ranks


def _default_lengths(rank: int, num_ranks: int) -> list[int]:
    return shard_sequence(torch.arange(10), dist.group.WORLD, dim=0).tolist()


def test_ten_tokens_on_four_ranks_are_all_kept(pool):
    parts = pool(4).run(_default_lengths)
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def _memory(rank: int, num_ranks: int) -> tuple[int, int, bool]:
    """Bytes that a shard keeps alive and those of the whole; [1, s, h] slices are contiguous."""
    whole = torch.zeros(1, 8, 5)
    part = shard_sequence(whole, dist.group.WORLD)
    transposed = shard_sequence(torch.zeros(8, 3).t(), dist.group.WORLD)
    kept = part.untyped_storage().nbytes()
    return kept, whole.untyped_storage().nbytes(), transposed.is_contiguous()


def test_a_shard_is_contiguous_and_does_not_keep_the_whole_alive(pool):
    for kept, whole, contiguous in pool(4).run(_memory):
        assert kept == whole / 4
        assert contiguous


def _gradients(rank: int, num_ranks: int, lens: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Of a shard: each gather's gradients where losses are the ranks' own, and where alike."""
    length, group = sum(lens), dist.group.WORLD
    whole = reference.draw(2, length, 3, seed=1)
    alike, own = reference.draw(2, length, 3, seed=2), reference.draw(2, length, 3, seed=10 + rank)
    found = {}
    for name, gather, upstream in (
        ("sum", gather_sequence_sum_grads, own),
        ("slice", gather_sequence_slice_grads, alike),
    ):
        part = shard_sequence(whole, group, seq_lens=lens).detach().requires_grad_()
        gathered = gather(part, group, seq_lens=lens)
        (gathered.square() * upstream).sum().backward()
        found[name] = part.grad
    return found


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gradients_equal_a_single_process(pool, num_ranks):
    for lens in all_lens(num_ranks):
        results = pool(num_ranks).run(_gradients, lens)
        whole = reference.draw(2, sum(lens), 3, seed=1)
        alike = 2 * whole * reference.draw(2, sum(lens), 3, seed=2)
        each = [reference.draw(2, sum(lens), 3, seed=10 + rank) for rank in range(num_ranks)]
        own = 2 * whole * torch.stack(each).sum(0)
        for rank, found in enumerate(results):
            torch.testing.assert_close(found["slice"], reference.shard(alike, lens, rank))
            torch.testing.assert_close(
                found["sum"], reference.shard(own, lens, rank), rtol=0, atol=1e-12
            )


def _second_derivatives(rank: int, num_ranks: int) -> torch.Tensor:
    """d/dx of (d loss / dx)^2 where all ranks compute the loss x^3 alike from the whole."""
    group, lens = dist.group.WORLD, (3, 2)
    part = shard_sequence(reference.draw(1, 5, 2, seed=1), group, seq_lens=lens).requires_grad_()
    loss = gather_sequence_slice_grads(part, group, seq_lens=lens).pow(3).sum()
    (grad,) = torch.autograd.grad(loss, part, create_graph=True)
    gathered = gather_sequence_slice_grads(grad, group, seq_lens=lens)
    (second,) = torch.autograd.grad(gathered.square().sum(), part)
    return second


def test_second_derivatives_of_a_gather(pool):
    whole = reference.draw(1, 5, 2, seed=1)
    for rank, second in enumerate(pool(2).run(_second_derivatives)):
        expected = reference.shard(36 * whole**3, (3, 2), rank)  # ((3 x^2)^2)' = 36 x^3
        torch.testing.assert_close(second, expected)


def _sharded_parameter(rank: int, num_ranks: int) -> torch.Tensor:
    """The gradient, summed over ranks, of a replicated layer on shards of 10 tokens."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, dtype=torch.float64)
    tokens = reference.draw(1, 10, 6, seed=3)
    out = layer(shard_sequence(tokens, dist.group.WORLD))
    (out.square().sum() / 10).backward()  # divided by the tokens of all ranks
    dist.all_reduce(layer.weight.grad)
    return layer.weight.grad


def test_a_replicated_layer_sums_to_the_gradient_of_a_single_process(pool):
    (expected,) = pool(1).run(_sharded_parameter)
    for grad in pool(4).run(_sharded_parameter):
        torch.testing.assert_close(grad, expected)


def _loss_over_subgroups(rank: int, num_ranks: int) -> tuple[float, list[float]]:
    """Two groups of two; the loss of tokens 0..7 weighted by what is valid, and its gradient."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    values = torch.arange(8.0, dtype=torch.float64)[None]
    valid = torch.tensor([[1, 0, 0, 0, 1, 1, 1, 0]], dtype=torch.float64)
    lens = (2, 6)
    own = shard_sequence(values, group, seq_lens=lens).requires_grad_()
    weights = gather_sequence_slice_grads(shard_sequence(valid, group, seq_lens=lens), group)
    losses = gather_sequence_slice_grads(own, group)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    dist.destroy_process_group(group)
    return loss.item(), own.grad[0].tolist()


def test_a_gathered_loss_is_right_in_every_subgroup(pool):
    results = pool(4).run(_loss_over_subgroups)
    assert [loss for loss, _ in results] == [3.75] * 4
    first, second = [0.25, 0.0], [0.0, 0.0, 0.25, 0.25, 0.25, 0.0]
    assert [grad for _, grad in results] == [first, second] * 2


def _batch(rank: int, num_ranks: int) -> dict[str, torch.Tensor | None]:
    ids = torch.arange(8)[None]
    batch = {
        "input_ids": ids,
        "labels": ids + 1,
        "images": None,
        "position_ids": torch.stack([ids, ids * 2, ids * 3]),
    }
    return shard_batch(batch, dist.group.WORLD, dim={"position_ids": -1})


def test_a_batch_keeps_its_names_and_nothing_decides_by_their_presence(pool):
    for rank, batch in enumerate(pool(2).run(_batch)):
        own = torch.arange(4 * rank, 4 * rank + 4)
        assert list(batch) == ["input_ids", "labels", "images", "position_ids"]
        assert batch["input_ids"].tolist() == [own.tolist()]
        assert batch["labels"].tolist() == [(own + 1).tolist()]
        assert batch["images"] is None
        assert torch.equal(batch["position_ids"], torch.stack([own, own * 2, own * 3])[:, None])


def test_a_batch_of_different_lengths_is_refused() -> None:
    batch = {"logits": torch.zeros(1, 8, 3), "temperature": torch.zeros(1, 2)}
    message = "lengths differ: logits 8 (dim 1), temperature 2 (dim 1); what goes with the tokens"
    with pytest.raises(ValueError, match=re.escape(message)):
        shard_batch(batch, None)


def _wrong_lens(rank: int, num_ranks: int) -> list[str]:
    """The messages of lengths that can't be, every one before any communication."""
    group, told = dist.group.WORLD, []
    for move, tensor, lens in (
        (shard_sequence, torch.zeros(1, 10), (3, 3)),
        (shard_sequence, torch.zeros(1, 10), (3, 3, 4)),
        (gather_sequence_sum_grads, torch.zeros(1, 10), (3, 3)),
        (gather_sequence_slice_grads, torch.zeros(1, 10), (10,)),
    ):
        with pytest.raises(ValueError) as caught:
            move(tensor, group, seq_lens=lens)
        told.append(str(caught.value))
    with pytest.raises(ValueError, match="group=None means a single process"):
        shard_sequence(torch.zeros(1, 10), None)
    return told


def test_lengths_that_can_not_be_are_refused_on_every_rank(pool):
    for rank, told in enumerate(pool(2).run(_wrong_lens)):
        whole = "over 2 ranks, but dim 1 of (1, 10) holds 10: pass one length >= 0 for each rank"
        assert told == [
            f"seq_lens=(3, 3) {whole} that add up to 10, or none",
            f"seq_lens=(3, 3, 4) {whole} that add up to 10, or none",
            f"seq_lens=(3, 3) but rank {rank} holds 10 rows: seq_lens[{rank}] must be the length "
            "of the tensors passed on that rank",
            "seq_lens=(10,) over 2 ranks: pass one length >= 0 for each rank",
        ]


def test_positions_of_all_ranks_are_those_of_the_whole() -> None:
    for num_ranks in RANKS:
        for lens in all_lens(num_ranks):
            ids = [position_ids(lens, rank) for rank in range(num_ranks)]
            assert [len(each) for each in ids] == list(lens)
            assert torch.equal(torch.cat(ids), torch.arange(sum(lens)))


def test_labels_are_shifted_once_and_across_shards() -> None:
    tokens = torch.arange(16).view(2, 8)
    targets = shift_labels(tokens)
    assert targets.tolist() == [[*range(1, 8), -100], [*range(9, 16), -100]]
    assert torch.equal(tokens, torch.arange(16).view(2, 8))
    assert shift_labels(tokens[:, :1], ignore_index=-1).tolist() == [[-1], [-1]]

    logits = reference.draw(2, 8, 16, seed=4)
    whole = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    parts = [
        functional.cross_entropy(some.flatten(0, 1), labels.flatten(), reduction="sum")
        for some, labels in zip(logits.split((4, 4), 1), targets.split((4, 4), 1), strict=True)
    ]
    torch.testing.assert_close(sum(parts) / 14, whole)


def test_a_single_process_needs_no_group() -> None:
    whole = torch.zeros(1, 3)
    assert shard_sequence(whole, None) is whole
    assert all(gather(whole, None) is whole for gather in GATHERS)
