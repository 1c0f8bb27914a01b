"""OneTrainer: the JSON of `scripts/train.py`, whose absent keys are as it has them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autofit.core.learning_rates import default_learning_rate
from autofit.export import picture_keys as pictures
from autofit.export import shared_keys as shared
from autofit.export.pictures import FLUX, QWEN_IMAGE, SD_15, SD_35, SDXL
from autofit.export.source import ExportSource
from autofit.export.tool import Header, Request, Share, Tool, ToolKeys

TITLE = "OneTrainer"
_VERSION_OF_FILES = 11  # which it would bring up to date otherwise
MODELS = {
    SD_15: "STABLE_DIFFUSION_15",
    SDXL: "STABLE_DIFFUSION_XL_10_BASE",
    SD_35: "STABLE_DIFFUSION_35",
    FLUX: "FLUX_DEV_1",
    QWEN_IMAGE: "QWEN",
}
UNETS = (SD_15, SDXL)
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "ADAMW", "fused": True, "stochastic_rounding": False},
    "adamw-foreach": {"optimizer": "ADAMW", "foreach": True, "stochastic_rounding": False},
    "adamw-sr": {"optimizer": "ADAMW", "fused": True, "stochastic_rounding": True},
    "adamw-8bit": {"optimizer": "ADAMW_8BIT", "is_paged": False},
    "paged-adamw-8bit": {"optimizer": "ADAMW_8BIT", "is_paged": True},
    "lion-8bit": {"optimizer": "LION_8BIT", "is_paged": False},
    "sgd": {"optimizer": "SGD"},
}
_ADAFACTOR = {
    "optimizer": "ADAFACTOR",
    "relative_step": False,
    "scale_parameter": False,
    "warmup_init": False,
    "stochastic_rounding": False,
}

_MOST_OFFLOADED = 0.9  # of the layers
_OF_ENCODERS = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}  # their linear layers


def _part(source: ExportSource) -> str:
    """What the denoiser is called."""
    return "unet" if pictures.facts(source).family in UNETS else "transformer"


def _fixed(request: Request) -> Mapping[str, Any]:
    """The model, the data, and what is cached."""
    source = request.source
    keys: dict[str, Any] = {
        "__version": _VERSION_OF_FILES,
        "training_method": "LORA",
        "model_type": MODELS[str(pictures.facts(source).family)],
        "base_model_name": pictures.weights(source),
        "concepts": [{"name": "pictures", "path": pictures.data(source)}],
        "sample_after_unit": "NEVER",
        "resolution": _resolution(source),
        "aspect_ratio_bucketing": False,
        "latent_caching": True,
        "epochs": 1,
        "learning_rate": default_learning_rate(request.config),
        "learning_rate_warmup_steps": 0.0,
        "output_model_destination": "trained/model.safetensors",
        f"{_part(source)}.train": True,
    }
    for name in TEXT_ENCODERS:
        keys[f"{name}.train"] = name in pictures.facts(source).text_encoders
    return keys


def _on_encoders(source: ExportSource, made: ToolKeys) -> ToolKeys:
    """The same with the denoiser's keys for text encoders that are trained, too."""
    part = _part(source)
    keys = dict(made.keys)
    for key, value in made.keys.items():
        for name in pictures.facts(source).text_encoders:
            if key.startswith(f"{part}."):
                keys[f"{name}.{key.removeprefix(f'{part}.')}"] = value
    return replace(made, keys=keys)


def _on_all(share: Share) -> Share:
    """A row whose keys stand for each part that is trained."""

    def row(request: Request) -> ToolKeys:
        return _on_encoders(request.source, share(request))

    return row


def _resolution(source: ExportSource) -> str:
    """One side of a square, or both."""
    found = pictures.facts(source)
    if found.is_square:
        return str(found.width)
    return pictures.resolution(source, "x")


def _precision(request: Request) -> ToolKeys:
    """The numbers that are computed in, and those of adapters."""
    value = request.config.precision
    computed = {"fp32": "FLOAT_32", "tf32": "TFLOAT_32", "fp16-mixed": "FLOAT_16"}
    keys = {
        "train_dtype": computed.get(value, "BFLOAT_16"),
        "lora_weight_dtype": "BFLOAT_16" if value in ("bf16", "fp8") else "FLOAT_32",
    }
    instead = shared.FP8.format(TITLE) if value == "fp8" else None
    return request.keys("precision", keys, instead)


def _quantization(request: Request) -> ToolKeys:
    """The numbers of frozen weights."""
    value = request.config.quantization
    key = f"{_part(request.source)}.weight_dtype"
    if value == "none":
        plain = {"fp32": "FLOAT_32", "tf32": "FLOAT_32", "fp16-mixed": "FLOAT_16"}
        return ToolKeys({key: plain.get(request.config.precision, "BFLOAT_16")})
    if value == "int8":
        return ToolKeys({key: "INT_8"})

    instead = None
    if value == "nf4-dq":
        instead = f"{TITLE} quantises once, and keeps the scales in 32 bits"
    return request.keys("quantization", {key: "NFLOAT_4"}, instead, may_not_fit=True)


