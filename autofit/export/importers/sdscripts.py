"""Files and commands of kohya's sd-scripts that train adapters. The keys of a TOML are the names of
the options; which script it is for, it does not say."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, sentence
from autofit.core.files import expanded, read_text
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.export.importers.command_line import COMMAND, LAUNCHER
from autofit.export.importers.division import Division
from autofit.export.importers.importer import Importer, Keys, refused_key
from autofit.export.importers.pictures import (
    PicturesOfFile,
    encoders_stay,
    family_named,
    largest_resolution,
    offloaded_blocks,
    whole,
)
from autofit.export.pictures import FLUX, SD_15, SD_35, SDXL
from autofit.export.tools.sdscripts import NETWORKS, OPTIMIZERS, SCRIPTS, TOOL

_MODEL = "pretrained_model_name_or_path"
_DATASETS = "dataset_config"  # the option that names a file of them
_ARGUMENTS = "optimizer_args"
_NETWORK = "network_module"
_DEFAULTS: dict[str, Any] = {
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "network_dim": 4,
    "network_alpha": 1,
    "mixed_precision": "no",
    "full_bf16": False,
    "fp8_base": False,
    "gradient_checkpointing": False,
    "blocks_to_swap": 0,
    "cpu_offload_checkpointing": False,
    "optimizer_type": "AdamW",
    _ARGUMENTS: [],
    "torch_compile": False,
    _NETWORK: "networks.lora",
}
_REFUSED = {
    "full_fp16": "weights and their updates in float16 are not known",
    "network_weights": "adapters that are trained further have a rank that it does not say",
    "dim_from_weights": "adapters that are trained further have a rank that it does not say",
    "deepspeed": "several devices are not tuned",
    "fused_backward_pass": "updates in the backward are not tuned",
    "v2": "Stable Diffusion 2 is not known",
    "network_train_text_encoder_only": "text encoders that are trained alone are not known",
}
_OTHER_MODELS = {"chroma": "Chroma"}
# Of a network's arguments, those that neither add nor leave out adapters.
_PLAIN = ("loraplus_", "rank_dropout", "module_dropout", "dropout", "verbose")
# Of an optimizer's arguments, those that choose its implementation.
_IMPLEMENTATION = ("fused=", "foreach=", "bf16_stochastic_round=")
_OFFICIAL = {name.lower(): name for name, _ in OPTIMIZERS.values()}
_ALONE = "network_train_unet_only"  # text encoders get no adapters
_CACHED = "cache_text_encoder_outputs"
_CACHED_TOO = (_CACHED, "cache_text_encoder_outputs_to_disk")
# Gradients of 49,408 tokens of 768 numbers, of SDXL also of as many of 1,280. It asks them for no other
# end than to have some reach the layers that are checkpointed.
_EMBEDDINGS_GIB = {SD_15: 0.07, SDXL: 0.19}
_USUAL_PROMPT = 75  # tokens between the two that stand around each prompt


def _family(keys: Keys) -> str | None:
    """By the script, else by its kind of adapters, which SD 1.5 and SDXL share, and the model's
    name."""
    command = str(keys.get(COMMAND) or "").split()
    for family, script in SCRIPTS.items():
        if command and command[-1] == script:
            return family
    for family, network in NETWORKS.items():
        if keys.get(_NETWORK) == network:
            return family
    return family_named(str(keys.get(_MODEL)))


def _pictures(keys: Keys) -> PicturesOfFile:
    """The family and the sizes of pictures."""
    family = _family(keys)
    tokens = None
    if family in (FLUX, SD_35):
        tokens = whole(keys, "t5xxl_max_token_length")
    if tokens and family == SD_35:
        tokens += 77  # of CLIP, which stand in front of them

    found = keys.get("resolution")
    sizes = [] if found is None else [found]
    return PicturesOfFile(
        family,
        largest_resolution(sizes, "resolution"),
        prompt_tokens=tokens,
        trains_text_encoders=not keys.get(_ALONE),
    )


def _refuse(keys: Keys) -> str | None:
    """Why a file cannot be tuned, as a sentence; or None."""
    if elsewhere := keys.get("config_file"):
        return f"its options are in {elsewhere}. Tune that file."
    if "LoRA_type" in keys:
        return "it is of kohya's GUI. Tune the TOML that this writes where it trains."
    if keys.get(f"{LAUNCHER}multi_gpu") or keys.get(f"{LAUNCHER}num_processes", 1) != 1:
        return "several devices are not tuned."
    if reason := refused_key(keys, _REFUSED):
        return reason
    if not keys.get("network_dim") and _NETWORK not in keys:
        return "it trains no adapters, and trainings of all weights are not tuned."

    module = keys.get(_NETWORK, _DEFAULTS[_NETWORK])
    if module not in ("networks.lora", *NETWORKS.values()):
        return f"{_NETWORK}: {module} is not known."
    for argument in _arguments(keys, "network_args"):
        if not argument.startswith(_PLAIN):
            return f"network_args: {argument} is not known."
    if other := _OTHER_MODELS.get(str(keys.get("model_type"))):
        return f"{other} is not known."
    return None if keys.get(_ALONE) else _refuse_encoders(keys)


def _refuse_encoders(keys: Keys) -> str | None:
    """Why text encoders cannot be trained as a file says it, as a sentence; or None."""
    if _family(keys) in (FLUX, SD_35):
        return f"text encoders get adapters, too, which is not known. Add {_ALONE} = true."
    for key in _CACHED_TOO:
        if keys.get(key):
            return f"{key} goes with {_ALONE} = true alone, which it lacks."

    tokens = keys.get("max_token_length") or _USUAL_PROMPT
    if tokens != _USUAL_PROMPT:
        return f"max_token_length: {tokens} beside trained text encoders is not known."
    return None


def _arguments(keys: Keys, key: str) -> list[str]:
    """The words of an option that takes several."""
    found = keys.get(key) or []
    return list(map(str, found)) if isinstance(found, list) else [str(found)]


def _read(keys: Keys, _: Division) -> Keys:
    """The keys with the optimizer by the name that stands for older options, too."""
    read = dict(keys)
    if keys.get("use_8bit_adam"):
        read["optimizer_type"] = "AdamW8bit"
    return read


def _meaning(key: str, value: Any) -> Any:
    """What a value is called by the exporter: names in any letters; of an optimizer's arguments
    those that choose its implementation."""
    if key == "optimizer_type":
        return _OFFICIAL.get(str(value).lower(), value)
    if key == _ARGUMENTS:
        return [each for each in _arguments({key: value}, key) if each.startswith(_IMPLEMENTATION)]
    if key == "mixed_precision":
        return value or "no"
    return value


def _written(keys: Keys, changed: Keys, written: Keys) -> Keys:
    """The keys that change, with an optimizer's other arguments as they are."""
    if _ARGUMENTS not in changed:
        return changed
    others = [each for each in _arguments(keys, _ARGUMENTS) if not each.startswith(_IMPLEMENTATION)]
    return {**changed, _ARGUMENTS: [*others, *changed[_ARGUMENTS]]}


