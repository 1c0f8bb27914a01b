"""Losses and gradients of a step are those of diffusers' own training scripts, written here out of diffusers' parts."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.models.diffusion.pipeline import PictureSizes, diffusion_workload, read_pipeline
from autofit.models.losses import Diffusion
from autofit.training.build import build
from autofit.training.step import accumulate
from tests.models.diffusion.small import EPSILON, SIDE, SMALL, write_pipeline
from tests.tiny import CPU

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SIZES = PictureSizes(str(SIDE), prompt_tokens=12, effective_batch_size=4)


def added_by(scheduler: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents and the target, as in train_text_to_image_lora.py."""
    latents, noise, times = batch["latents"], batch["noise"], batch["timesteps"]
    noisy = scheduler.add_noise(latents, noise, times)
    if scheduler.config.prediction_type == "epsilon":
        return noisy, noise
    return noisy, scheduler.get_velocity(latents, noise, times)


def flowing(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents and the target, as in train_dreambooth_lora_flux.py."""
    latents, noise = batch["latents"], batch["noise"]
    sigmas = (batch["timesteps"] / 1000).reshape(-1, *[1] * (latents.dim() - 1))
    return (1.0 - sigmas) * latents + sigmas * noise, noise - latents


def as_scripts_do(name: str, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a batch."""
    kind = SMALL[name][2]["_class_name"]
    if kind == "DDPMScheduler":
        config = {key: value for key, value in SMALL[name][2].items() if key != "_class_name"}
        noisy, target = added_by(diffusers.DDPMScheduler(**config), batch)
    else:
        noisy, target = flowing(batch)
    times, text = batch["timesteps"], batch["encoder_hidden_states"]
    predicted: Any
    if name == "sd":
        predicted = model(noisy, times, text).sample
    elif name == "sdxl":
        added = {"text_embeds": batch["pooled_projections"], "time_ids": batch["time_ids"]}
        predicted = model(noisy, times, text, added_cond_kwargs=added).sample
    elif name == "sd3":
        pooled = batch["pooled_projections"]
        predicted = model(noisy, text, pooled_projections=pooled, timestep=times).sample
    elif name == "wan":
        predicted = model(noisy, times, text).sample
    else:
        predicted = of_packed(name, model, batch, noisy)
    return torch.nn.functional.mse_loss(predicted.float(), target.float(), reduction="mean")


def of_packed(
    name: str, model: nn.Module, batch: dict[str, Any], noisy: torch.Tensor
) -> torch.Tensor:
    """The prediction of Flux or Qwen-Image, by their pipelines' own packing."""
    samples, channels, rows, columns = noisy.shape
    times, text = batch["timesteps"] / 1000, batch["encoder_hidden_states"]
    if name == "flux":
        pipeline = diffusers.FluxPipeline
        ids = pipeline._prepare_latent_image_ids(
            samples, rows // 2, columns // 2, "cpu", torch.float32
        )
        predicted = model(
            hidden_states=pipeline._pack_latents(noisy, samples, channels, rows, columns),
            timestep=times,
            guidance=torch.full([samples], 1.0),
            pooled_projections=batch["pooled_projections"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=ids,
        ).sample
        return pipeline._unpack_latents(predicted, rows * 8, columns * 8, 8)
    pipeline = diffusers.QwenImagePipeline
    predicted = model(
        hidden_states=pipeline._pack_latents(noisy, samples, channels, rows, columns),
        timestep=times,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=torch.ones(text.shape[:2], dtype=torch.bool),
        img_shapes=[[(1, rows // 2, columns // 2)]] * samples,
    ).sample
    return pipeline._unpack_latents(predicted, rows * 8, columns * 8, 8)[:, :, 0]


@pytest.mark.parametrize("name", SMALL)
def test_loss_and_gradients_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    workload = diffusion_workload(read_pipeline(write_pipeline(tmp_path / name, name)), SIZES)
    setup = build(workload, {"micro_batch_size": 2}, CPU)
    batch = workload.batch(4)
    loss = accumulate(setup, batch)
    found = {name: weight.grad for name, weight in setup.model.named_parameters()}

    setup.model.zero_grad()
    expected = as_scripts_do(name, setup.model, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    for weight, parameter in setup.model.named_parameters():
        if parameter.grad is None:  # of a last block's text, which Qwen-Image does not use
            assert found[weight] is None and ".3." in weight
        else:
            torch.testing.assert_close(found[weight], parameter.grad, **CLOSE)
    setup.close()


def test_the_loss_of_a_living_pipeline_is_read_from_its_scheduler() -> None:
    model = getattr(diffusers, SMALL["sd"][1]["_class_name"])
    scheduler = diffusers.DDPMScheduler(beta_schedule="linear", prediction_type="v_prediction")
    loss = Diffusion.of(model(**without_class(SMALL["sd"][1])), scheduler)
    assert loss == Diffusion("UNet2DConditionModel", "v_prediction", 0.0001, 0.02, "linear")
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    assert Diffusion.of(model(**without_class(SMALL["sd"][1])), flow).prediction == "flow"


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_schedules_add_the_noise_that_diffusers_adds(schedule: str) -> None:
    config = without_class(EPSILON) | {"beta_schedule": schedule}
    scheduler = diffusers.DDPMScheduler(**config)
    latents, noise = torch.randn(2, 5, 4, 3, 3).unbind()
    times = torch.tensor([0, 17, 500, 998, 999])
    kept, added = Diffusion(beta_schedule=schedule).shares(times, latents)
    expected = scheduler.add_noise(latents, noise, times)
    torch.testing.assert_close(kept * latents + added * noise, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"denoiser": "UNet"}, "unknown denoiser 'UNet'"),
        ({"prediction": "score"}, "prediction must be one of"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule must be one of"),
        ({"beta_start": 0.5, "beta_end": 0.1}, "beta_start and beta_end must rise"),
        ({"train_steps": 0}, "train_steps must be a positive whole number"),
    ],
)
def test_options_that_it_does_not_take(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Diffusion(**options)


def without_class(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a class."""
    return {key: value for key, value in config.items() if key != "_class_name"}
