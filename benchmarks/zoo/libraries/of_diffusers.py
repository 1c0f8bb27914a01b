"""diffusers' denoisers and autoencoders, with tiny configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit

BATCH, SIDE, TEXT, WIDTH = 4, 16, 8, 32
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
UP_DOWN = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
DIT = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
# What each model is made of, and the inputs that it takes besides the noisy sample and the time.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unet": (
        "UNet2DModel",
        {"sample_size": SIDE, "in_channels": 4, "out_channels": 4, **BLOCKS, **UP_DOWN},
        (),
    ),
    "stable_diffusion": (
        "UNet2DConditionModel",
        {
            "sample_size": SIDE,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 8,
            **BLOCKS,
            **CROSS,
        },
        ("encoder_hidden_states",),
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**DIT, "in_channels": 4, "out_channels": 4, "sample_size": SIDE, "norm_num_groups": 4},
        ("class_labels",),
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**DIT, "in_channels": 4, "out_channels": 4, "sample_size": SIDE, "caption_channels": WIDTH}
        | {"cross_attention_dim": 64, "norm_num_groups": 4, "use_additional_conditions": False},
        ("encoder_hidden_states",),
    ),
    "stable_diffusion_3": (
        "SD3Transformer2DModel",
        {
            **DIT,
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": SIDE,
            "joint_attention_dim": WIDTH,
        }
        | {"caption_projection_dim": 64, "pooled_projection_dim": WIDTH, "pos_embed_max_size": 16},
        ("encoder_hidden_states", "pooled_projections"),
    ),
    "sana": (
        "SanaTransformer2DModel",
        {**DIT, "in_channels": 4, "out_channels": 4, "sample_size": SIDE, "caption_channels": WIDTH}
        | {
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
        },
        ("encoder_hidden_states",),
    ),
    "autoencoder_kl": (
        "AutoencoderKL",
        {
            "in_channels": 4,
            "out_channels": 4,
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        (),
    ),
    "vq_model": (
        "VQModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        (),
    ),
}
NAMES = tuple(MODELS)
_SHAPES = {"encoder_hidden_states": (TEXT, WIDTH), "pooled_projections": (WIDTH,)}


def __getattr__(name: str) -> Callable[[], autofit.Workload]:
    """The function of a model, by its key."""
    if name not in MODELS:
        raise AttributeError(name)
    return lambda: _workload(name)


def _workload(name: str) -> autofit.Workload:
    kind, config, inputs = MODELS[name]

    def batch(n: int) -> dict[str, Tensor]:
        given = {each: torch.randn(n, *_SHAPES[each]) for each in inputs if each in _SHAPES}
        if "class_labels" in inputs:
            given["class_labels"] = torch.arange(n)
        return {"sample": torch.randn(n, 4, SIDE, SIDE), "time": torch.arange(n) * 10, **given}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        sample, time = batch["sample"], batch["time"]
        inputs = {key: value for key, value in batch.items() if key not in ("sample", "time")}
        timed = {} if kind in ("AutoencoderKL", "VQModel") else {"timestep": time}
        return functional.mse_loss(model(sample, **timed, **inputs).sample, sample)

    return autofit.Workload(
        model=lambda: getattr(diffusers, kind)(**config),
        batch=batch,
        loss=loss,
        effective_batch_size=BATCH,
    )
