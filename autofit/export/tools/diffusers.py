"""diffusers: the command of one of its example scripts, which train adapters."""

import json
from collections.abc import Mapping
from typing import Any

from autofit.core.learning_rates import default_learning_rate
from autofit.core.quoting import comment, shell_path
from autofit.export import picture_keys as pictures
from autofit.export import shared_keys as shared
from autofit.export.pictures import FLUX, QWEN_IMAGE, SD_15, SD_35, SDXL
from autofit.export.source import Deviation, ExportSource
from autofit.export.tool import Header, Request, Tool, ToolKeys

TITLE = "diffusers"
SCRIPTS = {
    SD_15: "text_to_image/train_text_to_image_lora",
    SDXL: "text_to_image/train_text_to_image_lora_sdxl",
    SD_35: "dreambooth/train_dreambooth_lora_sd3",
    FLUX: "dreambooth/train_dreambooth_lora_flux",
    QWEN_IMAGE: "dreambooth/train_dreambooth_lora_qwen_image",
}
_UNETS = (SD_15, SDXL)  # whose scripts train four layers of each attention
_WITH_ALPHA = (FLUX, QWEN_IMAGE)
_BITS = "bnb_quantization_config_path"
_QUANTIZED = "bits.json"
_ATTENTION = "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0"
_OF_UNETS = "to_q+to_k+to_v+to_out.0"
_OF_ENCODERS = "q_proj+k_proj+v_proj+out_proj"


def _family(request: Request) -> str:
    return str(pictures.facts(request.source).family)


def _fixed(request: Request) -> Mapping[str, Any]:
    """The model, the data, and what is cached."""
    source = request.source
    found = pictures.facts(source)
    is_unet = found.family in _UNETS
    keys: dict[str, Any] = {
        "pretrained_model_name_or_path": pictures.weights(source),
        "resolution": max(found.width, found.height),
        "center_crop": True,
        "num_train_epochs": 1,
        "learning_rate": default_learning_rate(request.config),
        "output_dir": "trained",
    }
    if is_unet:
        keys |= {"train_data_dir": pictures.data(source), "caption_column": "text"}
    else:
        keys |= {
            "dataset_name": pictures.data(source),
            "caption_column": "text",
            "instance_prompt": "",
            "cache_latents": True,
        }
    if found.family in (FLUX, QWEN_IMAGE):
        keys["max_sequence_length"] = found.prompt_tokens
    if found.family == QWEN_IMAGE:
        keys["offload"] = True
    if found.text_encoders:
        keys["train_text_encoder"] = True
    return keys


def _refuse(source: ExportSource) -> str | None:
    """Why no script trains a config, or None."""
    reason = pictures.refuse(source, TITLE, tuple(SCRIPTS))
    if reason is None and pictures.facts(source).text_encoders:
        family = pictures.facts(source).family
        if family != SDXL:
            return f"the script of {TITLE} for {family} trains no text encoders."
    return reason


def _precision(request: Request) -> ToolKeys:
    """The numbers of frozen weights; adapters are of 32 bits in fp16 alone."""
    value = request.config.precision
    names = {"fp32": "no", "tf32": "no", "fp16-mixed": "fp16"}
    keys = {"mixed_precision": names.get(value, "bf16"), "allow_tf32": value == "tf32"}
    instead = None
    if value == "bf16-mixed":
        instead = "its script holds adapters in 16 bits, too"
    if value == "fp8":
        instead = shared.FP8.format(TITLE)
    return request.keys("precision", keys, instead)


def _quantization(request: Request) -> ToolKeys:
    """How bitsandbytes holds the frozen weights, where a script takes that."""
    value = request.config.quantization
    if value == "none":
        return ToolKeys()
    if _family(request) == QWEN_IMAGE:
        return ToolKeys({_BITS: _QUANTIZED})

    instead = "its script takes no quantised weights, and holds them whole"
    return request.keys("quantization", {}, instead, may_not_fit=True)


def _parameter_offload(request: Request) -> ToolKeys:
    if request.config.parameter_offload == "none":
        return ToolKeys()
    instead = "its script keeps weights on the device"
    return request.keys("parameter_offload", {}, instead, may_not_fit=True)


def _optimizer(request: Request) -> ToolKeys:
    """AdamW of 8 bits, or torch's."""
    value = str(request.config.optimizer)
    keys: dict[str, Any] = {"use_8bit_adam": "8bit" in value}
    if _family(request) not in _UNETS:
        keys["optimizer"] = "AdamW"
    instead = None
    may_not_fit = False
    if value == "adamw-foreach":
        instead = "its script lets PyTorch choose how AdamW goes through the weights"
        return request.keys("optimizer", {**keys}, instead)
    if value not in ("adamw", "adamw-8bit"):
        instead = "its script has AdamW alone, here of as many bits or of 32"
        may_not_fit = True
    return request.keys("optimizer", keys, instead, may_not_fit=may_not_fit)


