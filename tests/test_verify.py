"""`verify` finds what is equal equal, and each kind of fault that was planted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulysses
from tests import real_models, tiny_transformers
from tests.pool import WorkerError, WorkerPool
from tests.wrapped_models import Decoder
from ulysses.launch import verify as command
from ulysses.launch.cli import main
from ulysses.launch.verify import Input
from ulysses.launch.verify_rank import draw
from ulysses.verify_report import Report, Row, spans

Pools = Callable[[int], WorkerPool]

LENGTH = 11


class Pooled(nn.Module):
    """A decoder whose output is one vector, and a head behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.LazyLinear(3)
        self.pool: Callable[[Tensor], Tensor] = lambda hidden: hidden.mean(1)

    def forward(self, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        pooled = self.pool(self.decoder(ids, positions))
        return {"pooled": pooled, "scores": self.head(pooled)}


def made_pooled() -> nn.Module:
    model = Pooled()
    model(torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None])
    return model


def _wrapped(module: nn.Module, mesh: Any) -> nn.Module:
    return ulysses.wrap(module, mesh)


def _not_wrapped(module: nn.Module, mesh: Any) -> nn.Module:
    return module


def _one_gradient_lost(module: nn.Module, mesh: Any) -> nn.Module:
    """Right forwards; rank 1 drops its share of one gradient."""
    module.get_parameter("layers.1.mlp.0.bias").register_hook(
        lambda grad: grad * (mesh["sp"].get_local_rank() != 1)
    )
    return ulysses.wrap(module, mesh)


def _not_a_number(module: nn.Module, mesh: Any) -> nn.Module:
    if mesh["sp"].get_local_rank() == 1:
        nn.init.constant_(module.get_parameter("layers.1.mlp.2.bias"), math.nan)
    return ulysses.wrap(module, mesh)


def _gathering(module: Any, mesh: Any) -> nn.Module:
    """Wholes in; pooled over the whole sequence by the rule for what all ranks compute alike."""
    ulysses.wrap(module.decoder, mesh)
    gather = ulysses.gather_sequence_sum_grads
    module.pool = lambda hidden: gather(hidden, mesh["sp"]).mean(1)
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (
            args,
            {n: ulysses.shard_sequence(t, mesh["sp"]) for n, t in kwargs.items()},
        ),
        with_kwargs=True,
    )
    return module


def _slicing(module: Any, mesh: Any) -> nn.Module:
    """As `_gathering`, but with the gather whose gradients are then too small by num_ranks."""
    _gathering(module, mesh)
    gather = ulysses.gather_sequence_slice_grads
    module.pool = lambda hidden: gather(hidden, mesh["sp"]).mean(1)
    return module


def _verified(
    rank: int, num_ranks: int, distribute: Any, factory: Any = Decoder, **options: Any
) -> Report:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    torch.manual_seed(rank)  # weights are the first rank's
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 20
    return ulysses.verify(
        factory,
        {"ids": ids, "positions": torch.arange(LENGTH)[None]},
        mesh,
        dims={"ids": 1, "positions": 1},
        distribute=distribute,
        **options,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_same_function_is_found_the_same(pool: Pools, num_ranks: int) -> None:
    reports = pool(num_ranks).run(_verified, _wrapped)
    report = reports[0]
    assert reports == [report] * num_ranks
    assert report.agrees
    parameters = {f"gradient of {name}" for name, _ in Decoder().named_parameters()}
    assert {row.what for row in report.rows} == {"output", "loss", *parameters}
    assert all(row.difference < 1e-12 for row in report.rows)
    (sight,) = report.sights
    assert sight.alone == sight.ranks == tuple(range(LENGTH // 2, LENGTH))
    assert "is the same function as in one process." in str(report)
    assert str(ulysses.tiling.shard_lengths(LENGTH, num_ranks))[1:-1].rstrip(",") in str(report)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-9), (torch.bfloat16, 1e-5)])
def test_lower_precision_agrees_to_its_rounding(
    pool: Pools, dtype: torch.dtype, least: float
) -> None:
    report = pool(2).run(_verified, _wrapped, dtype=dtype)[0]
    assert report.agrees, str(report)
    assert max(row.difference for row in report.rows) > least, "computed in another precision"


@pytest.mark.parametrize(
    ("distribute", "wrong"),
    [
        (_not_wrapped, "output"),
        (_one_gradient_lost, "gradient of layers.1.mlp.0.bias"),
        (_not_a_number, "output"),
    ],
)
def test_a_fault_is_named(pool: Pools, distribute: Any, wrong: str) -> None:
    report = pool(2).run(_verified, distribute)[0]
    assert not report.agrees
    assert wrong in report.wrong
    assert f"DIFFERS from one process: {wrong}" in str(report)
    if distribute is _one_gradient_lost:
        assert report.wrong == [wrong]