def _parameter_offload(request: Request) -> ToolKeys:
    """The share of the layers that rest on the host."""
    share = min(_MOST_OFFLOADED, round(pictures.share_streamed(request), 4))
    keys = {f"{_part(request.source)}.offload_fraction": share}
    instead = None
    if share == _MOST_OFFLOADED:
        instead = f"{TITLE} keeps a tenth of the layers on the device"

    never = bool(share) and request.config.activation_checkpointing == "none"
    if never:
        instead = f"{TITLE} offloads layers where these are checkpointed alone"

    return request.keys("parameter_offload", keys, instead, may_not_fit=never)


def _checkpointing(request: Request) -> ToolKeys:
    """Every block is checkpointed, or none."""
    key = f"{_part(request.source)}.gradient_checkpointing"
    return shared.whole_blocks(request, key)


def _activation_offload(request: Request) -> ToolKeys:
    """What checkpointed layers keep rests on the host."""
    key = f"{_part(request.source)}.activation_offloading"
    otherwise = f"{TITLE} offloads what checkpointed layers keep alone"
    return shared.offload_of_blocks(request, {key: False}, {key: True}, otherwise)


def _optimizer(request: Request) -> ToolKeys:
    """The optimizer and its options."""
    value = str(request.config.optimizer)
    options = _ADAFACTOR if value == "adafactor" else _OPTIMIZERS.get(value)
    instead = None
    if options is None:
        options = _OPTIMIZERS["adamw"]
        instead = f"{TITLE} has no such optimizer, and runs torch's AdamW"

    options = {**options, "fused_back_pass": False}
    keys = {f"optimizer.{name}": setting for name, setting in options.items()}
    return request.keys("optimizer", keys, instead, may_not_fit=bool(instead))


def _targets(request: Request) -> ToolKeys:
    """Layers by parts of their names; all where no names are told, convolutions among them."""
    value = str(request.config.lora_targets or "all-linear")
    if value in ("all-linear", "all-linear+head"):
        keys = {"layer_filter": ""}
        if _part(request.source) == "transformer":
            return ToolKeys(keys, as_measured=True)
        instead = f"{TITLE} puts adapters beside a UNet's convolutions, too"
        return request.keys("lora_targets", keys, instead, may_not_fit=True)
    names = value.split("+")
    keys = {"layer_filter": ",".join(names)}
    if value == "attention":
        keys = {"layer_filter": "attn"}
    fewer = _OF_ENCODERS.difference(names)
    if fewer and pictures.facts(request.source).text_encoders:
        instead = f"{TITLE} puts adapters beside all linear layers of text encoders"
        return request.keys("lora_targets", keys, instead, may_not_fit=True)
    return ToolKeys(keys)


def _compile(request: Request) -> ToolKeys:
    keys = {"compile": request.config.compile != "none"}
    return pictures.compiled(request, keys, by_blocks=True)


def _attention(request: Request) -> ToolKeys:
    value = request.config.attention
    keys = {"attention_mechanism": "FLASH" if value == "flash" else "SDP"}
    if value == "flash":
        return ToolKeys(keys)
    return pictures.fused_attention(request, dict(keys))


def _files(
    source: ExportSource, keys: Mapping[str, Any], header: Header, file: str
) -> dict[str, str]:
    return {file: json.dumps({"_comment": list(header), **keys}, indent=2) + "\n"}


TOOL = Tool(
    title=TITLE,
    versions=("2026.8.19",),
    run="python scripts/train.py --config-path {file}",
    file="onetrainer.json",
    files=_files,
    tasks=pictures.TASKS,
    refuse=lambda source: pictures.refuse(source, TITLE, tuple(MODELS)),
    fixed=_fixed,
    knobs={
        **pictures.missing(TITLE),
        **shared.missing(TITLE, "optimizer_in_backward"),
        **pictures.kinds_of_adapter(TITLE, "lora_rslora", "lora_plus"),
        **shared.values(micro_batch_size="batch_size"),
        **shared.values(gradient_accumulation_steps="gradient_accumulation_steps"),
        "precision": _precision,
        "quantization": _on_all(_quantization),
        "activation_checkpointing": _on_all(_checkpointing),
        "activation_offload": _on_all(_activation_offload),
        "parameter_offload": _on_all(_parameter_offload),
        "optimizer": _optimizer,
        "lora_rank": lambda request: shared.lora_rank(
            request, "lora_rank", beside={"peft_type": "LORA"}
        ),
        "lora_alpha": shared.lora_alpha,
        "lora_dropout": lambda request: shared.lora_dropout(request, "dropout_probability"),
        "lora_dora": lambda request: ToolKeys({"lora_decompose": bool(request.config.lora_dora)}),
        "lora_targets": _targets,
        "attention": _attention,
        "compile": _compile,
    },
)
