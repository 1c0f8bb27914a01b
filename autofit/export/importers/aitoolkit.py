"""Files of ai-toolkit: the YAML of a job with one process that trains an adapter."""

from collections.abc import Iterator
from typing import Any

from autofit.core.errors import is_whole
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.export.importers.division import Division
from autofit.export.importers.importer import Importer, Keys, refused_key
from autofit.export.importers.pictures import (
    PicturesOfFile,
    encoders_stay,
    largest_resolution,
    offloaded_blocks,
)
from autofit.export.pictures import FLUX, SD_15, SD_35, SDXL, WAN
from autofit.export.tools.aitoolkit import ARCHITECTURES, MODEL, NETWORK, PROCESS, TOOL, TRAIN

_DATASETS = f"{PROCESS}.datasets"
_DEFAULTS: dict[str, Any] = {
    f"{TRAIN}.batch_size": 1,
    f"{TRAIN}.gradient_accumulation": 1,
    f"{TRAIN}.gradient_checkpointing": True,
    f"{TRAIN}.optimizer": "adamw",
    f"{TRAIN}.dtype": "fp32",
    f"{TRAIN}.attention_backend": "native",
    f"{MODEL}.quantize": False,
    f"{MODEL}.qtype": "int8",
    f"{MODEL}.layer_offloading": False,
    f"{MODEL}.layer_offloading_transformer_percent": 1.0,
    f"{MODEL}.compile": False,
    f"{MODEL}.block_compile": False,
    f"{NETWORK}.type": "lora",
    f"{NETWORK}.linear": 4,
}
# How older files say the family of a model.
_FLAGS = {"is_flux": FLUX, "is_xl": SDXL, "is_v3": SD_35}
_ARCHITECTURE = {name: family for family, name in ARCHITECTURES.items()} | {
    "sd15": SD_15,
    "sd1.5": SD_15,
}
# Whole numbers and floats of 8 bits, which are as large.
_EIGHT_BITS = ("qfloat8", "float8", "qint8", "int8")
_OPTIMIZERS = {"adam": "adamw", "adam8bit": "adamw8bit", "adamw8": "adamw8bit"}
_ENCODERS = f"{TRAIN}.train_text_encoder"
_UNETS = (SD_15, SDXL)
_REFUSED = {
    f"{MODEL}.assistant_lora_path": "a model with a second adapter is not known",
    f"{MODEL}.lora_path": "a model with a second adapter is not known",
    f"{MODEL}.split_model_over_gpus": "several devices are not tuned",
    f"{NETWORK}.conv": "adapters beside convolutions are not known",
    f"{NETWORK}.network_kwargs.only_if_contains": "adapters beside some layers are not known",
    f"{NETWORK}.network_kwargs.ignore_if_contains": "adapters beside some layers are not known",
}


def _family(keys: Keys) -> str | None:
    """By the architecture, or by a flag as older files have it."""
    architecture = keys.get(f"{MODEL}.arch")
    if architecture is not None:
        return _ARCHITECTURE.get(str(architecture).partition(":")[0])
    return next(
        (family for flag, family in _FLAGS.items() if keys.get(f"{MODEL}.{flag}")),
        None,
    )


def _of_datasets(keys: Keys, name: str) -> Iterator[Any]:
    """What the datasets say by a key."""
    for key, value in keys.items():
        if key.startswith(f"{_DATASETS}.") and key.rpartition(".")[2] == name:
            yield value


def _pictures(keys: Keys) -> PicturesOfFile:
    """The family, the largest pictures and the longest videos; 512 where no size is said."""
    sizes = []
    for found in _of_datasets(keys, "resolution"):
        sizes += found if isinstance(found, list) else [found]

    family = _family(keys)
    frames = None
    if family == WAN:
        said = [found for found in _of_datasets(keys, "num_frames") if is_whole(found, 1)]
        frames = max(said, default=1)

    resolution = largest_resolution(sizes or [512], f"{_DATASETS}.resolution")
    trained = bool(keys.get(_ENCODERS))
    return PicturesOfFile(family, resolution, frames=frames, trains_text_encoders=trained)


def _refuse(keys: Keys) -> str | None:
    """Why a file cannot be tuned, as a sentence; or None."""
    if f"{PROCESS}.type" not in keys:
        return "it has no process."
    several = keys.get("config.process.1.type")
    if several is not None:
        return "it has several processes."
    if reason := refused_key(keys, _REFUSED):
        return reason
    if keys.get(_ENCODERS) and _family(keys) not in (*_UNETS, None):
        return f"{_ENCODERS}: text encoders of this model that are trained are not known."
    if keys.get(_ENCODERS) and _caches_texts(keys):
        return f"{_ENCODERS} beside text embeddings that are cached trains nothing."
    if not any(key.startswith(f"{TRAIN}.") for key in keys):
        return "its process has no section train."

    kind = keys.get(f"{NETWORK}.type")
    if kind is None:
        return "it trains no adapters, and trainings of all weights are not tuned."
    if kind != "lora":
        return f"network.type: {kind} is not known."

    architecture = keys.get(f"{MODEL}.arch")
    if architecture is not None and _family(keys) is None:
        return f"model.arch: {architecture} is not known."
    return None


def _caches_texts(keys: Keys) -> bool:
    """Whether the text encoders leave the device before the training."""
    is_cached = any(_of_datasets(keys, "cache_text_embeddings"))
    return is_cached or bool(keys.get(f"{TRAIN}.unload_text_encoder"))


def _read(keys: Keys, _: Division) -> Keys:
    """The keys with the rank by the name that stands for the other one, too."""
    rank = keys.get(f"{NETWORK}.rank")
    return keys if rank is None else {**keys, f"{NETWORK}.linear": rank}


def _meaning(key: str, value: Any) -> Any:
    """What a value is called by the exporter."""
    name = key.rpartition(".")[2]
    if name == "qtype":
        kind = str(value).partition("|")[0]
        return "int8" if kind in _EIGHT_BITS else kind
    if name == "optimizer":
        return _OPTIMIZERS.get(str(value).lower(), str(value).lower())
    if key == f"{TRAIN}.dtype":
        return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(value), value)
    return value


def _notes(keys: Keys) -> list[str]:
    """On what is predicted otherwise than the file says."""
    notes = []
    if not _caches_texts(keys) and not keys.get(_ENCODERS):
        remedy = "train.cache_text_embeddings and that of every dataset take them away."
        notes.append(encoders_stay(_family(keys), remedy))

    cached = ("cache_latents", "cache_latents_to_disk")
    if not any(value for name in cached for value in _of_datasets(keys, name)):
        notes.append(
            "the VAE stays on the device and is not counted; cache_latents_to_disk ends it."
        )
    if keys.get(f"{MODEL}.quantize") and "float8" in str(keys.get(f"{MODEL}.qtype", "qfloat8")):
        notes.append("weights in 8-bit floats are predicted as those in int8, which are as large.")
    return notes


IMPORTER = Importer(
    tool=TOOL,
    marks=(f"{PROCESS}.type", "config.process"),
    model=f"{MODEL}.name_or_path",
    task=lambda keys: DIFFUSION.name,
    pictures=_pictures,
    refuse=_refuse,
    notes=_notes,
    choices=offloaded_blocks,
    older={f"{TRAIN}.gradient_accumulation": f"{TRAIN}.gradient_accumulation_steps"},
    read=_read,
    defaults=_DEFAULTS,
    meaning=_meaning,
)
