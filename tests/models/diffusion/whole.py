"""Small pipelines with all their parts and random weights, as `save_pretrained` writes them."""

import string
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tests.models.diffusion.small import SMALL, TOKENS, clip_config


def clip_tokenizer() -> Any:
    """One whose tokens are letters."""
    marks = ["<|startoftext|>", "<|endoftext|>"]
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    vocab = {token: number for number, token in enumerate((*marks, *letters))}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """One whose tokens are letters."""
    vocab = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>", "\u2581")]
    vocab += [(letter, -1.0) for letter in string.ascii_lowercase]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0)


def clip(width: int, projected: int = 0) -> Any:
    """A text encoder; of some pipelines with a projection of the whole text."""
    given = {**clip_config(width, projected), "torch_dtype": "float32"}
    config = transformers.CLIPTextConfig.from_dict(given)
    made = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return made(config).eval()


def t5(width: int) -> Any:
    """The other text encoder of newer pipelines."""
    config = transformers.T5Config(
        vocab_size=TOKENS, d_model=width, d_ff=32, d_kv=8, num_layers=1, num_heads=2
    )
    return transformers.T5EncoderModel(config).eval()


def write_whole(folder: Path, name: str) -> Path:
    """The directory of a whole pipeline: sd, sdxl, sd3 or flux."""
    torch.manual_seed(0)
    place, config, scheduling = SMALL[name]
    given = {key: value for key, value in config.items() if key != "_class_name"}
    schedule = {key: value for key, value in scheduling.items() if key != "_class_name"}
    if name in ("sd", "sdxl"):
        schedule |= {"steps_offset": 1, "clip_sample": False}  # as pipelines want them
    parts: dict[str, Any] = {
        place: getattr(diffusers, config["_class_name"])(**given),
        "scheduler": getattr(diffusers, scheduling["_class_name"])(**schedule),
        "vae": diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[8] * 4,
            norm_num_groups=8,
            latent_channels=16 if name in ("sd3", "flux") else 4,
            shift_factor=0.1 if name in ("sd3", "flux") else None,
        ),
        "tokenizer": clip_tokenizer(),
    }
    if name == "sd":
        more = {"text_encoder": clip(32), "safety_checker": None, "feature_extractor": None}
        made = diffusers.StableDiffusionPipeline(**parts, **more, requires_safety_checker=False)
    elif name == "sdxl":
        more = {"text_encoder": clip(16), "text_encoder_2": clip(16, 32)}
        made = diffusers.StableDiffusionXLPipeline(
            **parts, **more, tokenizer_2=clip_tokenizer(), add_watermarker=False
        )
    elif name == "sd3":
        more = {"text_encoder": clip(16, 16), "text_encoder_2": clip(24, 24)}
        more |= {"text_encoder_3": t5(48), "tokenizer_2": clip_tokenizer()}
        made = diffusers.StableDiffusion3Pipeline(**parts, **more, tokenizer_3=t5_tokenizer())
    else:
        more = {"text_encoder": clip(40), "text_encoder_2": t5(48)}
        made = diffusers.FluxPipeline(**parts, **more, tokenizer_2=t5_tokenizer())
    made.save_pretrained(folder)
    return folder
