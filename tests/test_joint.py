"""Joint attention: text on every rank around a sharded image, against one process."""

import pytest
import torch
import torch.distributed as dist

from tests import reference
from tests.counting import counted
from ulysses.arguments import QueryRows, Replicated
from ulysses.attention import UlyssesAttention
from ulysses.backends.base import Band
from ulysses.backends.sdpa import SdpaAttention
from ulysses.tiling import grids

DIMS = (4, 4, 3)


def _lengths(num_ranks):
    return tuple((3 * rank + 2) % 5 for rank in range(num_ranks))  # 2, 0, 3, 1


def _whole(length, heads, batch, dtype=torch.float64):
    num_heads, num_kv_heads = heads
    return [
        reference.draw(batch, length, n, dim, seed=n + dim, dtype=dtype)
        for n, dim in zip((num_heads, num_kv_heads, num_kv_heads), DIMS, strict=True)
    ]


def _split(whole, lens, ends, rank):
    """Leaves: this rank's image rows of each tensor, the prefix and the suffix."""
    before, behind = ends
    stop = before + sum(lens)
    image = [reference.shard(tensor[:, before:stop], lens, rank) for tensor in whole]
    prefix = [tensor[:, :before] for tensor in whole]
    suffix = [tensor[:, stop:] for tensor in whole]
    assert all(tensor.shape[1] == behind for tensor in suffix)
    return [[t.clone().requires_grad_() for t in part] for part in (image, prefix, suffix)]


def _gradient(prefix, image, suffix, lens, rank):
    """The whole's gradient, of all ranks: shares summed, shards laid end to end."""
    ends = [torch.zeros_like(t) if t.grad is None else t.grad for t in (prefix, suffix)]
    shards = [image.new_zeros(image.shape[0], n, *image.shape[2:]) for n in lens]
    shards[rank] = image.grad
    total = torch.cat([ends[0], *shards, ends[1]], dim=1)
    dist.all_reduce(total)
    return total


def _check(attention, heads, lens, ends, batch=1, band=None, mask=None, **options):
    """Output, gradients summed over the group and their shares, against one process."""
    rank, num_ranks = attention.rank, attention.num_ranks
    before, behind = ends
    length = before + sum(lens) + behind
    whole = _whole(length, heads, batch)
    image, prefix, suffix = _split(whole, lens, ends, rank)
    told = tuple(suffix) if behind else None  # no text: none given, or an empty one
    out, text = attention.joint(*image, prefix=tuple(prefix), suffix=told, seq_lens=lens, **options)
    exact = [tensor.clone().requires_grad_() for tensor in whole]
    expected = reference.attention(*exact, band=band, mask=mask)
    rows_of_text = [*range(before), *range(length - behind, length)]
    middle = expected[:, before : length - behind]
    torch.testing.assert_close(out, reference.shard(middle, lens, rank), rtol=0, atol=1e-10)
    torch.testing.assert_close(text, expected[:, rows_of_text], rtol=0, atol=1e-10)

    upstream = reference.draw(*expected.shape, seed=9)
    shares = [reference.draw(*text.shape, seed=10 + other) for other in range(num_ranks)]
    upstream[:, rows_of_text] = torch.stack(shares).sum(0)
    own = reference.shard(upstream[:, before : length - behind], lens, rank)
    torch.autograd.backward([out, text], [own, shares[rank]])
    expected.backward(upstream)
    for i, tensor in enumerate(exact):
        grad = _gradient(prefix[i], image[i], suffix[i], lens, rank)
        torch.testing.assert_close(grad, tensor.grad, rtol=0, atol=1e-10)


def _matrix(rank, num_ranks):
    cases = [
        ((5, 5), (3, 0), 1),
        ((6, 2), (0, 4), 2),
        ((4, 1), (2, 3), 2),
        ((2, 2), (1, 0), 1),
        ((8, 4), (0, 0), 1),
    ]
    for grid in grids(num_ranks):
        attention = UlyssesAttention(dist.group.WORLD, grid=grid)
        for heads, ends, batch in cases:
            _check(attention, heads, _lengths(num_ranks), ends, batch)
        _check(attention, (4, 2), (1,) + (0,) * (num_ranks - 1), (6, 2))  # blocks of text alone
        _check(attention, (4, 2), (0,) * num_ranks, (2, 1))


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_equals_one_process_on_every_grid(pool, num_ranks):
    pool(num_ranks).run(_matrix)


