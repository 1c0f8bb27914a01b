"""Pictures and captions to latents and embeddings, by the VAE and the text encoders of a pipeline.

They are loaded, used once, and let go: the training that follows holds none of them. Where text
encoders are trained, captions become tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError
from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.pipeline import DiffusersModel, diffusers_class
from autofit.models.diffusion.text_encoders import PROMPTS, TOKENIZERS

if TYPE_CHECKING:
    import torch
    from PIL import Image

# Pipelines whose encoders are asked here, by the class of the denoiser.
ENCODED = ("UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel")

Captioned = tuple[Path, str]  # a picture and its caption
Bucket = tuple[RandomLatents, Sequence[Captioned]]  # pictures of one size

CLIP_TOKENS = 77  # of SD3's prompts; the others are T5's

_AT_ONCE = 4  # pictures or captions
_SEED = 0  # of what is drawn from the VAE's distribution


def check_encoded(model: DiffusersModel) -> None:
    """Raise an InputError for a pipeline whose encoders are not asked here."""
    if model.kind not in ENCODED:
        message = f"pictures are not encoded for {model.kind}."
        raise InputError(message, "Give --data a .safetensors file of latents and embeddings.")


def encode(
    model: DiffusersModel,
    weights: str | Path,
    buckets: Sequence[Bucket],
) -> list[dict[str, torch.Tensor]]:
    """The latents and the conditions of pictures with captions by bucket, on the host: numbers in
    fp32, and tokens.

    Each picture fills the width and height of its bucket: it is scaled, and what is too much on two
    sides is cut off. Runs on CUDA in 16 bits where there is a card.

    Raises:
        InputError: the weights are no whole pipeline, or a picture cannot be read.
    """
    import torch

    check_encoded(model)
    pipeline = load_encoders(model, weights)
    device = pipeline.device
    with torch.no_grad():
        return [_encoded(model, pipeline, pictures, sizes, device) for sizes, pictures in buckets]


def load_encoders(model: DiffusersModel, weights: str | Path, **left_out: None) -> Any:
    """A pipeline without its denoiser, on CUDA in 16 bits where there is a card.

    Args:
        left_out: other parts that are not needed, such as `vae=None`.

    Raises:
        InputError: the weights are no whole pipeline.
    """
    import torch

    diffusion_pipeline = diffusers_class("DiffusionPipeline")
    on_card = torch.cuda.is_available()
    try:
        return diffusion_pipeline.from_pretrained(
            weights,
            dtype=torch.bfloat16 if on_card else torch.float32,
            **dict.fromkeys((model.folder, *model.text_encoders)),
            **left_out,
        ).to("cuda" if on_card else "cpu")
    except (OSError, ValueError) as error:
        message = f"the VAE and the text encoders in {weights} cannot be loaded: {error}"
        raise InputError(
            message, "Give a directory that save_pretrained of a pipeline wrote."
        ) from (error)


def _encoded(
    model: DiffusersModel,
    pipeline: Any,
    pictures: Sequence[Captioned],
    sizes: RandomLatents,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The latents and the conditions of pictures of one size."""
    import torch

    tokens = sizes.prompt_tokens
    parts: list[dict[str, torch.Tensor]] = []
    for some in _in_parts(pictures):
        captions = [caption for _, caption in some]
        if model.text_encoders:
            part = _tokens(model, pipeline, captions, tokens)
        else:
            part = _prompts(model.kind, pipeline, captions, tokens, device)
            part = {name: tensor.float().cpu() for name, tensor in part.items()}

        latents = _latents(pipeline.vae, [file for file, _ in some], sizes, len(parts))
        part["latents"] = latents.float().cpu()
        parts.append(part)

    whole = {}
    for name in parts[0]:
        whole[name] = torch.cat([part[name] for part in parts]).contiguous()
    return whole


def _in_parts(pictures: Sequence[Captioned]) -> Iterator[Sequence[Captioned]]:
    """Few of them at a time."""
    for first in range(0, len(pictures), _AT_ONCE):
        yield pictures[first : first + _AT_ONCE]


def _prompts(
    kind: str, pipeline: Any, captions: list[str], tokens: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """What the text encoders say of captions."""
    alone = {"device": device, "num_images_per_prompt": 1}
    if kind == "FluxTransformer2DModel":
        embeddings, pooled, _ = pipeline.encode_prompt(
            prompt=captions, prompt_2=None, max_sequence_length=tokens, **alone
        )
        return {"encoder_hidden_states": embeddings, "pooled_projections": pooled}

    alone["do_classifier_free_guidance"] = False
    if kind == "SD3Transformer2DModel":
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            prompt=captions,
            prompt_2=None,
            prompt_3=None,
            max_sequence_length=tokens - CLIP_TOKENS,
            **alone,
        )
        return {"encoder_hidden_states": embeddings, "pooled_projections": pooled}

    found = pipeline.encode_prompt(prompt=captions, **alone)
    named = {"encoder_hidden_states": found[0]}
    if len(found) > 2:  # of SDXL
        named["pooled_projections"] = found[2]
    return named


def _tokens(
    model: DiffusersModel, pipeline: Any, captions: list[str], tokens: int
) -> dict[str, torch.Tensor]:
    """Captions as their text encoders read them: cut or filled up to so many tokens."""
    found = {}
    for folder in model.text_encoders:
        tokenizer = getattr(pipeline, TOKENIZERS[folder])
        read = tokenizer(
            captions,
            padding="max_length",
            max_length=tokens,
            truncation=True,
            return_tensors="pt",
        )
        found[PROMPTS[folder]] = read.input_ids
    return found


def _latents(vae: Any, files: list[Path], sizes: RandomLatents, number: int) -> torch.Tensor:
    """The latents of pictures, scaled as the denoiser takes them."""
    import torch

    pixels = torch.stack([_pixels(file, sizes.width, sizes.height) for file in files])
    generator = torch.Generator(device="cpu").manual_seed(_SEED + number)
    found = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    drawn = torch.randn(found.mean.shape, generator=generator, device="cpu")
    latents = found.mean + found.std * drawn.to(found.mean)
    scaled: torch.Tensor = (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
    return scaled


def picture_size(file: Path) -> tuple[int, int]:
    """Width and height of a picture in pixels, upright. Raises InputError: it cannot be read."""
    from PIL import ImageOps

    with _opened(file) as picture:
        size: tuple[int, int] = ImageOps.exif_transpose(picture).size
    return size


def _pixels(file: Path, width: int, height: int) -> torch.Tensor:
    """A picture as numbers from -1 to 1, [3, height, width]."""
    import numpy as np
    import torch
    from PIL import Image, ImageOps

    with _opened(file) as picture:
        upright = ImageOps.exif_transpose(picture).convert("RGB")
        fitted = ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS)
    values = torch.from_numpy(np.asarray(fitted, dtype=np.float32))
    return values.permute(2, 0, 1) / 127.5 - 1


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    """A picture while it is read; raises InputError where that fails."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            yield picture
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        message = f"the picture {file} cannot be read: {error}."
        raise InputError(message, "Correct it, or take it out.") from error
