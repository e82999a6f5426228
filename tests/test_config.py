"""The configuration: what a file may say, what is refused and how, and what `auto` becomes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ulysses.config import AttentionConfig, Config, ModelConfig, ParallelConfig, load_config
from ulysses.degrees import Degrees, fit

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def model(num_heads: int, num_kv_heads: int | None = None) -> ModelConfig:
    num_kv_heads = num_kv_heads or num_heads
    return ModelConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, value_dim=64)


def config(num_heads: int = 8, num_kv_heads: int | None = None, **parallel: Any) -> Config:
    return Config(parallel=ParallelConfig(**parallel), model=model(num_heads, num_kv_heads))


@pytest.mark.parametrize(
    ("name", "num_ranks", "degrees", "heads"),
    [
        ("demo", 2, (1, 2, 1), (9, 3, 64, 64, 30)),
        ("wan2.2_t2v_a14b", 8, (1, 4, 2), (40, 40, 128, 128, 40)),
        ("wan_tiny", 4, (1, 2, 2), (4, 4, 20, 20, 2)),
        ("qwen3_32b", 16, (1, 4, 4), (64, 8, 128, 128, 64)),
        ("llama3_8b", 4, (1, 4, 1), (32, 8, 128, 128, 32)),
    ],
)
def test_the_shipped_files(
    name: str, num_ranks: int, degrees: tuple[int, int, int], heads: tuple[int, ...]
) -> None:
    loaded = load_config(CONFIGS / f"{name}.yaml")
    found = loaded.resolve(num_ranks)
    assert (found.dp, found.sp, found.tp) == degrees
    assert loaded.model is not None
    assert heads == (
        loaded.model.num_heads,
        loaded.model.num_kv_heads,
        loaded.model.head_dim,
        loaded.model.value_dim,
        loaded.model.num_layers,
    )


def test_every_shipped_file_is_tested() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {
        "demo",
        "wan2.2_t2v_a14b",
        "wan_tiny",
        "qwen3_32b",
        "llama3_8b",
    }


def test_wan_has_the_tokens_of_81_frames_of_480_x_640() -> None:
    loaded = load_config(CONFIGS / "wan2.2_t2v_a14b.yaml").model
    assert loaded is not None
    frames, height, width = (81 - 1) // 4 + 1, 480 // 16, 640 // 16
    assert loaded.seq_len == frames * height * width == 25200


@pytest.mark.parametrize("text", ["", "parallel:\n", "parallel: {sp: null}\nmodel:\n"])
def test_sp_is_1_unless_asked_for(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    loaded = load_config(tmp_path / "c.yaml")
    assert loaded == Config()
    assert loaded.resolve(4) == Degrees(dp=4, sp=1, tp=1)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("parallel: {sp_szie: 2}", ValueError, "unknown key 'sp_szie' in parallel: .* 'sp'; known"),
        ("parallel: {ring_degree: 2}", ValueError, "unknown key 'ring_degree' in parallel"),
        ("modle: {}", ValueError, "unknown key 'modle' in the configuration: .* 'model'"),
        ("attention: {back-end: sdpa}", ValueError, "'back-end' in attention: .* 'backend'"),
        ("model: {heads: 8}", ValueError, "'heads' in model: .* 'num_heads'"),
        ("model: {head_dim: 64}", ValueError, "model.num_heads is missing"),
        ("model: {num_heads: 8}", ValueError, "model.head_dim is missing"),
        ("parallel: 2", TypeError, "parallel=2: give a mapping with keys out of sp, tp, dp"),
        ("- sp", TypeError, "the configuration=.*: give a mapping"),
        ("parallel: {sp: 0}", ValueError, "parallel.sp=0: give a whole number of at least 1, or"),
        ("parallel: {tp: -1}", ValueError, "parallel.tp=-1: give a whole number of at least 1"),
        ("parallel: {sp: '2'}", TypeError, "parallel.sp='2' is a str: give .*, or auto"),
        ("parallel: {sp: 2.0}", TypeError, "parallel.sp=2.0 is a float: give a whole number"),
        ("parallel: {dp: true}", TypeError, "parallel.dp=True is a bool"),
        ("parallel: {kv_replication: 1}", TypeError, "parallel.kv_replication=1: .*true or false"),
        ("parallel: {sp: 2, sp: 4}", ValueError, "the key 'sp' is given twice"),
        ("parallel: {sp: 2", ValueError, "not readable as YAML"),
        ("parallel: {sp: !!python/name:os.system }", ValueError, "not readable as YAML"),
        ("attention: {backend: 3}", TypeError, "attention.backend=3: give a backend's name"),
        ("attention: {grid: 4}", TypeError, r"attention.grid=4: give two numbers, \[u, r\]"),
        ("attention: {grid: [2, 0]}", ValueError, "attention.grid: a size=0"),
        (
            "parallel: {sp: 4}\nattention: {grid: [2, 3]}",
            ValueError,
            r"attention.grid=\[2, 3\]: u\*r=6 must be sp=4; give \[1, 4\], \[2, 2\], \[4, 1\] or",
        ),
        ("model: {num_heads: 6, num_kv_heads: 4, head_dim: 8}", ValueError, "can be 1, 2, 3 or 6"),
        ("model: {num_heads: 6, head_dim: 8, dtype: bf16}", ValueError, "dtype='bf16': give one"),
        ("model: {num_heads: 6, head_dim: 8, seq_len: 0}", ValueError, "model.seq_len=0: give"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_the_values_and_the_way_out(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(error, match=f"(?s){path}: .*{message}"):
        load_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"c\.yaml"):
        load_config(tmp_path / "c.yaml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"c\.yaml: "):
        load_config(tmp_path / "c.yaml")


def test_a_configuration_holds_still() -> None:
    with pytest.raises(AttributeError):
        Config().parallel.sp = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "degrees"),
    [
        ({"sp": "auto"}, 8, (1, 8, 1)),
        ({"sp": "auto", "tp": "auto", "dp": "auto"}, 8, (1, 8, 1)),
        ({"sp": "auto", "tp": 2}, 8, (1, 4, 2)),
        ({"sp": "auto", "tp": 2, "dp": 2}, 8, (2, 2, 2)),
        ({"sp": "auto", "tp": "auto", "dp": 4}, 8, (4, 2, 1)),
        ({"sp": 4, "tp": "auto"}, 8, (2, 4, 1)),
        ({"sp": 4, "tp": "auto", "dp": 1}, 8, (1, 4, 2)),
        ({"sp": 2}, 8, (4, 2, 1)),
        ({"sp": 2, "tp": 2, "dp": 2}, 8, (2, 2, 2)),
        ({"sp": 4, "dp": 1}, 4, (1, 4, 1)),
    ],
)
def test_auto_is_what_the_others_leave(
    parallel: dict[str, Any], num_ranks: int, degrees: tuple[int, int, int]
) -> None:
    found = config(**parallel).resolve(num_ranks)
    assert (found.dp, found.sp, found.tp) == degrees
    assert found.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "message"),
    [
        (
            {"tp": 2, "sp": 3},
            4,
            r"tp\*sp=6 does not divide world 4 .*with tp=2, sp can be 1 or 2; ",
        ),
        ({"sp": 4, "tp": 2}, 4, r"tp\*sp=8 does not divide world 4 .*start 8 ranks"),
        ({"sp": "auto", "tp": 4}, 6, r"dp\*tp=4 does not divide world 6, so .* for sp=auto"),
        ({"tp": "auto", "sp": 3, "dp": 1}, 8, r"dp\*sp=3 does not divide world 8, .* tp=auto"),
        (
            {"sp": 2, "tp": 2, "dp": 1},
            8,
            r"dp\*sp\*tp=4 is not world 8 .*dp be 2; or start 4 ranks",
        ),
        ({"sp": 8}, 4, r"tp\*sp=8 does not divide world 4 .*with tp=1, sp can be 1, 2 or 4"),
    ],
)
def test_a_world_that_does_not_fit(parallel: dict[str, Any], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**parallel).resolve(num_ranks)


def test_a_grid_is_held_against_an_sp_that_was_auto() -> None:
    given = Config(parallel=ParallelConfig(sp="auto"), attention=AttentionConfig(grid=(2, 2)))
    assert given.resolve(4).sp == 4
    with pytest.raises(ValueError, match=r"u\*r=4 must be sp=8; give .*\[8, 1\] or auto"):
        given.resolve(8)


def test_branches_of_guidance_are_ranks_too() -> None:
    given = config(cfg=2, tp=2)
    assert given.resolve(8) == Degrees(dp=2, cfg=2, sp=1, tp=2)
    assert "8 ranks = dp 2 x cfg 2 x sp 1 x tp 2" in given.explain(given.resolve(8))
    assert config(cfg=2, sp="auto").resolve(8).sp == 4
    for wrong, num_ranks, message in (
        ({"cfg": 2, "sp": 3}, 8, r"tp\*sp=3 does not divide world 8 / cfg 2 .*start 6 ranks"),
        ({"cfg": 2, "dp": 1}, 8, r"dp\*sp\*tp=1 is not world 8 / cfg 2 .*dp be 4; or start 2"),
        ({"cfg": 2}, 3, "cfg=2 does not divide world 3"),
        ({"cfg": 2, "sp": "auto"}, 3, r"dp\*cfg\*tp=2 does not divide world 3"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**wrong).resolve(num_ranks)
    with pytest.raises(ValueError, match=r"parallel\.cfg=3: guidance has two branches"):
        config(cfg=3)


@pytest.mark.parametrize(
    ("num_heads", "parallel"),
    [
        (12, {"tp": 2, "sp": 4}),  # 6 heads on 4 ranks
        (6, {"sp": 4}),
        (4, {"sp": 8}),  # more ranks than heads
        (7, {"sp": 2}),
    ],
)
def test_sp_need_not_divide_the_heads(num_heads: int, parallel: dict[str, Any]) -> None:
    given = config(num_heads, **parallel)
    degrees = given.resolve(8)
    assert degrees.sp == parallel["sp"]
    assert "is level" in given.explain(degrees)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp", "message"),
    [
        (12, 12, 5, "num_heads=12 is not a multiple of tp=5: tp can be 1, 2, 3, 4, 6 or 12$"),
        (40, 8, 5, "num_kv_heads=8 is not a multiple of tp=5: tp can be 1, 2, 4 or 8$"),
        (32, 8, 16, "num_kv_heads=8 .*tp=16: .*; or kv_replication: true keeps .* on 2 tp ranks$"),
    ],
)
def test_tp_has_to_divide_the_heads(
    num_heads: int, num_kv_heads: int, tp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(num_heads, num_kv_heads, tp=tp)
    with pytest.raises(ValueError, match=message):
        config(num_heads, num_kv_heads, tp="auto", sp=1, dp=1).resolve(tp)


def test_kv_heads_may_be_replicated_where_that_is_said() -> None:
    assert config(32, 8, tp=16, kv_replication=True).resolve(16).tp == 16
    with pytest.raises(ValueError, match="tp can be 1, 2, 4, 8, 16 or 32"):
        config(32, 8, tp=3, kv_replication=True)


def test_the_explanation_names_the_ranks_and_the_heads() -> None:
    given = config(40, sp="auto", tp=2)
    assert given.explain(given.resolve(8)) == (
        "8 ranks = dp 1 x sp 4 x tp 2; sp takes what the others leave; "
        "20 of 40 query heads on a tp rank, 5 on each of its sp ranks"
    )


@pytest.mark.parametrize("num_ranks", range(1, 13))
def test_fit_takes_exactly_what_multiplies_to_the_world(num_ranks: int) -> None:
    for sp in range(1, 13):
        for tp in range(1, 13):
            if num_ranks % (sp * tp) == 0:
                dp = num_ranks // (sp * tp)
                assert fit(num_ranks, sp=sp, tp=tp) == Degrees(dp=dp, sp=sp, tp=tp)
                assert fit(num_ranks, sp=sp, tp=tp, dp=dp).num_ranks == num_ranks
            else:
                with pytest.raises(ValueError, match=f"world {num_ranks} "):
                    fit(num_ranks, sp=sp, tp=tp)


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys, ulysses; ulysses.load_config(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(CONFIGS / "demo.yaml")]
    subprocess.run(command, check=True, timeout=60, cwd=CONFIGS.parent)
