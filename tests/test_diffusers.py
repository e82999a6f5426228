"""diffusers' models over ranks, by their own plan and at their own dispatch; what is refused."""

import copy
import functools
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch.distributed.tensor import DTensor

import ulysses
from examples import denoise
from tests.pool import WorkerError
from tests.tiny_diffusers import inputs, model
from ulysses.verify_report import Report

# A model whose plan is not followed, by its list of layers.
CROSS = [f"transformer_blocks.{layer}.attn2" for layer in range(2)]
OPTIONS: dict[str, dict[str, Any]] = {"ltx": {"region": "transformer_blocks", "local": CROSS}}


def _verified(rank: int, num_ranks: int, kind: str) -> Report:
    mesh = ulysses.init_mesh(sp=num_ranks, device_type="cpu")
    given = inputs(kind)
    return ulysses.verify(
        functools.partial(model, kind),
        given,
        mesh,
        dims={"hidden_states": given["hidden_states"].ndim // 2},  # frames, or tokens
        distribute=functools.partial(ulysses.parallelize, **OPTIONS.get(kind, {})),
        shard_inputs=False,
    )


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        *((kind, n) for kind in ("wan", "qwen with padding") for n in (1, 2, 3, 4)),
        ("flux", 4),
        ("wan with a time for each token", 3),
        ("wan from an image", 2),
        ("chronoedit", 2),
        ("flux2", 3),
        ("qwen", 3),
        ("ltx", 2),
    ],
)
def test_verified(pool, kind, num_ranks):
    """Outputs, loss and all gradients, those of text and time too; and who sees a change."""
    report = pool(num_ranks).run(_verified, kind)[0]
    assert report.agrees, str(report)
    compared = {row.what for row in report.rows}
    names = {"hidden_states", "encoder_hidden_states"}
    assert {f"gradient of input {name}" for name in names} <= compared


def gradients(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    out = module(**given).sample
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in module.named_parameters()}


def _recomputed(rank: int, num_ranks: int, kind: str) -> dict[str, Any]:
    module = model(kind).train()
    module.enable_gradient_checkpointing()
    ulysses.parallelize(module, dist.group.WORLD)
    found = gradients(module, inputs(kind))
    ulysses.average_gradients(module.parameters(), dist.group.WORLD)
    return found


@pytest.mark.parametrize("kind", ["wan", "flux"])
def test_recomputed_layers(pool, kind):
    expected = gradients(model(kind), inputs(kind))
    for found in pool(2).run(_recomputed, kind):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def _split(rank: int, num_ranks: int) -> tuple[dict[str, Any], set[int | None]]:
    """tp=2 x sp=2, the sharded gradients gathered."""
    mesh = ulysses.init_mesh(sp=2, tp=2, device_type="cpu")
    module = denoise.split_over_ranks(model("wan"), mesh["tp"])
    ulysses.parallelize(module, mesh)
    found = gradients(module, inputs("wan"))
    ulysses.average_gradients(module.parameters(), mesh["sp"])
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    return whole, {row.num_heads for row in ulysses.describe(module).rows}


def test_tensor_parallelism_besides(pool):
    expected = gradients(model("wan"), inputs("wan"))
    for found, heads in pool(4).run(_split):
        assert heads == {1}
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def _collectives(rank: int, num_ranks: int, kind: str) -> tuple[int, list[str]]:
    module = ulysses.parallelize(model(kind), dist.group.WORLD)
    calls, original = [], dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        with torch.no_grad():
            module(**inputs(kind))
    finally:
        dist.all_to_all_single = original
    return len(calls), [row.policy for row in ulysses.describe(module).rows]


def test_cross_attention_is_not_exchanged(pool):
    """Lengths are asked for, self-attention goes there and back, and the output is gathered."""
    for number, policies in pool(2).run(_collectives, "wan"):
        assert policies == ["exchanged", "local"] * 2
        assert number == 1 + 2 * 2 + 1


def one_layer() -> tuple[Any, dict[str, Any]]:
    """A layer of Wan, and what it is given: rows with their rotary positions, text and time."""
    whole, given = model("wan"), inputs("wan")
    draws = torch.Generator().manual_seed(3)
    kinds = {"hidden_states": 27, "encoder_hidden_states": 5, "temb": 6}
    states = {
        name: torch.randn(2, length, 24, generator=draws, dtype=torch.float64)
        for name, length in kinds.items()
    }
    return whole.blocks[0], {**states, "rotary_emb": whole.rope(given["hidden_states"])}


