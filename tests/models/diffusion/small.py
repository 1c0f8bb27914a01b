"""Small pipelines on disk, as `save_pretrained` would write their configs."""

import json
from pathlib import Path
from typing import Any

from benchmarks.small_denoisers import EPSILON, FLOW, SIDE, SMALL, vae_of

__all__ = ["EPSILON", "FLOW", "SIDE", "SMALL", "write_pipeline"]

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
        "vae/config.json": vae_of(name),
    }
    for place, encoder in TEXT_ENCODERS.get(name, {}).items():
        index[place] = ["transformers", _CLIP[place]]
        files[f"{place}/config.json"] = encoder
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content), encoding="utf-8")
    return folder