def _beside(keys: Keys, folder: Path) -> dict[str, Any]:
    """The sizes of a file of datasets, which is looked for beside this one.

    Raises:
        InputError: it is not there, or holds no TOML.
    """
    named = keys.get(_DATASETS)
    if not isinstance(named, str):
        return {}

    path = expanded(named, _DATASETS)
    try:
        path = next((each for each in (folder / path, path) if each.is_file()), path)
        tree = tomllib.loads(read_text(path))
    except FileNotFoundError as error:
        message = f"{_DATASETS} names {path}, which is not there."
        raise InputError(message, "Put it beside the file, or correct the name.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {sentence(error)}.", "Correct it.") from error

    general = (_tables(tree, "general") or [{}])[0]
    datasets = [{**general, **each} for each in _tables(tree, "datasets") or [{}]]
    found: dict[str, Any] = {}
    sizes = [each["resolution"] for each in datasets if "resolution" in each]
    if sizes:
        found["resolution"] = largest_resolution(sizes, "resolution")
    batches = [whole(each, "batch_size") for each in datasets]
    if any(batches):
        found["train_batch_size"] = max(filter(None, batches))
    return found


def _tables(tree: Keys, name: str) -> list[Keys]:
    """The tables of a name: one, or several in a list."""
    found = tree.get(name, [])
    several = found if isinstance(found, list) else [found]
    return [each for each in several if isinstance(each, dict)]


def _keeps(keys: Keys) -> Sequence[str]:
    """The batch of a file of datasets, which decides there."""
    return ("train_batch_size",) if _DATASETS in keys else ()


def _notes(keys: Keys) -> list[str]:
    """On what is predicted otherwise than the file says."""
    notes = []
    family = _family(keys)
    if keys.get(_ALONE) and not keys.get(_CACHED):
        remedy = ""
        if family in (FLUX, SD_35, SDXL):
            remedy = f"{_CACHED} = true takes them away."
        notes.append(encoders_stay(family, remedy).rstrip())
    if not keys.get(_ALONE):
        notes += _notes_on_encoders(keys)
    if not (keys.get("cache_latents") or keys.get("cache_latents_to_disk")):
        notes.append(
            "the VAE stays on the device and is not counted; cache_latents = true ends it."
        )
    if keys.get("fp8_base"):
        notes.append("weights in 8-bit floats are predicted as those in int8, which are as large.")
    return notes


def _notes_on_encoders(keys: Keys) -> list[str]:
    """On text encoders that are trained."""
    notes = []
    if keys.get("clip_skip"):
        notes.append("clip_skip is not followed: all layers of the text encoders are counted.")
    if keys.get("gradient_checkpointing"):
        sizes = _EMBEDDINGS_GIB.get(_family(keys) or "")
        size = f", {sizes} GiB in 16 bits," if sizes else ""
        notes.append(
            f"beside gradient_checkpointing gradients of the text encoders' embeddings{size} stay on "
            "the device and are not counted."
        )
    return notes


IMPORTER = Importer(
    tool=TOOL,
    marks=(_MODEL,),
    programs=tuple(("python", script) for script in SCRIPTS.values()),
    model=_MODEL,
    task=lambda keys: DIFFUSION.name,
    pictures=_pictures,
    refuse=_refuse,
    read=_read,
    beside=_beside,
    keeps=_keeps,
    notes=_notes,
    choices=offloaded_blocks,
    single=("resolution", _DATASETS),
    defaults=_DEFAULTS,
    meaning=_meaning,
    written=_written,
)