def _masks(rank, num_ranks):
    """All that the layer takes counts in the whole sequence: prefix, image, suffix."""
    lens, ends, heads = _lengths(num_ranks), (3, 2), (6, 2)
    length = sum(lens) + 5
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[0, ..., 1:3] = False  # the first sample has one text token before and one behind
    padding[0, ..., -1] = False
    dense = reference.draw(1, 6, length, length, seed=3)
    causal = Band(None, 0)
    for grid in grids(num_ranks):
        attention = UlyssesAttention(dist.group.WORLD, grid=grid)
        _check(attention, heads, lens, ends, 2, mask=padding, attn_mask=padding)
        _check(attention, heads, lens, ends, 2, mask=dense, attn_mask=dense)
        _check(attention, heads, lens, ends, 2, causal, is_causal=True)
        _check(attention, heads, lens, ends, 2, Band(-2, 1), window=(2, 1))
        ids = torch.arange(length)
        two = (ids[:, None] < 5) == (ids < 5)
        _check(attention, heads, lens, ends, 1, mask=two, documents=(0, 5, length))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_masks_count_in_the_whole_sequence(pool, num_ranks):
    pool(num_ranks).run(_masks)


def test_a_single_process_needs_no_group():
    image, prefix, suffix = _split(_whole(9, (4, 2), 2), (6,), (1, 2), 0)
    out, text = UlyssesAttention(None).joint(*image, prefix=tuple(prefix), suffix=tuple(suffix))
    expected = reference.attention(*_whole(9, (4, 2), 2))
    torch.testing.assert_close(out, expected[:, 1:7])
    torch.testing.assert_close(text, torch.cat([expected[:, :1], expected[:, 7:]], 1))


class _Watched(SdpaAttention):
    """SDPA that remembers how many keys each call saw."""

    def __init__(self):
        self.num_keys = []

    def __call__(self, query, key, value, **rest):
        self.num_keys.append(key.shape[1])
        return super().__call__(query, key, value, **rest)


def _costs(rank, num_ranks, num_heads, num_text, part):
    kernel = _Watched()
    attention = UlyssesAttention(dist.group.WORLD, backend=kernel, grid=(4, 1))
    length = num_text + 16
    image, prefix, _ = _split(_whole(length, (num_heads, num_heads), 1), (4,) * 4, (num_text, 0), 0)
    with counted() as counts:
        if part == "joint":
            attention.joint(*image, prefix=tuple(prefix))
            assert set(kernel.num_keys) == {length}
        else:
            attention(*image)
    return counts.sent, len(counts.collectives)


def test_text_is_not_sent_on_the_way_in_nor_counted_twice(pool):
    """Beside plain attention of the image, one collective more: the text's output, gathered."""
    for num_heads in (4, 16):
        for num_text in (1, 5):
            joint = pool(4).run(_costs, num_heads, num_text, "joint")
            image = pool(4).run(_costs, num_heads, num_text, "image")
            output_of_text = num_text * num_heads // 4 * DIMS[2] * 8
            assert [sent for sent, _ in joint] == [s + 3 * output_of_text for s, _ in image]
            assert [n for _, n in joint] == [n + 1 for _, n in image] == [3] * 4


def _order(rank, num_ranks, dtype):
    """The kernel is handed the keys in the sequence's order: bit for bit what one process gets."""
    whole = _whole(10, (4, 4), 1, dtype)
    image, _, suffix = _split(whole, (4, 4), (0, 2), rank)
    out, text = UlyssesAttention(dist.group.WORLD, grid=(2, 1)).joint(*image, suffix=tuple(suffix))
    expected = UlyssesAttention.forward(_single(), *whole)
    assert torch.equal(out, expected[:, 4 * rank : 4 * rank + 4])
    assert torch.equal(text, expected[:, 8:])


