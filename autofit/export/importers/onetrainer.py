"""Files of OneTrainer: the JSON of `scripts/train.py` that trains an adapter."""

import re
from typing import Any

from autofit.core.tasks.diffusion import DIFFUSION
from autofit.export.importers.division import Division
from autofit.export.importers.importer import Importer, Keys, refused_key
from autofit.export.importers.pictures import (
    PicturesOfFile,
    encoders_stay,
    largest_resolution,
    offloaded_blocks,
)
from autofit.export.pictures import SD_15, SDXL
from autofit.export.tools.onetrainer import MODELS, TEXT_ENCODERS, TOOL, UNETS

_PARTS = ("unet", "transformer", *TEXT_ENCODERS)
_OF_PART: dict[str, Any] = {
    "gradient_checkpointing": True,
    "offload_fraction": 0.0,
    "activation_offloading": False,
    "weight_dtype": "FLOAT_32",
}
_DEFAULTS: dict[str, Any] = {
    **{f"{part}.{key}": value for part in _PARTS for key, value in _OF_PART.items()},
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "train_dtype": "FLOAT_16",
    "lora_weight_dtype": "FLOAT_32",
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "peft_type": "LORA",
    "dropout_probability": 0.0,
    "lora_decompose": False,
    "attention_mechanism": "SDP",
    "compile": False,
    "optimizer.optimizer": "ADAMW",
    "optimizer.fused": False,
    "optimizer.foreach": False,
    "optimizer.is_paged": False,
    "optimizer.stochastic_rounding": True,
    "optimizer.fused_back_pass": False,
}
_FAMILY = {name: family for family, name in MODELS.items()}
_USUAL = "STABLE_DIFFUSION_15"
# Floats that frozen weights may be of; what they are beside a quantisation is another matter.
_FLOATS = ("FLOAT_32", "TFLOAT_32", "FLOAT_16", "BFLOAT_16")
_EIGHT_BITS = {"FLOAT_8": "INT_8", "FLOAT_W8A8": "INT_8", "INT_W8A8": "INT_8"}
_OLDER = ("gradient_checkpointing", "layer_offload_fraction", "lora_layers")
_REFUSED = {
    "multi_gpu": "several devices are not tuned",
    "optimizer.fused_back_pass": "updates in the backward are not tuned",
    "masked_training": "masks of pictures are not known",
    "custom_conditioning_image": "pictures beside those that are learnt are not known",
}


def _family(keys: Keys) -> str | None:
    return _FAMILY.get(str(keys.get("model_type", _USUAL)))


def _part(keys: Keys) -> str:
    """What the denoiser is called."""
    return "unet" if _family(keys) in UNETS else "transformer"


def _pictures(keys: Keys) -> PicturesOfFile:
    """The family, and the largest of the resolutions, between which commas stand."""
    sizes = [size for size in str(keys.get("resolution", "512")).split(",") if size.strip()]
    return PicturesOfFile(
        _family(keys),
        largest_resolution(sizes, "resolution"),
        trains_text_encoders=bool(_trained_encoders(keys)),
    )


def _trained_encoders(keys: Keys) -> list[str]:
    """The text encoders that get adapters, of those that the file says anything of."""
    told = [name for name in TEXT_ENCODERS if f"{name}.weight_dtype" in keys]
    return [name for name in told if keys.get(f"{name}.train", True)]


def _refuse_encoders(keys: Keys) -> str | None:
    """Why the text encoders cannot be trained as a file says it, as a sentence; or None."""
    found = _trained_encoders(keys)
    if not found:
        return None

    family = _family(keys)
    every = {SD_15: TEXT_ENCODERS[:1], SDXL: TEXT_ENCODERS[:2]}.get(str(family))
    if every is None:
        return f"{found[0]}.train: text encoders of this model that are trained are not known."
    if not set(every) <= set(found):
        return f"{found[0]}.train: of two text encoders one alone is trained, which is not known."

    key = "weight_dtype"
    of_unet = keys.get(f"{_part(keys)}.{key}", _OF_PART[key])
    for name in every:
        dtype = keys[f"{name}.{key}"]
        if dtype != of_unet:
            return f"{name}.{key}: {dtype} beside {of_unet} of the denoiser is not known."
    return None


