"""The fault that this project exists for: a global head count handed to a kernel after the split.

40 heads, tp=2, sp=4, 8 ranks: the layer is built where 20 heads are local, the kernel runs where 5
are. A kernel told 20 must say so, and the layer must never tell it so.
"""

import pytest
import torch

from tests import npu_ops, reference
from ulysses.attention import UlyssesAttention
from ulysses.backends.ascend import AscendAttention
from ulysses.mesh import init_mesh

HEADS, TP, SP, DIM, LENGTH = 40, 2, 4, 128, 64


class _Watched(AscendAttention):
    """The Ascend kernel, noting the head counts of the tensors it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __call__(self, query, key, value, **options):
        self.seen.append((query.shape[2], key.shape[2]))
        return super().__call__(query, key, value, **options)


def _tp_and_sp(rank: int, num_ranks: int, training: bool) -> list[tuple[int, int]]:
    npu_ops.install()
    mesh = init_mesh(sp=SP, tp=TP, device_type="cpu")
    kernel = _Watched()
    attention = UlyssesAttention(mesh["sp"], backend=kernel, grid=(SP, 1), check=True)
    heads = HEADS // TP
    first = mesh["tp"].get_local_rank() * heads
    lens, sp_rank = (LENGTH // SP,) * SP, mesh["sp"].get_local_rank()
    dtype = torch.float32 if training else torch.bfloat16
    whole = [
        reference.draw(1, LENGTH, HEADS, DIM, seed=i)[:, :, first : first + heads] for i in range(3)
    ]
    own = [reference.shard(t, lens, sp_rank).to(dtype).requires_grad_(training) for t in whole]
    out = attention(*own)
    for tensor in whole:
        tensor.requires_grad_()
    expected = reference.attention(*whole)
    bound = 1e-5 if training else 2e-2
    assert (out - reference.shard(expected, lens, sp_rank)).abs().max() < bound
    if training:
        upstream = reference.draw(1, LENGTH, heads, DIM, seed=7)
        out.backward(reference.shard(upstream, lens, sp_rank).to(dtype))
        expected.backward(upstream)
        for got, want in zip(own, whole, strict=True):
            assert (got.grad - reference.shard(want.grad, lens, sp_rank)).abs().max() < 1e-4
    return kernel.seen


@pytest.mark.parametrize("training", [False, True])
def test_the_kernel_sees_five_of_forty_heads(pool, training):
    for seen in pool(8).run(_tp_and_sp, training):
        assert seen == [(5, 5)]


def test_a_cached_head_count_is_the_kernels_own_error():
    npu_ops.install()
    query, key, value = (torch.randn(1, 5, 32, DIM, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(
        RuntimeError,
        match=r"561002[\s\S]*numHeads\(5\) in query shape must be equal to numHeads\(20\)",
    ):
        torch.ops.npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            num_heads=20,
            num_key_value_heads=20,
            scale=DIM**-0.5,
            input_layout="BNSD",
        )