def _single():
    return UlyssesAttention(dist.new_group([dist.get_rank()], use_local_synchronization=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_order_is_kept(pool, dtype):
    pool(2).run(_order, dtype)


def _one_loss_each(rank, num_ranks):
    """Rank 0 has a loss of the text only, rank 1 of the image only."""
    lens, ends = (3, 2), (2, 0)
    whole = _whole(7, (4, 2), 1)
    image, prefix, suffix = _split(whole, lens, ends, rank)
    out, text = UlyssesAttention(dist.group.WORLD).joint(
        *image, prefix=tuple(prefix), seq_lens=lens
    )
    (text if rank == 0 else out).square().sum().backward()
    exact = [tensor.clone().requires_grad_() for tensor in whole]
    expected = reference.attention(*exact)
    (expected[:, :2].square().sum() + expected[:, 5:].square().sum()).backward()
    for i, tensor in enumerate(exact):
        grad = _gradient(prefix[i], image[i], suffix[i], lens, rank)
        torch.testing.assert_close(grad, tensor.grad)


def test_ranks_may_use_different_outputs_in_their_loss(pool):
    pool(2).run(_one_loss_each, timeout=20)


def _text_in_the_shards(rank, num_ranks):
    """Text sharded with the image is ordinary: the text's padding in a whole mask, any lengths."""
    num_text, lens = 5, (4, 7, 3)
    whole = _whole(14, (6, 3), 2)
    padding = torch.ones(2, 1, 1, 14, dtype=torch.bool)
    padding[1, ..., 2:num_text] = False
    own = [reference.shard(tensor, lens, rank) for tensor in whole]
    expected = reference.shard(reference.attention(*whole, mask=padding), lens, rank)
    for grid in grids(num_ranks):
        out = UlyssesAttention(dist.group.WORLD, grid=grid)(*own, attn_mask=padding, seq_lens=lens)
        torch.testing.assert_close(out, expected)


def test_text_sharded_with_the_image_needs_no_joint_attention(pool):
    pool(3).run(_text_in_the_shards)


def _refused(rank, num_ranks, kind):
    image, prefix, _ = _split(_whole(8, (4, 2), 1), (3, 3), (2, 0), rank)
    options = {"prefix": tuple(prefix)}
    if kind == "heads":
        options["prefix"] = (prefix[0][:, :, :2], *prefix[1:])
    elif kind == "two tensors":
        options["prefix"] = tuple(prefix[:2])
    elif kind == "dtype":
        options["prefix"] = (prefix[0].float(), *prefix[1:])
    elif kind == "rows of a mask":
        options["attn_mask"] = QueryRows(torch.ones(3, 8, dtype=torch.bool))
    elif kind == "replicated":
        image[1:] = [Replicated(tensor) for tensor in image[1:]]
    elif kind == "mask":
        options["attn_mask"] = torch.ones(6, 6, dtype=torch.bool)
    with counted() as counts:
        try:
            UlyssesAttention(dist.group.WORLD).joint(*image, **options)
        except (TypeError, ValueError):
            assert not counts.collectives
            raise


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("heads", r"prefix of shapes \(1, 2, 2, 4\).*\(1, 3, 4, 4\)"),
        ("two tensors", r"prefix is tuple of .*pass its \(query, key, value\)"),
        ("dtype", r"prefix is torch.float32 .* torch.float64"),
        ("rows of a mask", "attn_mask is QueryRows in joint attention"),
        ("replicated", "key is Replicated in joint attention"),
        ("mask", r"attn_mask of shape \(1, 1, 6, 6\) does not fit .*\(1, 4, 8, 8\)"),
    ],
)
def test_what_can_not_be_exact_is_refused_on_every_rank(pool, kind, told):
    with pytest.raises(Exception, match=told) as refused:
        pool(2).run(_refused, kind)
    assert sorted(refused.value.errors) == [0, 1]


def _differing_text(rank, num_ranks):
    image, prefix, _ = _split(_whole(8, (4, 2), 1), (3, 3), (2, 0), rank)
    if rank == 1:
        prefix = [tensor[:, :1] for tensor in prefix]
    UlyssesAttention(dist.group.WORLD, check=True).joint(*image, prefix=tuple(prefix))


def test_check_tells_ranks_of_text_that_differs_in_length(pool):
    with pytest.raises(Exception, match=r"ends: rank 1 has \(1, 0\)") as refused:
        pool(2).run(_differing_text)
    assert sorted(refused.value.errors) == [0, 1]
