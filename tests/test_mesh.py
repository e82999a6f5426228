"""The mesh: every rank's groups for all factorings, and what is refused before groups are made."""

import itertools
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.pool import WorkerPool
from ulysses import mesh as mesh_module
from ulysses.degrees import AXES, Degrees
from ulysses.mesh import init_mesh

PoolOf = Callable[[int], WorkerPool]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def factorings(num_ranks: int) -> list[tuple[int, int, int]]:
    sizes = range(1, num_ranks + 1)
    return [d for d in itertools.product(sizes, repeat=3) if d[0] * d[1] * d[2] == num_ranks]


def peers(degrees: tuple[int, int, int], rank: int) -> list[list[int]]:
    """The ranks that differ from `rank` along one axis only, for each axis."""
    places = dict(enumerate(itertools.product(*map(range, degrees))))
    return [
        [
            other
            for other, place in places.items()
            if all(place[a] == places[rank][a] for a in range(3) if a != axis)
        ]
        for axis in range(3)
    ]


def release(mesh: DeviceMesh) -> None:
    """Frees the groups that a mesh made, so that a standing worker does not collect them.

    Not of a mesh that DTensors were on: torch keeps how those are moved, with its groups, for any
    later mesh that equals it.
    """
    names = mesh.mesh_dim_names or ()
    dist.barrier()  # another rank may still be connecting to this one
    for group in {mesh[axis].get_group() for axis in names} - {dist.group.WORLD}:
        dist.destroy_process_group(group)


def groups_found(rank: int, num_ranks: int, sp: int, tp: int) -> dict[str, Any]:
    """What a rank's mesh says, and what arrives when every rank sums its number in each group."""
    mesh = init_mesh(sp=sp, tp=tp)
    groups = [mesh[axis].get_group() for axis in AXES]
    sums = []
    for group in groups:
        total = torch.tensor([2**rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    found = {
        "names": mesh.mesh_dim_names,
        "device": mesh.device_type,
        "members": [dist.get_process_group_ranks(group) for group in groups],
        "sums": sums,
        "place": mesh.get_coordinate(),
        "ranks": tuple(mesh[axis].get_local_rank() for axis in AXES),
        "sizes": tuple(mesh[axis].size() for axis in AXES),
    }
    release(mesh)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 8, 12, 16])
def test_group_lists(num_ranks: int) -> None:
    for dp, sp, tp in factorings(num_ranks):
        degrees = Degrees(dp=dp, sp=sp, tp=tp)
        for number, axis in enumerate(AXES):
            groups = degrees.groups(axis)
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(num_ranks))
            for rank in range(num_ranks):
                assert peers((dp, sp, tp), rank)[number] in groups


def test_sp_ranks_are_strided_by_tp() -> None:
    degrees = Degrees(dp=1, sp=2, tp=2)
    assert degrees.groups("tp") == [[0, 1], [2, 3]]
    assert degrees.groups("sp") == [[0, 2], [1, 3]]


@pytest.mark.parametrize("degrees", factorings(8), ids=str)
def test_every_rank_has_its_groups(pool: PoolOf, degrees: tuple[int, int, int]) -> None:
    _, sp, tp = degrees
    places = list(itertools.product(*map(range, degrees)))
    for rank, found in enumerate(pool(8).run(groups_found, sp, tp)):
        members = peers(degrees, rank)
        assert found == {
            "names": AXES,
            "device": "cpu",
            "members": members,
            "sums": [sum(2**r for r in group) for group in members],
            "place": places[rank],
            "ranks": places[rank],
            "sizes": degrees,
        }


def calls_to_make_groups(rank: int, num_ranks: int, sp: int, tp: int) -> list[int]:
    """The sizes of the groups for which this rank calls new_group."""
    sizes = []
    original = dist.new_group

    def counted(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(ranks))
        return original(ranks, *args, **kwargs)

    modules = (dist, dist.distributed_c10d)
    for module in modules:
        module.new_group = counted
    try:
        release(init_mesh(sp=sp, tp=tp))
    finally:
        for module in modules:
            module.new_group = original
    return sizes


@pytest.mark.parametrize(
    ("sp", "tp", "sizes"),
    [
        (8, 1, [1]),  # the axis of all ranks has the default group, the others one of this rank
        (1, 1, [1]),
        (4, 2, [1, 4, 4, 2, 2, 2, 2]),
        (2, 2, [2] * 12),
    ],
)
def test_no_group_is_made_that_no_axis_needs(
    pool: PoolOf, sp: int, tp: int, sizes: list[int]
) -> None:
    assert pool(8).run(calls_to_make_groups, sp, tp) == [sizes] * 8


def warm_up_sums(rank: int, num_ranks: int) -> list[tuple[int, float]]:
    """Size of the group and what came back, for each collective of a warm-up."""
    mesh = init_mesh(sp=2, tp=2)
    groups = [mesh[axis].get_group() for axis in AXES]
    calls = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        original(tensor, group=group)
        calls.append((group.size(), float(tensor)))

    dist.all_reduce = counted
    try:
        mesh_module._warm_up(groups, "cpu")
    finally:
        dist.all_reduce = original
    release(mesh)
    return calls


