"""ai-toolkit: the YAML of a job with one process, which trains an adapter."""

import math
from collections.abc import Mapping
from typing import Any

from autofit.core.learning_rates import default_learning_rate
from autofit.export import picture_keys as pictures
from autofit.export import shared_keys as shared
from autofit.export.pictures import FLUX, QWEN_IMAGE, SD_15, SD_35, SDXL, WAN
from autofit.export.source import ExportSource
from autofit.export.template import yaml_file
from autofit.export.tool import Header, Request, Tool, ToolKeys

TITLE = "ai-toolkit"
ARCHITECTURES = {
    SD_15: "sd1",
    SDXL: "sdxl",
    SD_35: "sd3",
    FLUX: "flux",
    QWEN_IMAGE: "qwen_image",
    WAN: "wan21",
}
_NOISES = (SD_15, SDXL)  # the others learn a flow
_STEPS = 1000  # which it must be told
PROCESS = "config.process.0"
TRAIN = f"{PROCESS}.train"
MODEL = f"{PROCESS}.model"
NETWORK = f"{PROCESS}.network"
_DATA = f"{PROCESS}.datasets.0"
_OPTIMIZERS = {
    "adamw": "adamw",
    "adamw-8bit": "adamw8bit",
    "lion-8bit": "lion8bit",
    "adafactor": "adafactor",
}
_INSIDE = "all linear layers inside of the blocks, and no others"


def _fixed(request: Request) -> Mapping[str, Any]:
    """The model, the data, and what is cached."""
    source = request.source
    found = pictures.facts(source)
    is_cached = not found.text_encoders
    keys = {
        "job": "extension",
        "config.name": "trained",
        f"{PROCESS}.type": "sd_trainer",
        f"{PROCESS}.training_folder": "trained",
        f"{PROCESS}.device": "cuda:0",
        f"{MODEL}.name_or_path": pictures.weights(source),
        f"{MODEL}.arch": ARCHITECTURES[str(found.family)],
        f"{_DATA}.folder_path": pictures.data(source),
        f"{_DATA}.caption_ext": pictures.CAPTIONS,
        f"{_DATA}.resolution": [math.isqrt(found.width * found.height)],
        f"{_DATA}.cache_latents_to_disk": True,
        f"{_DATA}.cache_text_embeddings": is_cached,
        f"{TRAIN}.cache_text_embeddings": is_cached,
        f"{TRAIN}.train_unet": True,
        f"{TRAIN}.train_text_encoder": not is_cached,
        f"{TRAIN}.disable_sampling": True,
        f"{TRAIN}.noise_scheduler": "ddpm" if found.family in _NOISES else "flowmatch",
        f"{TRAIN}.steps": _STEPS,
        f"{TRAIN}.lr": default_learning_rate(request.config),
    }
    if found.frames is not None:
        keys[f"{_DATA}.num_frames"] = found.frames
    return keys


def _precision(request: Request) -> ToolKeys:
    """The numbers of frozen weights; adapters are of 32 bits."""
    value = request.config.precision
    dtypes = {"fp32": "fp32", "tf32": "fp32", "fp16-mixed": "fp16"}
    dtype = dtypes.get(value, "bf16")
    keys = {f"{TRAIN}.dtype": dtype, f"{MODEL}.dtype": dtype}
    if value == "tf32":
        return request.keys("precision", keys, shared.TF32.format(TITLE))
    if value in ("bf16", "fp8"):
        instead = f"{TITLE} holds adapters, their gradients and their state in 32 bits"
        return request.keys("precision", keys, instead, may_not_fit=True)
    return ToolKeys(keys)


def _quantization(request: Request) -> ToolKeys:
    """Frozen weights in whole numbers of 8 or 4 bits."""
    value = request.config.quantization
    if value == "none":
        return ToolKeys({f"{MODEL}.quantize": False})

    keys = {f"{MODEL}.quantize": True, f"{MODEL}.qtype": "int8" if value == "int8" else "uint4"}
    instead = f"{TITLE} quantises by other code, to whole numbers of 4 bits"
    if value == "int8":
        instead = f"{TITLE} quantises by torchao"
    return request.keys("quantization", keys, instead, may_not_fit=value != "int8")


