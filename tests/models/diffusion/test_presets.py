"""Presets of pipelines are what they were published as: counted on models without memory."""

import inspect
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig

from autofit.core.errors import InputError
from autofit.models import describe_presets, model_names, resolve
from autofit.models.diffusion.pipeline import (
    diffusers_class,
    preset_pipeline,
    presets,
    with_text_encoders,
)
from autofit.models.diffusion.text_encoders import parts_of

# In billions, as published; the figures in the YAML cannot confirm themselves.
PUBLISHED = {
    "sd-1.5": 0.86,
    "sdxl": 2.57,
    "sd-3.5-medium": 2.2,
    "sd-3.5-large": 8.1,
    "flux-dev": 11.9,
    "qwen-image": 20.4,
    "wan-1.3b": 1.42,
    "wan-14b": 14.3,
}
# Latents of the pictures that each was made for: channels, frames, rows, columns.
LATENTS = {
    "sd-1.5": (4, 64, 64),
    "sdxl": (4, 128, 128),
    "sd-3.5-medium": (16, 128, 128),
    "sd-3.5-large": (16, 128, 128),
    "flux-dev": (16, 128, 128),
    "qwen-image": (16, 128, 128),
    "wan-1.3b": (16, 21, 60, 104),
    "wan-14b": (16, 21, 60, 104),
}


def test_all_are_tested() -> None:
    assert set(presets()) == set(PUBLISHED) == set(LATENTS)
    assert set(presets()) < set(model_names())
    rows = {row["name"]: row for row in describe_presets()}
    assert all(rows[name]["task"] == "diffusion" for name in presets())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    with torch.device("meta"):
        model = preset_pipeline(name)()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(presets()[name]["parameters"], rel=2e-3)
    assert count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_text_encoders_are_those_of_clip() -> None:
    with torch.device("meta"):
        model: Any = with_text_encoders(preset_pipeline("sdxl"))()
    counts = {}
    for name, part in parts_of(model).items():
        counts[name] = sum(parameter.numel() for parameter in part.parameters())
    # as their checkpoints have them
    assert counts.pop("unet") == presets()["sdxl"]["parameters"]
    assert counts == {"text_encoder": 123_060_480, "text_encoder_2": 694_659_840}

    (of_sd,) = presets()["sd-1.5"]["text_encoders"].values()
    assert of_sd == presets()["sdxl"]["text_encoders"]["text_encoder"]
    known = CLIPTextConfig().to_dict()
    assert all(set(config) <= set(known) for config in presets()["sdxl"]["text_encoders"].values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_a_config_is_one_that_diffusers_takes(name: str) -> None:
    for config in (presets()[name]["denoiser"], presets()[name]["scheduler"]):
        taken = inspect.signature(diffusers_class(config["_class_name"]).__init__).parameters
        assert set(config) - {"_class_name"} <= set(taken)


@pytest.mark.parametrize("name", LATENTS)
def test_batches_hold_latents_of_the_usual_pictures(name: str) -> None:
    batch: Any = resolve(name).batch
    assert batch.shape == LATENTS[name]


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(InputError, match="Did you mean 'flux-dev'"):
        resolve("flux-dav")
