"""What the layer refuses: before any communication, with the values and the way out."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import reference
from tests.counting import counted
from ulysses.attention import UlyssesAttention
from ulysses.backends.sdpa import SdpaAttention


def _tensors(heads=(4, 2, 2), length=3, dims=(8, 8, 8), dtype=torch.float32, batch=1):
    return [torch.zeros(batch, length, h, d, dtype=dtype) for h, d in zip(heads, dims, strict=True)]


def _longer(tensors, index):
    tensors[index] = torch.zeros(1, 4, *tensors[index].shape[2:])
    return tensors


BAD = {
    "key and value lengths differ": (
        lambda: (_longer(_tensors(), 2), {}),
        r"key \(1, 3, 2, 8\), value \(1, 4, 2, 8\).*length",
    ),
    "query heads no multiple of kv heads": (
        lambda: (_tensors((6, 4, 4)), {}),
        r"num_heads=6, num_kv_heads=4.*\[1, 2, 3, 6\]",
    ),
    "key and value heads differ": (
        lambda: (_tensors((4, 2, 4)), {}),
        "key and value must have the same number of heads",
    ),
    "head dims differ": (
        lambda: (_tensors(dims=(8, 4, 8)), {}),
        "query and key must have the same head dim",
    ),
    "three dims": (
        lambda: ([t[0] for t in _tensors()], {}),
        r"\[batch, seq, heads, dim\]",
    ),
    "batches differ": (
        lambda: ([_tensors(batch=2)[0], *_tensors()[1:]], {}),
        "batch sizes differ",
    ),
    "dtypes differ": (
        lambda: ([_tensors(dtype=torch.float64)[0], *_tensors()[1:]], {}),
        "one floating dtype",
    ),
    "integers": (lambda: (_tensors(dtype=torch.int64), {}), "one floating dtype"),
    "a length for too few ranks": (
        lambda: (_tensors(), {"seq_lens": (3,)}),
        r"seq_lens=\(3,\) over 2 ranks",
    ),
    "a negative length": (
        lambda: (_tensors(), {"seq_lens": (-3, 3)}),
        r"one length >= 0 for each rank",
    ),
    "lengths that are not this rank's": (
        lambda: (_tensors(), {"seq_lens": (5, 5)}),
        r"rank \d holds 3 rows",
    ),
    "a dropout probability of 1": (lambda: (_tensors(), {"dropout_p": 1.0}), r"dropout_p=1\.0"),
    "a causal flag that is a tensor": (
        lambda: (_tensors(), {"is_causal": torch.ones(3, 3)}),
        "is_causal=.*True or False",
    ),
}


def _refuse(rank, num_ranks, name, check):
    (tensors, options), _ = BAD[name][0](), None
    layer = UlyssesAttention(dist.group.WORLD, check=check)
    with counted() as counts:
        try:
            layer(*tensors, **options)
        except (TypeError, ValueError):
            assert check or not counts.collectives
            raise


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_on_every_rank(pool, name, check):
    with pytest.raises(Exception, match=BAD[name][1]) as refused:
        pool(2).run(_refuse, name, check)
    assert sorted(refused.value.errors) == [0, 1]
    assert {kind for kind, _ in refused.value.errors.values()} <= {"ValueError", "TypeError"}


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="window_size"):
        UlyssesAttention(None)(*_tensors(), window_size=3)


def _differ(rank, num_ranks, how):
    """Only rank 1 of 3 does something else; with check=True all must hear of it."""
    layer = UlyssesAttention(dist.group.WORLD, check=True)
    tensors, options = _tensors(), {}
    if rank == 1:
        if how == "length":
            tensors = _tensors(length=2)
        elif how == "dtype":
            tensors = _tensors(dtype=torch.float64)
        elif how == "causal":
            options = {"is_causal": True}
        elif how == "scale":
            options = {"scale": 0.5}
        elif how == "heads":
            tensors = _tensors((8, 2, 2))
        elif how == "gradient":
            tensors[0].requires_grad_()
        elif how == "error":
            tensors = _longer(tensors, 1)
    layer(*tensors, **options)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("length", r"query_lens: rank 1 has \(2, 2, 2\), the others \(3, 3, 3\)"),
        ("dtype", r"dtype: rank 1 has torch.float64, the others torch.float32"),
        ("causal", r"is_causal: rank 1 has True, the others False"),
        ("scale", r"scale: rank 1 has 0.5, the others None"),
        ("heads", r"num_heads: rank 1 has 8, the others 4"),
        ("gradient", r"requires_grad: rank 1 has True, the others False"),
        ("error", r"rank 1: ValueError: .*key \(1, 4, 2, 8\)"),
    ],
)
def test_check_names_the_rank_that_differs_on_every_rank(pool, how, told):
    with pytest.raises(Exception, match=told) as refused:
        pool(3).run(_differ, how)
    assert sorted(refused.value.errors) == [0, 1, 2]


def _checked_call(rank, num_ranks):
    whole = [reference.draw(1, 6, 4, 8, seed=i) for i in range(3)]
    own = [reference.shard(t, (4, 2), rank) for t in whole]
    out = UlyssesAttention(dist.group.WORLD, check=True)(*own, seq_lens=(4, 2))
    expected = reference.shard(reference.attention(*whole), (4, 2), rank)
    torch.testing.assert_close(out, expected)


def test_check_lets_an_equal_call_through(pool):
    pool(2).run(_checked_call)


def _no_group(rank, num_ranks):
    UlyssesAttention(None)


def test_a_group_of_none_is_refused_where_there_are_several_ranks(pool):
    with pytest.raises(Exception, match=r"group=None means a single process.*mesh\[\"sp\"\]"):
        pool(2).run(_no_group)


def _two_axes(rank, num_ranks):
    UlyssesAttention(init_device_mesh("cpu", (2, 1), mesh_dim_names=("sp", "tp")))


def test_a_mesh_of_two_axes_is_refused(pool):
    with pytest.raises(Exception, match=r"DeviceMesh of 2 axes.*pass mesh\[\"sp\"\]"):
        pool(2).run(_two_axes)


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match="group is a int"):
        UlyssesAttention(3)


def _mesh(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    whole = [reference.draw(1, 4, 2, 4, seed=i) for i in range(3)]
    out = UlyssesAttention(mesh)(*(reference.shard(t, (2, 2), rank) for t in whole))
    torch.testing.assert_close(out, reference.shard(reference.attention(*whole), (2, 2), rank))


def test_a_mesh_of_one_axis_is_a_group(pool):
    pool(2).run(_mesh)


@pytest.mark.parametrize("grid", ["ring", (2, 1), (0, 1)])
def test_a_grid_that_does_not_cover_the_ranks_is_refused(grid):
    with pytest.raises(ValueError, match=r"grid="):
        UlyssesAttention(None, grid=grid)


class _FourHeadsAtMost(SdpaAttention):
    """A kernel that can not run what only one rank's tile asks of it."""

    name = "four-heads"

    def unsupported(self, problem):
        return f"num_heads={problem.num_heads}: at most 4" if problem.num_heads > 4 else None


def _one_tile_refused(rank, num_ranks):
    tensors = [torch.zeros(1, 2, 9, 4) for _ in range(3)]
    UlyssesAttention(dist.group.WORLD, backend=_FourHeadsAtMost(), grid=(2, 1))(*tensors)


def test_a_kernel_that_refuses_one_ranks_tile_is_refused_on_all(pool):
    """9 heads on 2 ranks are 5 and 4: rank 1, whose own tile is fine, must not go ahead."""
    with pytest.raises(Exception, match=r"'four-heads' can not run.*num_heads=5: at most 4") as no:
        pool(2).run(_one_tile_refused)
    assert sorted(no.value.errors) == [0, 1]
