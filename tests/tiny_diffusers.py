"""Small random models of diffusers, and whole inputs of theirs."""

from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor

_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 7,
    "freq_dim": 8,
    "ffn_dim": 20,
    "num_layers": 2,
    "rope_max_seq_len": 8,
}
_JOINT = {"attention_head_dim": 8, "num_attention_heads": 3, "joint_attention_dim": 5}


def model(kind: str) -> Any:
    """In float64 and evaluation mode, with the same weights on every rank."""
    torch.manual_seed(1)
    made: Any
    if kind == "wan from an image":
        options = {**_WAN, "image_dim": 6, "added_kv_proj_dim": 24, "num_layers": 1}
        made = WanTransformer3DModel(**options)
    elif kind.startswith("wan"):
        made = WanTransformer3DModel(**_WAN)
    elif kind == "chronoedit":
        made = ChronoEditTransformer3DModel(**_WAN)
    elif kind == "flux":
        made = FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            pooled_projection_dim=6,
            axes_dims_rope=(2, 2, 4),
            **_JOINT,
        )
    elif kind == "flux2":
        made = Flux2Transformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            timestep_guidance_channels=8,
            axes_dims_rope=(2, 2, 2, 2),
            **_JOINT,
        )
    elif kind == "ltx":
        made = LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            num_layers=2,
            caption_channels=5,
        )
    else:
        made = QwenImageTransformer2DModel(
            in_channels=4, out_channels=1, num_layers=2, axes_dims_rope=(2, 2, 4), **_JOINT
        )
    return made.double().eval()


def inputs(kind: str) -> dict[str, Any]:
    """Two samples, of lengths that 2 and 4 ranks can't share out evenly, nor 3 their text."""
    draws = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    if kind.startswith("wan") or kind == "chronoedit":  # 3 x 3 x 3 tokens of 1 x 2 x 2
        given = {"hidden_states": draw(2, 3, 3, 6, 6), "encoder_hidden_states": draw(2, 5, 7)}
        given["timestep"] = torch.tensor([900.0, 20.0])
        if kind == "wan with a time for each token":
            given["timestep"] = torch.arange(54.0).view(2, 27)
        if kind == "wan from an image":  # its processor takes the last 512 for the text
            given["encoder_hidden_states"] = draw(2, 512, 7)
            given["encoder_hidden_states_image"] = draw(2, 3, 6)
        return given
    given = {"hidden_states": draw(2, 16, 4), "encoder_hidden_states": draw(2, 7, 5)}
    given["timestep"] = torch.tensor([0.9, 0.1], dtype=torch.float64)
    places = torch.cartesian_prod(*map(torch.arange, (1.0, 4.0, 4.0)))
    if kind == "flux":
        own = {"img_ids": places, "txt_ids": torch.zeros(7, 3), "pooled_projections": draw(2, 6)}
    elif kind == "ltx":
        own = {"encoder_attention_mask": (torch.arange(7) < torch.tensor([[7], [4]])).double()}
        own |= {"num_frames": 1, "height": 4, "width": 4, "timestep": torch.tensor([[9.0], [2.0]])}
    elif kind == "flux2":
        places = torch.nn.functional.pad(places, (0, 1)).expand(2, -1, -1)
        own = {"img_ids": places, "txt_ids": torch.zeros(2, 7, 4), "guidance": given["timestep"]}
    else:
        own = {"img_shapes": [[(1, 4, 4)]] * 2}
        if kind == "qwen with padding":
            own["encoder_hidden_states_mask"] = torch.arange(7) < torch.tensor([[7], [4]])
    return {**given, **own}
