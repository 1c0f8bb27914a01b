"""Sample pictures of a denoiser, by diffusers' own pipelines.

They need no more of the device than training does: the text encoders are asked once, before it, the
pipeline makes latents by the denoiser alone, and the VAE decodes them on the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError, is_whole, require
from autofit.models.diffusion.denoisers import unpack
from autofit.models.diffusion.encode import CLIP_TOKENS, ENCODED, load_encoders
from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.pipeline import DiffusersModel, diffusers_class, downscale
from autofit.models.losses.diffusion import Diffusion

if TYPE_CHECKING:
    import torch
    from PIL import Image

STEPS = 20  # of denoising

_SEED = 0  # of the noise that each picture begins with
_UNET, _SD3, _FLUX = ENCODED
_PIPELINES = {
    _UNET: "StableDiffusionPipeline",
    _SD3: "StableDiffusion3Pipeline",
    _FLUX: "FluxPipeline",
}
_SDXL = "StableDiffusionXLPipeline"
# What `encode_prompt` returns, by the names of the pipeline's arguments; of some the first two.
_EMBEDDINGS = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
)

Embeddings = Mapping[str, "torch.Tensor"]  # [prompts, ...] by the names of a pipeline's arguments


def check_samples(
    every: object,
    prompts: object,
    *,
    output: Path | None,
    weights: str | Path | None,
) -> None:
    """Raise an InputError for options of sample pictures that are wrong, or lack what they need.

    Args:
        every: steps between two sets; None: no pictures are wanted.
        prompts: what they are to show.
    """
    fine = False
    if isinstance(prompts, Sequence) and not isinstance(prompts, str):
        fine = all(isinstance(prompt, str) for prompt in prompts)
    remedy = "For example sample_prompts=['a photo of a dog']."
    require(fine, "sample_prompts must be a list of texts", prompts, remedy)
    if every is None:
        if prompts:
            message = "there are prompts for sample pictures, and none are to be made."
            raise InputError(message, "Say after how many steps: --sample-every 100.")
        return

    rule = "sample_every must be a positive number of steps"
    require(is_whole(every, 1), rule, every, "For example 100.")
    if output is None:
        raise InputError("sample pictures have nowhere to be written to.", "Give --output DIR.")
    if weights is None:
        message = "sample pictures need a VAE and text encoders, and no weights are given."
        raise InputError(message, "Give --weights DIR.")


def check_sampled(model: DiffusersModel, loss: Diffusion) -> None:
    """Raise an InputError for a denoiser that is not asked for pictures here."""
    if model.text_encoders:  # prompts are encoded once, before training
        message = "no sample pictures are made while text encoders are trained."
        raise InputError(message, "Leave --sample-every out.")

    is_known = model.kind in ENCODED
    flows = loss.prediction == "flow"
    if is_known and flows != (model.kind == _UNET):
        return

    what = model.kind
    if is_known:
        what += f" that predicts {loss.prediction}"
    raise InputError(f"no sample pictures are made of {what}.", "Leave --sample-every out.")


def embed(
    model: DiffusersModel,
    weights: str | Path,
    prompts: Sequence[str],
    tokens: int,
) -> dict[str, torch.Tensor]:
    """What the text encoders say of prompts, in fp32 on the host; beside it, where the pipeline
    guides by it, what they say of none.

    Args:
        tokens: of a prompt, as training has them.

    Raises:
        InputError: the weights are no whole pipeline.
    """
    import torch

    pipeline = load_encoders(model, weights, vae=None)
    asked: dict[str, Any] = {"prompt": list(prompts), "device": pipeline.device}
    asked["num_images_per_prompt"] = 1
    if model.kind == _SD3:
        asked |= {"prompt_2": None, "prompt_3": None, "max_sequence_length": tokens - CLIP_TOKENS}
    if model.kind == _FLUX:
        asked |= {"prompt_2": None, "max_sequence_length": tokens}
    else:
        asked["do_classifier_free_guidance"] = True

    with torch.no_grad():
        found = pipeline.encode_prompt(**asked)
    named = dict(zip(_EMBEDDINGS, found, strict=False))
    if model.kind == _FLUX:
        named = {"prompt_embeds": found[0], "pooled_prompt_embeds": found[1]}
    return {name: tensor.float().cpu().contiguous() for name, tensor in named.items()}


def sample(
    model: DiffusersModel,
    loss: Diffusion,
    sizes: RandomLatents,
    embeddings: Embeddings,
    denoiser: Any,
) -> list[torch.Tensor]:
    """The latents of a picture for each prompt, on the host: [1, channels, rows, columns].

    They begin with the same noise each time.

    Args:
        denoiser: what the pipeline asks, on its `device`.
    """
    import torch

    pipeline = _pipeline(model, loss, embeddings, denoiser)
    made = []
    for number in range(len(embeddings["prompt_embeds"])):
        prompt = {}
        for name, tensor in embeddings.items():
            prompt[name] = tensor[number : number + 1].to(denoiser.device)

        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        latents = pipeline(
            **prompt,
            width=sizes.width,
            height=sizes.height,
            num_inference_steps=STEPS,
            generator=generator,
            output_type="latent",
        ).images
        if model.kind == _FLUX:  # which packs them
            latents = unpack(latents, latents.new_empty(1, *sizes.shape))
        made.append(latents.cpu())
    return made


def _pipeline(
    model: DiffusersModel,
    loss: Diffusion,
    embeddings: Embeddings,
    denoiser: Any,
) -> Any:
    """A pipeline of a denoiser and a scheduler alone."""
    name = _PIPELINES[model.kind]
    if model.kind == _UNET and "pooled_prompt_embeds" in embeddings:
        name = _SDXL
    made_by = diffusers_class(name)

    parts: dict[str, Any] = {}
    for part, parameter in inspect.signature(made_by.__init__).parameters.items():
        if part == "requires_safety_checker":
            parts[part] = False
        elif parameter.default is parameter.empty and part != "self":
            parts[part] = None
    parts["scheduler"] = _scheduler(model, loss)
    parts[model.folder] = denoiser

    pipeline = made_by(**parts)
    pipeline.vae_scale_factor = downscale(model)  # which it would read of the VAE
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _scheduler(model: DiffusersModel, loss: Diffusion) -> Any:
    """The scheduler that goes back the way on which the loss adds noise: of a UNet that of
    diffusers' DreamBooth scripts, which needs few steps."""
    if loss.prediction == "flow":
        flow = diffusers_class("FlowMatchEulerDiscreteScheduler")
        return flow.from_config(dict(model.scheduler))

    return diffusers_class("DPMSolverMultistepScheduler")(
        num_train_timesteps=loss.train_steps,
        beta_start=loss.beta_start,
        beta_end=loss.beta_end,
        beta_schedule=loss.beta_schedule,
        prediction_type=loss.prediction,
        steps_offset=1,  # as pipelines want it
    )


def decode(weights: str | Path, latents: Sequence[torch.Tensor]) -> list[Image.Image]:
    """The pictures that latents stand for, by the VAE, which is loaded to the host and let go."""
    import torch
    from diffusers.image_processor import VaeImageProcessor

    vae = diffusers_class("AutoencoderKL").from_pretrained(
        weights, subfolder="vae", dtype=torch.float32
    )
    shift = vae.config.shift_factor or 0.0
    pictures: list[Image.Image] = []
    for scaled in latents:
        with torch.no_grad():
            pixels = vae.decode(scaled.float() / vae.config.scaling_factor + shift).sample
        pictures += VaeImageProcessor().postprocess(pixels, output_type="pil")
    return pictures