def _parameter_offload(request: Request) -> ToolKeys:
    """Weights of layers rest on the host."""
    keys: dict[str, Any] = {f"{MODEL}.layer_offloading": False}
    share = pictures.share_streamed(request)
    if share:
        keys = {
            f"{MODEL}.layer_offloading": True,
            f"{MODEL}.layer_offloading_transformer_percent": round(share, 4),
            f"{MODEL}.layer_offloading_text_encoder_percent": 0.0,
        }
        instead = f"{TITLE} streams layer by layer, without the next one under way"
        return request.keys("parameter_offload", keys, instead)
    return ToolKeys(keys)


def _optimizer(request: Request) -> ToolKeys:
    """The optimizer by its name; AdamW where it has none of it."""
    value = str(request.config.optimizer)
    key = f"{TRAIN}.optimizer"
    if value in _OPTIMIZERS:
        return ToolKeys({key: _OPTIMIZERS[value]})
    if value == "paged-adamw-8bit":
        instead = f"{TITLE} pages no state; it stays on the device"
        return request.keys("optimizer", {key: "adamw8bit"}, instead, may_not_fit=True)

    instead = f"{TITLE} has no such optimizer, and runs torch's AdamW"
    if value == "adamw-foreach":
        instead = f"{TITLE} lets PyTorch choose how AdamW goes through the weights"
    return request.keys("optimizer", {key: "adamw"}, instead, may_not_fit=value != "adamw-foreach")


def _compile(request: Request) -> ToolKeys:
    on = request.config.compile != "none"
    keys = {f"{MODEL}.compile": on, f"{MODEL}.block_compile": on}
    return pictures.compiled(request, keys, by_blocks=True)


def _files(
    source: ExportSource, keys: Mapping[str, Any], header: Header, file: str
) -> dict[str, str]:
    return {file: yaml_file(header, _with_lists(keys))}


def _with_lists(keys: Any) -> Any:
    """The tree with a list in place of a mapping whose keys are numbers."""
    if not isinstance(keys, Mapping):
        return keys
    inner = {name: _with_lists(value) for name, value in keys.items()}
    if inner and all(name.isdigit() for name in inner):
        return list(inner.values())
    return inner


TOOL = Tool(
    title=TITLE,
    versions=("0.12.26",),
    run="python run.py {file}",
    file="aitoolkit.yaml",
    files=_files,
    tasks=pictures.TASKS,
    refuse=lambda source: pictures.refuse(source, TITLE, tuple(ARCHITECTURES)),
    fixed=_fixed,
    knobs={
        **pictures.missing(TITLE),
        **shared.missing(TITLE, "activation_offload", "optimizer_in_backward"),
        **pictures.kinds_of_adapter(TITLE, "lora_dora", "lora_rslora", "lora_plus"),
        **shared.values(micro_batch_size=f"{TRAIN}.batch_size"),
        **shared.values(gradient_accumulation_steps=f"{TRAIN}.gradient_accumulation"),
        "precision": _precision,
        "quantization": _quantization,
        "activation_checkpointing": pictures.checkpointing(f"{TRAIN}.gradient_checkpointing"),
        "parameter_offload": _parameter_offload,
        "optimizer": _optimizer,
        "lora_rank": lambda request: shared.lora_rank(
            request, f"{NETWORK}.linear", beside={f"{NETWORK}.type": "lora"}
        ),
        "lora_alpha": lambda request: shared.lora_alpha(request, f"{NETWORK}.linear_alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, f"{NETWORK}.dropout"),
        "lora_targets": lambda request: pictures.targets_by_kind(
            request, _INSIDE, {f"{NETWORK}.transformer_only": True}
        ),
        "attention": lambda request: pictures.fused_attention(
            request, {f"{TRAIN}.attention_backend": "native"}
        ),
        "compile": _compile,
    },
)