def _layer(rank: int, num_ranks: int) -> torch.Tensor:
    layer, given = one_layer()
    ulysses.wrap(layer, dist.group.WORLD, local=["attn2"])
    cut = functools.partial(ulysses.shard_sequence, group=dist.group.WORLD)
    given["hidden_states"] = cut(given["hidden_states"])
    given["rotary_emb"] = tuple(map(cut, given["rotary_emb"]))
    out: torch.Tensor = layer(**given)
    return ulysses.gather_sequence_slice_grads(out, dist.group.WORLD).detach()


def test_a_layer_is_wrapped(pool):
    layer, given = one_layer()
    for found in pool(2).run(_layer):
        torch.testing.assert_close(found, layer(**given), rtol=0, atol=1e-12)


def _refused(rank: int, num_ranks: int) -> None:
    given = inputs("flux")
    short = {"encoder_hidden_states": given["encoder_hidden_states"][:, :1]}
    ulysses.parallelize(model("flux"), dist.group.WORLD)(**{**given, **short})


def test_a_text_without_a_token_for_each_rank_is_refused_on_all(pool):
    message = "encoder_hidden_states has 1 tokens for 2 ranks, and each needs at least one"
    with pytest.raises(WorkerError, match=message) as caught:
        pool(2).run(_refused)
    assert set(caught.value.errors) == {0, 1}


def pipeline(transformer: Any) -> Any:
    """diffusers' own, without the parts that make text of words and video of latents."""
    pipe = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def made_by(pipe: Any) -> torch.Tensor:
    """Latents, after three guided steps."""
    draws = torch.Generator().manual_seed(0)
    text, no_text = torch.randn(2, 1, 5, 7, generator=draws, dtype=torch.float64)
    made: torch.Tensor = pipe(
        prompt_embeds=text,
        negative_prompt_embeds=no_text,
        height=48,
        width=48,
        num_frames=9,
        num_inference_steps=3,
        generator=draws,
        output_type="latent",
    ).frames
    return made


def _made(rank: int, num_ranks: int) -> torch.Tensor:
    pipe = pipeline(model("wan"))
    ulysses.parallelize(pipe.transformer, dist.group.WORLD)
    return made_by(pipe)


def test_a_pipeline_is_called_as_before(pool):
    expected = made_by(pipeline(model("wan")))
    for found in pool(3).run(_made):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_copies_pickles_and_unwrap() -> None:
    module, given = model("flux"), inputs("flux")
    with torch.no_grad():
        expected = module(**given).sample
        ulysses.parallelize(module, None)
        assert torch.equal(copy.deepcopy(module)(**given).sample, expected)
        assert torch.equal(pickle.loads(pickle.dumps(module))(**given).sample, expected)
        with pytest.raises(ValueError, match="is wrapped already"):
            ulysses.parallelize(module, None)
        ulysses.unwrap(module)
        assert not [part for part in module.modules() if "forward" in vars(part)]
        assert torch.equal(module(**given, return_dict=False)[0], expected)


def test_what_can_not_be_is_refused() -> None:
    module, given = model("flux"), inputs("flux")
    for options, message in (
        ({"local": ["transformer_blocks.0.attn"]}, "whose own plan says what is whole"),
        ({"region": None}, "FluxTransformer2DModel makes its tokens and positions of whole inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            ulysses.parallelize(module, None, **options)
    with pytest.raises(ValueError, match=r"use ulysses\.parallelize"):
        ulysses.wrap(module, None)

    own = module.single_transformer_blocks[0].attn.processor
    for active, of_one in (("flex", None), ("native", AttentionBackendName.FLEX)):
        own._attention_backend = of_one
        with attention_backend(active), pytest.raises(ValueError, match="backend 'flex': call"):
            ulysses.parallelize(module, None)
    own._attention_backend = None
    ulysses.parallelize(module, None)
    with pytest.raises(ValueError, match="was given controlnet_block_samples, of which its plan"):
        module(**given, controlnet_block_samples=[given["hidden_states"]])
    wan = ulysses.parallelize(model("wan"), None)
    wan.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ValueError, match="has a cache of diffusers'"):
        wan(**inputs("wan"))


def test_a_plan_that_nobody_verified_is_refused() -> None:
    message = "LTXVideoTransformer3DModel has a plan for context parallelism that has not been"
    with pytest.raises(ValueError, match=re.escape(message)):
        ulysses.parallelize(model("ltx"), None)
