"""Small denoisers of each class, as configs of pipelines: of some hundred thousand parameters each."""

import json
from pathlib import Path
from typing import Any

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


TOKENS = 60  # of the vocabularies


def clip_config(width: int, projected: int = 0) -> dict[str, Any]:
    """A text encoder's; of some pipelines with a projection of the whole text."""
    return {
        "vocab_size": TOKENS,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": projected or width,
        "max_position_embeddings": 77,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "torch_dtype": "float16",
        "model_type": "clip_text_model",
        "architectures": ["CLIPTextModel"],
    }


# Of those that are trained, by the folder.
TEXT_ENCODERS = {
    "sd": {"text_encoder": clip_config(32)},
    "sdxl": {"text_encoder": clip_config(16), "text_encoder_2": clip_config(16, 32)},
}
_CLIP = {"text_encoder": "CLIPTextModel", "text_encoder_2": "CLIPTextModelWithProjection"}


def write_pipeline(folder: Path, name: str) -> Path:
    """The directory of a small pipeline, as `save_pretrained` would write its configs."""
    denoiser, config, scheduler = SMALL[name]
    index = {
        "_class_name": "DiffusionPipeline",
        denoiser: ["diffusers", config["_class_name"]],
        "scheduler": ["diffusers", scheduler["_class_name"]],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    files = {
        "model_index.json": index,
        f"{denoiser}/config.json": config,
        "scheduler/scheduler_config.json": scheduler,
        "vae/config.json": {"_class_name": "AutoencoderKL", "block_out_channels": [8, 8, 8, 8]},
    }
    for place, encoder in TEXT_ENCODERS.get(name, {}).items():
        index[place] = ["transformers", _CLIP[place]]
        files[f"{place}/config.json"] = encoder
    if name == "wan":
        files["vae/config.json"] = {
            "_class_name": "AutoencoderKLWan",
            "temperal_downsample": [False, True, True],
        }
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content), encoding="utf-8")
    return folder