def test_a_token_that_others_do_not_see_is_shown(pool: Pools) -> None:
    report = pool(2).run(_verified, _not_wrapped, token=1)[0]
    (sight,) = report.sights
    assert sight.alone == tuple(range(1, LENGTH))
    assert sight.ranks == tuple(range(1, 6))
    assert "1-10" in str(report)
    assert "1-5" in str(report)


def test_whole_outputs_and_what_lies_behind_the_gather(pool: Pools) -> None:
    options = {"factory": made_pooled, "shard_inputs": False}
    report = pool(3).run(_verified, _gathering, **options)[0]
    assert report.agrees, str(report)
    assert {"output['pooled']", "output['scores']", "gradient of head.weight"} <= {
        row.what for row in report.rows
    }
    wrong = pool(3).run(_verified, _slicing, **options)[0].wrong
    assert "gradient of decoder.embed.weight" in wrong
    assert not {"gradient of head.weight", "output['scores']"} & set(wrong)


class Shifted(nn.Module):
    """Attention behind an input that is whole on every rank, such as a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        y = x + shift
        out: Tensor = self.attention(y, y, y)[0]
        return out


def _with_a_whole_input(rank: int, num_ranks: int) -> Report:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    inputs = {"x": torch.randn(2, LENGTH, 8), "shift": torch.randn(2, 1, 8)}
    return ulysses.verify(Shifted, inputs, mesh, dims={"x": 1})


def test_gradients_of_inputs_are_compared_too(pool: Pools) -> None:
    report = pool(2).run(_with_a_whole_input)[0]
    assert report.agrees, str(report)
    assert {"gradient of input x", "gradient of input shift"} <= {row.what for row in report.rows}


def _with_other_inputs(rank: int, num_ranks: int) -> None:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    inputs = {"ids": torch.full((1, 4), rank), "positions": torch.arange(4)[None]}
    ulysses.verify(Decoder, inputs, mesh, dims={"ids": 1, "positions": 1})


def test_inputs_that_differ_between_ranks_are_refused(pool: Pools) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(2).run(_with_other_inputs)
    assert all("ids: rank 1 has" in text for _, text in caught.value.errors.values())


def _unequal_lengths(rank: int, num_ranks: int, dims: dict[str, int]) -> None:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    inputs = {"ids": torch.zeros(1, 4, dtype=torch.int64), "positions": torch.arange(5)[None]}
    with pytest.raises(ValueError, match="name the sequence's dim of each input"):
        ulysses.verify(Decoder, inputs, mesh, dims=dims)


@pytest.mark.parametrize("dims", [{"ids": 1, "positions": 1}, {}])
def test_lengths_must_be_one(pool: Pools, dims: dict[str, int]) -> None:
    pool(1).run(_unequal_lengths, dims)


def _family(rank: int, num_ranks: int, kind: str) -> Report:
    """A model of transformers, by `parallelize` on whole inputs."""
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    ids = tiny_transformers.ids(LENGTH)
    factory: Any = partial(tiny_transformers.build, kind)
    dtype = torch.float32 if kind == "gpt_oss" else torch.float64
    inputs, dims = {"input_ids": ids, "labels": ids, "use_cache": False}, {"input_ids": 1}
    if kind == "vit":
        factory, inputs = tiny_transformers.vision, {"pixel_values": torch.randn(2, 3, 8, 8)}
        dims = {"pixel_values": 2}  # of the image: its rows of patches
    if kind == "bert":
        del inputs["use_cache"]
    options = {"distribute": ulysses.parallelize, "shard_inputs": False}
    return ulysses.verify(factory, inputs, mesh, dims=dims, dtype=dtype, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt_oss", "bert", "vit"])
def test_families_of_transformers(pool: Pools, kind: str, num_ranks: int) -> None:
    """With the loss that the model makes of labels among the outputs, where it makes one."""
    report = pool(num_ranks).run(_family, kind)[0]
    assert report.agrees, str(report)
    compared = {row.what for row in report.rows}
    assert ("output['loss']" in compared) == (kind != "vit")
    assert any(what.startswith("gradient of ") for what in compared)


def _real(rank: int, num_ranks: int, model: nn.Module) -> Report:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    ids = tiny_transformers.ids(LENGTH)
    inputs = {"input_ids": ids, "labels": ids} if hasattr(model, "lm_head") else {"input_ids": ids}
    options: Any = {"distribute": ulysses.parallelize, "shard_inputs": False}
    return ulysses.verify(
        lambda: model, inputs, mesh, dims={"input_ids": 1}, dtype=torch.float32, **options
    )


@pytest.mark.parametrize("kind", ["smollm2", "minilm"])
def test_real_weights(pool: Pools, kind: str) -> None:
    """Of MiniLM, and of SmolLM2, which the demo runs as a whole."""
    report = pool(2).run(_real, real_models.build(kind), timeout=180)[0]
    assert report.agrees, str(report)
    assert sum(row.what.startswith("gradient of ") for row in report.rows) >= 20


def row_of(difference: float, allowed: float = 1e-6, what: str = "output") -> Row:
    return Row(what=what, largest=1.0, difference=difference, allowed=allowed, rank=0)


def report_of(*rows: Row) -> Report:
    return Report(module="M", lens=(2, 1), token=1, attention="", rows=rows, sights=())


def test_nothing_compared_and_nan_do_not_agree() -> None:
    assert report_of(row_of(0.0)).agrees
    assert not report_of(row_of(math.nan)).agrees
    assert not report_of().agrees
    assert "nothing compared" in str(report_of())


def test_gradients_that_agree_are_counted_and_shown_on_request() -> None:
    names = ("gradient of a", "gradient of b", "gradient of c")
    rows = [row_of(0.0, what=names[0]), row_of(1e-7, what=names[1]), row_of(1.0, what=names[2])]
    text = str(report_of(row_of(0.0), *rows))
    assert "1 more gradients" in text
    assert [name in text for name in names] == [False, True, True]


def test_spans_read_as_people_count() -> None:
    assert [spans(n) for n in ((), (3,), (0, 1, 2, 5))] == ["none", "3", "0-2, 5"]


# The command.

WORDS = [
    "tests.wrapped_models:Decoder",
    "--input",
    "ids=2,S:20",
    "--input",
    "positions=1,S:positions",
]


def request(*words: str) -> command.Request:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.request_of(parser.parse_args(words))


def test_inputs_are_read_and_drawn() -> None:
    asked = request(
        "m:f", "--length", "5", "--input", "x=2,S,3", "--input", "c=4", "--input", "i=S:7"
    )
    assert asked.inputs == (
        Input("x", (2, 5, 3), "normal", 1),
        Input("c", (4,), "normal", None),
        Input("i", (5,), "7", 0),
    )
    x, c, i = map(draw, asked.inputs)
    assert x.shape == (2, 5, 3)
    assert c.shape == (4,)
    assert i.dtype == torch.int64
    assert 0 <= int(i.min()) <= int(i.max()) < 7
    positions = draw(Input("p", (2, 5), "positions", 1))
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_options_reach_wrap_or_parallelize() -> None:
    asked = request("m:f", "--input", "x=S", "--local", "a", "--local", "b")
    assert (asked.options, asked.parallelize) == ({"local": ["a", "b"]}, False)
    asked = request("m:f", "--input", "x=S", "--region", "layers")
    assert (asked.options, asked.parallelize) == ({"region": "layers"}, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["m"], "m: give package.module:factory"),
        (["m:f", "--input", "x=3"], "no --input has S"),
        (["m:f", "--input", "x=S,S"], "--input x=S,S: give NAME=SHAPE"),
        (["m:f", "--input", "x=2,S:0"], "--input x=2,S:0: give NAME=SHAPE"),
        (["m:f", "--input", "x=2:positions"], "give NAME=SHAPE"),
        (["m:f", "--input", "2,S"], "give NAME=SHAPE"),
        (["m:f", "--input", "x=S", "--token", "50"], r"--token 50: must lie in 0\.\.49"),
        (["m:f", "--input", "x=S", "--sp", "0"], "--sp=0: give a whole number"),
    ],
)
def test_wrong_options_are_refused(words: list[str], told: str) -> None:
    words = words if "--input" in words else [*words, "--input", "x=S"]
    with pytest.raises(ValueError, match=told):
        request(*words)


@pytest.mark.parametrize(("difference", "code"), [(0.0, 0), (1.0, 1)])
def test_the_exit_code_says_whether_it_differs(
    monkeypatch: pytest.MonkeyPatch, difference: float, code: int
) -> None:
    monkeypatch.setattr(command, "_run_ranks", lambda _: report_of(row_of(difference)))
    assert main(["verify", *WORDS]) == code


@pytest.mark.usefixtures("forking")
def test_the_command_compares_over_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *WORDS, "--sp", "2", "--length", "7"]) == 0
    assert "Decoder over 2 ranks is the same function as in one process." in capfd.readouterr().out


def test_a_failed_process_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulysses.launch.agent.run_torchrun", lambda words, num_ranks: 1)
    assert main(["verify", *WORDS]) == 2