def test_a_warm_up_is_one_collective_in_each_group_of_several_ranks(pool: PoolOf) -> None:
    assert pool(4).run(warm_up_sums) == [[(2, 0.0), (2, 0.0)]] * 4


def sub_group_timeouts(rank: int, num_ranks: int) -> set[timedelta]:
    mesh = init_mesh(sp=2, tp=2, timeout=timedelta(seconds=77))
    groups = {mesh[axis].get_group() for axis in ("sp", "tp")}
    found = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    release(mesh)
    return found


def test_the_timeout_reaches_the_groups_of_an_axis(pool: PoolOf) -> None:
    assert pool(4).run(sub_group_timeouts) == [{timedelta(seconds=77)}] * 4


def refusals(rank: int, num_ranks: int, cases: list[dict[str, Any]]) -> list[str]:
    messages = []
    for arguments in cases:
        try:
            init_mesh(**arguments)
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"sp": 3, "tp": 2},
        "ValueError: tp*sp=6 does not divide world 4 (tp=2, sp=3): with tp=2, sp ",
    ),
    (
        {"tp": 3},
        "ValueError: tp*sp=3 does not divide world 4 (tp=3, sp=1): with sp=1, tp can be 1,",
    ),
    ({"sp": 2, "dp": 4}, "ValueError: dp*sp*tp=8 is not world 4 (dp=4, sp=2, tp=1): let dp be 2;"),
    ({"sp": 0}, "ValueError: sp=0: give a whole number of at least 1"),
    ({"tp": -1}, "ValueError: tp=-1: give a whole number of at least 1"),
    ({"dp": 0}, "ValueError: dp=0: give a whole number of at least 1"),
    ({"sp": "2"}, "TypeError: sp='2' is a str: give a whole number of at least 1"),
    ({"sp": 2.0}, "TypeError: sp=2.0 is a float"),
    ({"tp": True}, "TypeError: tp=True is a bool"),
    ({"device_type": "npu"}, "ValueError: the process group that exists serves cpu:gloo"),
]


def test_wrong_arguments_are_refused_on_every_rank(pool: PoolOf) -> None:
    for messages in pool(4).run(refusals, [arguments for arguments, _ in REFUSED]):
        for (_, beginning), message in zip(REFUSED, messages, strict=True):
            assert message.startswith(beginning)


def default_degrees(rank: int, num_ranks: int) -> tuple[int, ...]:
    mesh = init_mesh(sp=None, tp=None)
    release(mesh)
    return tuple(mesh.mesh.shape)


def test_none_is_1_and_dp_takes_the_world(pool: PoolOf) -> None:
    assert pool(4).run(default_degrees) == [(4, 1, 1)] * 4


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as nothing launched it; the group that a test starts is ended."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_process_that_nothing_launched_is_a_world_of_one() -> None:
    mesh = init_mesh(device_type="cpu")
    assert mesh.shape == (1, 1, 1)
    assert dist.get_backend() == "gloo"
    assert {mesh[axis].get_group() for axis in AXES} == {dist.group.WORLD}
    assert init_mesh().device_type == "cpu"
    with pytest.raises(ValueError, match=r"tp\*sp=2 does not divide world 1 .*start 2 ranks"):
        init_mesh(sp=2)


@pytest.mark.usefixtures("alone")
def test_a_half_set_environment_is_no_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE expected"):
        init_mesh(device_type="cpu")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_an_unknown_device_type() -> None:
    with pytest.raises(ValueError, match="device_type='tpu': give one of npu, cuda, cpu"):
        init_mesh(device_type="tpu")


@pytest.mark.usefixtures("alone")
def test_the_local_rank_selects_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[int] = []
    devices = types.SimpleNamespace(device_count=lambda: 2, set_device=selected.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: devices)
    mesh_module._select_device("npu")
    assert selected == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    mesh_module._select_device("cpu")
    mesh_module._select_device("npu")
    assert selected == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 has no device: this node shows 2 of type"):
        mesh_module._select_device("npu")


def test_torch_npu_that_does_not_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(mesh_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mesh_module.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match=r"torch_npu .* CANN's set_env\.sh .* device_type='cpu'"):
        mesh_module.detect_device_type()


@pytest.mark.parametrize(
    ("config", "device_type"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cuda:nccl", "cuda"), ("cpu:gloo,npu:hccl", "npu")],
)
def test_a_mesh_follows_the_group_that_exists(
    monkeypatch: pytest.MonkeyPatch, config: str, device_type: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert mesh_module._served_device_type(None) == device_type


def test_a_group_of_an_unknown_backend_needs_a_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:mpi")
    assert mesh_module._served_device_type("cpu") == "cpu"
    with pytest.raises(ValueError, match="serves cpu:mpi, a mesh of device_type=None needs npu or"):
        mesh_module._served_device_type(None)
