"""Denoisers: how each class of diffusers is asked for a prediction, and what it is told besides
latents.

A new one is its line in DENOISERS, and what it is asked or told otherwise than those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.models.diffusion.text_encoders import FIRST, PROMPTS

if TYPE_CHECKING:
    import torch

TRAIN_STEPS = 1000  # into which schedulers divide the way from a picture to noise

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
Ask = Callable[[Any, "torch.Tensor", "torch.Tensor", Mapping[str, Any]], "torch.Tensor"]

_TIME_IDS = 6  # of SDXL: height and width as they were, of the crop, and as they are
# of transformers, as their arguments and batches call them
_CONDITIONS = (
    "encoder_hidden_states",
    "encoder_hidden_states_mask",
    "pooled_projections",
    "guidance",
)
_PATCH = 2  # latents on the side of a token, where a pipeline packs them


@dataclass(frozen=True)
class Denoiser:
    """What is particular to one class of denoisers.

    Attributes:
        ask: (model, noisy latents, timesteps from 0 to 1000, batch) -> the prediction, of the shape
            of the latents.
        conditions: (config, tokens of a prompt) -> the shapes that a sample's conditions have, by
            their names in a batch.
        channels: config -> the channels of latents.
        prompt_tokens: of a prompt, as its pipeline pads it.
        patch: latents on the side of a token: pictures have a whole number of tokens.
        has_frames: whether latents are of a video.
    """

    ask: Ask
    conditions: Callable[[Config, int], Shapes]
    channels: Callable[[Config], int]
    prompt_tokens: int
    patch: int
    has_frames: bool = False


def _ask_unet(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
) -> Any:
    if PROMPTS[FIRST] in batch:  # its text encoders are trained with it
        prompts = {name: batch[name] for name in (*PROMPTS.values(), "time_ids") if name in batch}
        return model(noisy, timesteps, **prompts)

    added = None
    if "time_ids" in batch:
        added = {"text_embeds": batch["pooled_projections"], "time_ids": batch["time_ids"]}
    return model(
        noisy,
        timesteps,
        batch["encoder_hidden_states"],
        added_cond_kwargs=added,
        return_dict=False,
    )[0]


def _unet_conditions(config: Config, tokens: int) -> Shapes:
    shapes: Shapes = {"encoder_hidden_states": (tokens, config["cross_attention_dim"])}
    if config.get("addition_embed_type") == "text_time":
        times = _TIME_IDS * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - times
        shapes |= {"pooled_projections": (pooled,), "time_ids": (_TIME_IDS,)}
    return shapes


def _ask_transformer(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
) -> Any:
    return model(
        hidden_states=noisy,
        timestep=timesteps,
        return_dict=False,
        **_given(batch),
    )[0]


def _ask_flux(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
) -> Any:
    import torch

    rows, columns = (side // _PATCH for side in noisy.shape[-2:])
    places = torch.zeros(rows, columns, 3, device=noisy.device, dtype=noisy.dtype)
    places[..., 1] += torch.arange(rows, device=noisy.device)[:, None]
    places[..., 2] += torch.arange(columns, device=noisy.device)[None]

    prompt_tokens = batch["encoder_hidden_states"].shape[1]
    of_tokens = {"txt_ids": places.new_zeros(prompt_tokens, 3), "img_ids": places.flatten(0, 1)}
    return _ask_packed(model, noisy, timesteps, batch, of_tokens)


def _ask_qwen(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
) -> Any:
    rows, columns = (side // _PATCH for side in noisy.shape[-2:])
    of_tokens = {"img_shapes": [[(1, rows, columns)]] * len(noisy)}
    return _ask_packed(model, noisy, timesteps, batch, of_tokens)


def _ask_packed(
    model: Any,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    batch: Mapping[str, Any],
    of_tokens: Mapping[str, Any],
) -> torch.Tensor:
    """Ask a model of packed latents, which is told where its tokens are."""
    predicted = model(
        hidden_states=pack(noisy),
        timestep=timesteps / TRAIN_STEPS,
        return_dict=False,
        **_given(batch),
        **of_tokens,
    )[0]
    return unpack(predicted, noisy)


def _given(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a batch, by the names of a transformer's arguments."""
    return {name: batch[name] for name in _CONDITIONS if name in batch}


def _transformer_conditions(config: Config, tokens: int) -> Shapes:
    width = config["text_dim" if "text_dim" in config else "joint_attention_dim"]
    shapes: Shapes = {"encoder_hidden_states": (tokens, width)}
    if "pooled_projection_dim" in config:
        shapes["pooled_projections"] = (config["pooled_projection_dim"],)
    if config.get("guidance_embeds"):
        shapes["guidance"] = ()
    return shapes


def _in_channels(config: Config) -> int:
    return int(config["in_channels"])


def _channels_of_packed(config: Config) -> int:
    return int(config["in_channels"]) // _PATCH**2


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[samples, channels, rows, columns] -> [samples, tokens, channels of a square of 2 by 2]."""
    samples, channels, height, width = latents.shape
    rows, columns = height // _PATCH, width // _PATCH
    squares = latents.view(samples, channels, rows, _PATCH, columns, _PATCH)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(samples, rows * columns, -1)


def unpack(tokens: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """What `pack` makes of latents of this shape, in their shape."""
    samples, channels, height, width = latents.shape
    rows, columns = height // _PATCH, width // _PATCH
    squares = tokens.view(samples, rows, columns, channels, _PATCH, _PATCH)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)


DENOISERS = {
    "UNet2DConditionModel": Denoiser(_ask_unet, _unet_conditions, _in_channels, 77, patch=1),
    # CLIP's tokens, and those of T5 as the pipeline pads them
    "SD3Transformer2DModel": Denoiser(
        _ask_transformer, _transformer_conditions, _in_channels, 77 + 256, patch=2
    ),
    "FluxTransformer2DModel": Denoiser(
        _ask_flux, _transformer_conditions, _channels_of_packed, 512, patch=_PATCH
    ),
    "QwenImageTransformer2DModel": Denoiser(
        _ask_qwen, _transformer_conditions, _channels_of_packed, 512, patch=_PATCH
    ),
    "WanTransformer3DModel": Denoiser(
        _ask_transformer, _transformer_conditions, _in_channels, 512, patch=2, has_frames=True
    ),
}
