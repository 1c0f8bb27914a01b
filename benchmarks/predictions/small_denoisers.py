"""Small denoisers of each class, of some hundred thousand parameters each, as configs of pipelines: what the memory
benchmark and the tests train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofit.core.workload import Workload
from autofit.models.diffusion.pipeline import DiffusersModel, PictureSizes, diffusion_workload

EPSILON = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
SIDE = 128  # pixels of a picture: 16 latents
_UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "block_out_channels": [32, 64],
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 32,
}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
# The folder of the denoiser, its config, and that of the scheduler.
SMALL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sd": ("unet", _UNET | {"layers_per_block": 1}, EPSILON),
    "sdxl": (
        "unet",
        _UNET
        | {
            "transformer_layers_per_block": [1, 2],
            "layers_per_block": 1,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 80,
        },
        EPSILON | {"prediction_type": "v_prediction"},
    ),
    "sd3": (
        "transformer",
        {
            "_class_name": "SD3Transformer2DModel",
            **_HEADS,
            "sample_size": 16,
            "num_layers": 4,
            "caption_projection_dim": 64,
            "joint_attention_dim": 48,
            "pooled_projection_dim": 40,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
            "dual_attention_layers": [0, 1],
        },
        FLOW,
    ),
    "flux": (
        "transformer",
        {
            "_class_name": "FluxTransformer2DModel",
            **_HEADS,
            "axes_dims_rope": [4, 6, 6],
            "num_layers": 3,
            "num_single_layers": 5,
            "joint_attention_dim": 48,
            "pooled_projection_dim": 40,
            "guidance_embeds": True,
        },
        FLOW | {"use_dynamic_shifting": True},
    ),
    "qwen": (
        "transformer",
        {
            "_class_name": "QwenImageTransformer2DModel",
            **_HEADS,
            "axes_dims_rope": [4, 6, 6],
            "num_layers": 4,
            "joint_attention_dim": 48,
        },
        FLOW | {"shift": 1.0, "use_dynamic_shifting": True},
    ),
    "wan": (
        "transformer",
        {
            "_class_name": "WanTransformer3DModel",
            **_HEADS,
            "num_layers": 4,
            "ffn_dim": 128,
            "text_dim": 48,
        },
        {
            "_class_name": "UniPCMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": 3.0,
        },
    ),
}
_OF_WAN = {"_class_name": "AutoencoderKLWan", "temperal_downsample": [False, True, True]}
_VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [8, 8, 8, 8]}


@dataclass(frozen=True)
class SmallDenoiser:
    """One of them on small pictures, as a case of the memory benchmark."""

    kind: str

    def workload(self, name: str) -> Workload:
        """The training of it on random latents."""
        folder, config, scheduler = SMALL[self.kind]
        frames = 5 if self.kind == "wan" else None
        model = DiffusersModel(name, config, scheduler, vae_of(self.kind), folder=folder)
        return diffusion_workload(model, PictureSizes("64", frames, 12, 4))


def vae_of(kind: str) -> dict[str, Any]:
    """The config of a small pipeline's VAE."""
    return _OF_WAN if kind == "wan" else _VAE


DENOISERS = {kind: SmallDenoiser(kind) for kind in SMALL}
