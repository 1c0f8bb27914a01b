"""Small pipelines on disk, as `save_pretrained` would write their configs."""

import json
from pathlib import Path

from benchmarks.small_denoisers import EPSILON, FLOW, SIDE, SMALL, vae_of

__all__ = ["EPSILON", "FLOW", "SIDE", "SMALL", "write_pipeline"]


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
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content), encoding="utf-8")
    return folder