def _rank(request: Request) -> ToolKeys:
    """The rank; and what a script does with text encoders and with pictures that are not square."""
    found = pictures.facts(request.source)
    deviations = []
    if found.family in _UNETS:
        stays = "its script keeps VAE and text encoders on the device"
        if found.text_encoders:
            stays = "its script keeps the VAE on the device"
        part = "vae" if found.text_encoders else "text_encoder"
        deviations.append(Deviation(part, "cached", stays, may_not_fit=True))
    if not found.is_square:
        size = pictures.resolution(request.source, "x")
        squares = "its script cuts squares, here of the longer side"
        deviations.append(Deviation("resolution", size, squares, may_not_fit=True))
    return ToolKeys({"rank": request.config.lora_rank}, tuple(deviations))


def _alpha(request: Request) -> ToolKeys:
    """A scale of its own, or the rank."""
    wanted = shared.alpha(request)
    if _family(request) in _WITH_ALPHA:
        return shared.whole_alpha(request)
    if wanted == request.config.lora_rank:
        return ToolKeys(as_measured=True)
    return request.keys("lora_alpha", {}, "its script takes the rank for it")


def _dropout(request: Request) -> ToolKeys:
    value = request.config.lora_dropout
    if _family(request) not in _UNETS:
        return shared.lora_dropout(request)
    if not value:
        return ToolKeys()
    return request.keys("lora_dropout", {}, "its script drops nothing")


def _targets(request: Request) -> ToolKeys:
    """Layers by their names, where a script takes some."""
    value = str(request.config.lora_targets or "all-linear")
    if _family(request) in _UNETS:
        trained = _OF_UNETS
        if pictures.facts(request.source).text_encoders:
            trained += f"+{_OF_ENCODERS}"
        if set(value.split("+")) == set(trained.split("+")):
            return ToolKeys(as_measured=True)
        named = trained.replace("+", ", ")
        return request.keys("lora_targets", {}, f"its script trains {named}")
    if value == "attention":
        return ToolKeys({"lora_layers": _ATTENTION})
    if value in ("all-linear", "all-linear+head"):
        instead = "its script trains the attention and the MLPs of blocks of two streams"
        return request.keys("lora_targets", {}, instead)
    return ToolKeys({"lora_layers": ",".join(value.split("+"))})


def _compile(request: Request) -> ToolKeys:
    if request.config.compile == "none":
        return ToolKeys()
    instead = "its script compiles nothing; accelerate may, of the model as one"
    return request.keys("compile", {}, instead, may_not_fit=True)


def _files(
    source: ExportSource, keys: Mapping[str, Any], header: Header, file: str
) -> dict[str, str]:
    """The command, and the file of quantised weights that it may name."""
    script = SCRIPTS[str(pictures.facts(source).family)].rpartition("/")[2]
    options = []
    for name, value in keys.items():
        if value is False:
            continue
        written = "" if value is True else f" {shell_path(str(value))}"
        options.append(f"    --{name}{written}")

    command = " \\\n".join([f"accelerate launch {script}.py", *options])
    files = {file: f"{comment(header)}\n{command}\n"}
    if _BITS in keys:
        files[_QUANTIZED] = json.dumps(_bits(source), indent=2) + "\n"
    return files


def _bits(source: ExportSource) -> dict[str, Any]:
    """What BitsAndBytesConfig is given."""
    value = source.config.quantization
    if value == "int8":
        return {"load_in_8bit": True}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": value == "nf4-dq",
        "bnb_4bit_compute_dtype": "bfloat16",
    }


TOOL = Tool(
    title=TITLE,
    versions=("0.40.0",),
    run="sh {file}",
    file="train_diffusers.sh",
    files=_files,
    tasks=pictures.TASKS,
    refuse=_refuse,
    fixed=_fixed,
    knobs={
        **pictures.missing(TITLE),
        **shared.missing(TITLE, "activation_offload", "optimizer_in_backward"),
        **pictures.kinds_of_adapter(TITLE, "lora_dora", "lora_rslora", "lora_plus"),
        **shared.values(micro_batch_size="train_batch_size"),
        **shared.values(gradient_accumulation_steps="gradient_accumulation_steps"),
        "precision": _precision,
        "quantization": _quantization,
        "activation_checkpointing": pictures.checkpointing("gradient_checkpointing"),
        "parameter_offload": _parameter_offload,
        "optimizer": _optimizer,
        "lora_rank": _rank,
        "lora_alpha": _alpha,
        "lora_dropout": _dropout,
        "lora_targets": _targets,
        "attention": lambda request: pictures.fused_attention(request, {}),
        "compile": _compile,
    },
)