def _refuse(keys: Keys) -> str | None:
    """Why a file cannot be tuned, as a sentence; or None."""
    method = keys.get("training_method", "FINE_TUNE")
    if method != "LORA":
        return f"training_method: {method} is not tuned; adapters (LORA) are."
    kind = keys.get("peft_type", "LORA")
    if kind != "LORA":
        return f"peft_type: {kind} is not known."
    if _family(keys) is None:
        return f"model_type: {keys.get('model_type')} is not known."
    if reason := refused_key(keys, _REFUSED):
        return reason

    for older in _OLDER:
        if older in keys:
            return f"{older} is of an older OneTrainer. Open the file there and save it again."
    if reason := _refuse_encoders(keys):
        return reason

    dtype = keys.get(f"{_part(keys)}.weight_dtype", "FLOAT_32")
    computed = keys.get("train_dtype", "FLOAT_16")
    alike = {dtype, computed} <= {"FLOAT_32", "TFLOAT_32"}
    if dtype in _FLOATS and dtype != computed and not alike:
        return f"frozen weights of {dtype} beside train_dtype: {computed} are not known."
    return None


def _pattern(keys: Keys) -> str | None:
    """What stands anywhere in the names of the layers that get adapters."""
    found = str(keys.get("layer_filter") or "")
    words = [word.strip() for word in found.split(",") if word.strip()]
    if not words:
        return None
    if not keys.get("layer_filter_regex"):
        words = list(map(re.escape, words))
    of_denoiser = f".*(?:{'|'.join(words)}).*"
    if not _trained_encoders(keys):
        return of_denoiser
    return rf"unet\.{of_denoiser}|text_encoder.*"  # which the words say nothing of


def _read(keys: Keys, _: Division) -> Keys:
    """The keys with what they come to: adapters in 32 bits are not rounded at random, and frozen
    weights that are not quantised are of the numbers that are computed in."""
    read = dict(keys)
    if keys.get("lora_weight_dtype", "FLOAT_32") == "FLOAT_32":
        read["optimizer.stochastic_rounding"] = False
    return read


def _meaning(key: str, value: Any) -> Any:
    """What a value is called by the exporter."""
    if not key.endswith(".weight_dtype"):
        return value
    if value in _FLOATS:
        return "FLOAT_32"  # as the exporter writes before it knows what is computed in
    return _EIGHT_BITS.get(str(value), value)


def _notes(keys: Keys) -> list[str]:
    """On what is predicted otherwise than the file says."""
    notes = []
    is_cached = keys.get("latent_caching", True)
    if not is_cached and not _trained_encoders(keys):
        remedy = "latent_caching: true takes them away, and the VAE."
        notes.append(encoders_stay(_family(keys), remedy))
    elif not is_cached:
        notes.append("the VAE stays on the device and is not counted; latent_caching ends it.")
    if keys.get(f"{_part(keys)}.weight_dtype") in ("FLOAT_8", "FLOAT_W8A8"):
        notes.append("weights in 8-bit floats are predicted as those in int8, which are as large.")
    if _part(keys) == "unet" and _pattern(keys) is None:
        notes.append("adapters beside convolutions are not counted.")
    return notes


IMPORTER = Importer(
    tool=TOOL,
    marks=("training_method", "base_model_name"),
    model="base_model_name",
    task=lambda keys: DIFFUSION.name,
    pictures=_pictures,
    refuse=_refuse,
    targets="layer_filter",
    pattern=_pattern,
    read=_read,
    notes=_notes,
    choices=offloaded_blocks,
    single=("resolution", "model_type"),
    defaults=_DEFAULTS,
    meaning=_meaning,
)
