"""kohya's sd-scripts: the TOML of its scripts for adapters, whose keys are the names of their options."""

import math
from collections.abc import Mapping
from typing import Any

from autofit.core.learning_rates import default_learning_rate
from autofit.core.some_blocks import offloaded_of, offloads
from autofit.export import picture_keys as pictures
from autofit.export import shared_keys as shared
from autofit.export.pictures import FLUX, SD_15, SD_35, SDXL
from autofit.export.source import Deviation, ExportSource
from autofit.export.template import toml_file
from autofit.export.tool import Header, Request, Tool, ToolKeys

TITLE = "sd-scripts"
SCRIPTS = {
    SD_15: "train_network",
    SDXL: "sdxl_train_network",
    FLUX: "flux_train_network",
    SD_35: "sd3_train_network",
}
_OF_BLOCKS = (FLUX, SD_35)  # whose blocks it swaps
NETWORKS = {FLUX: "networks.lora_flux", SD_35: "networks.lora_sd3"}
# The files of text encoders and VAE that it is told of one by one.
_FILES = {FLUX: ("clip_l", "t5xxl", "ae"), SD_35: ("clip_l", "clip_g", "t5xxl")}
OPTIMIZERS: dict[str, tuple[str, list[str]]] = {
    "adamw": ("AdamW", ["fused=True"]),
    "adamw-foreach": ("AdamW", ["foreach=True"]),
    "adamw-8bit": ("AdamW8bit", []),
    "paged-adamw-8bit": ("PagedAdamW8bit", []),
    "paged-adamw": ("PagedAdamW", []),
    "lion-8bit": ("Lion8bit", []),
    "adamw-4bit": ("torchao.optim.AdamW4bit", []),
    "adamw-fp8": ("torchao.optim.AdamWFp8", []),
    "adamw-8bit-sr": ("torchao.optim.AdamW8bit", ["bf16_stochastic_round=True"]),
    "adafactor": ("torch.optim.Adafactor", []),
    "sgd": ("torch.optim.SGD", []),
}
_LARGER = ("adamw-master", "muon")  # in whose place a smaller one is named
_INSIDE = "all linear layers inside of the blocks, and no others"


def _script(source: ExportSource) -> str:
    """What the training of a family is called."""
    return SCRIPTS[str(pictures.facts(source).family)]


def _fixed(request: Request) -> Mapping[str, Any]:
    """The model, the data, and what is cached."""
    source = request.source
    family = str(pictures.facts(source).family)
    keys: dict[str, Any] = {"pretrained_model_name_or_path": pictures.weights(source)}
    for name in _FILES.get(family, ()):
        keys[name] = f"path/to/{name}.safetensors"

    keys |= {
        "train_data_dir": pictures.data(source),
        "caption_extension": f".{pictures.CAPTIONS}",
        "resolution": pictures.resolution(source, ","),
        "cache_latents": True,
        "network_train_unet_only": not pictures.facts(source).text_encoders,
        "max_train_epochs": 1,
        "learning_rate": default_learning_rate(request.config),
        "output_dir": "trained",
        "save_model_as": "safetensors",
    }
    if family != SD_15:
        keys["cache_text_encoder_outputs"] = keys["network_train_unet_only"]
    if family in _OF_BLOCKS:
        keys["t5xxl_max_token_length"] = _tokens_of_t5(request)
    if family == FLUX:
        keys |= {"guidance_scale": 1.0, "model_prediction_type": "raw"}
    return keys


def _tokens_of_t5(request: Request) -> int:
    """Tokens of a prompt: beside CLIP's, which SD 3.5 puts in front of them."""
    found = pictures.facts(request.source)
    if found.family == SD_35:
        return max(1, found.prompt_tokens - 77)
    return found.prompt_tokens


def _precision(request: Request) -> ToolKeys:
    """The numbers of adapters and frozen weights."""
    value = request.config.precision
    keys: dict[str, Any] = {"mixed_precision": "bf16", "full_bf16": value in ("bf16", "fp8")}
    instead = None
    if value in ("fp32", "tf32"):
        keys["mixed_precision"] = "no"
    if value == "fp16-mixed":
        keys["mixed_precision"] = "fp16"
    if value == "tf32":
        instead = shared.TF32.format(TITLE)
    if value == "fp8":
        instead = shared.FP8.format(TITLE)
    return request.keys("precision", keys, instead)


def _quantization(request: Request) -> ToolKeys:
    """Frozen weights of 8 bits, as floats; it has none of 4."""
    value = request.config.quantization
    keys = {"fp8_base": value != "none"}
    if value == "none":
        return ToolKeys(keys)
    if value == "int8":
        return request.keys("quantization", keys, f"{TITLE} holds frozen weights as 8-bit floats")

    instead = f"{TITLE} holds frozen weights as 8-bit floats, of twice the memory"
    return request.keys("quantization", keys, instead, may_not_fit=True)


def _swapped(request: Request) -> int:
    """How many blocks it swaps, as it counts them.

    Two blocks of each kind stay. Of Flux, half of the number are blocks of two streams, and for
    each of the other half two blocks of one stream are swapped.
    """
    double, single = pictures.facts(request.source).blocks
    number = offloaded_of(request.config.parameter_offload, double + single) - 2
    if single:
        number = math.ceil(number / 1.5)
        double = min(2 * (double - 2) + 1, 2 * ((single - 2) // 2)) + 2

    return max(0, min(number, double - 2))


def _parameter_offload(request: Request) -> ToolKeys:
    """All blocks but two rest on the host, of models whose blocks it swaps."""
    if pictures.facts(request.source).family in _OF_BLOCKS:
        return ToolKeys({"blocks_to_swap": _swapped(request)})
    if not offloads(request.config.parameter_offload):
        return ToolKeys()
    instead = f"{TITLE} swaps no blocks of a UNet, and keeps weights on the device"
    return request.keys("parameter_offload", {}, instead, may_not_fit=True)


def _activation_offload(request: Request) -> ToolKeys:
    """What checkpointed blocks keep rests on the host, where none are swapped."""
    key = "cpu_offload_checkpointing"
    offloaded = request.config.activation_offload == "cpu"
    if offloaded and pictures.facts(request.source).family not in _OF_BLOCKS:
        instead = f"{TITLE} keeps activations of a UNet on the device"
        return request.keys("activation_offload", {key: False}, instead, may_not_fit=True)
    if offloaded and offloads(request.config.parameter_offload):
        instead = f"{TITLE} offloads no activations where it swaps blocks"
        return request.keys("activation_offload", {key: False}, instead, may_not_fit=True)

    otherwise = f"{TITLE} offloads the inputs of checkpointed blocks alone"
    return shared.offload_of_blocks(request, {key: False}, {key: True}, otherwise)


def _optimizer(request: Request) -> ToolKeys:
    """The optimizer by its name, or that of its class."""
    value = str(request.config.optimizer)
    is_known = value in OPTIMIZERS
    name, arguments = OPTIMIZERS.get(value, OPTIMIZERS["adamw"])
    instead = None
    if not is_known:
        instead = f"{TITLE} is given no such optimizer, and runs torch's AdamW"

    keys = {"optimizer_type": name, "optimizer_args": arguments}
    return request.keys(
        "optimizer", keys, instead, may_not_fit=not is_known and value not in _LARGER
    )


def _rank(request: Request) -> ToolKeys:
    """The rank; of SD 1.5 also that a text encoder stays on the device."""
    source = request.source
    family = str(pictures.facts(source).family)
    keys = {
        "network_module": NETWORKS.get(family, "networks.lora"),
        "network_dim": request.config.lora_rank,
    }
    if family != SD_15 or pictures.facts(source).text_encoders:
        return ToolKeys(keys)

    stays = f"{TITLE} keeps the text encoder on the device, a quarter of a GiB in 16 bits"
    return ToolKeys(keys, (Deviation("text_encoder", "cached", stays, may_not_fit=True),))


def _plus(request: Request) -> ToolKeys:
    """A faster rate of one half of each adapter."""
    ratio = request.config.lora_plus
    if ratio is None:
        return ToolKeys()
    name = "loraplus_unet_lr_ratio"
    if pictures.facts(request.source).text_encoders:
        name = "loraplus_lr_ratio"
    return ToolKeys({"network_args": [f"{name}={ratio}"]})


def _compile(request: Request) -> ToolKeys:
    keys = {"torch_compile": request.config.compile != "none"}
    return pictures.compiled(request, keys, by_blocks=False)


def _files(
    source: ExportSource, keys: Mapping[str, Any], header: Header, file: str
) -> dict[str, str]:
    return {file: toml_file(header, keys)}


TOOL = Tool(
    title=TITLE,
    versions=("0.10.1",),
    run="accelerate launch {stage}.py --config_file {file}",
    stage=SCRIPTS[SDXL],
    stage_of=_script,
    file="sdscripts.toml",
    files=_files,
    tasks=pictures.TASKS,
    refuse=lambda source: pictures.refuse(source, TITLE, tuple(SCRIPTS)),
    fixed=_fixed,
    knobs={
        **pictures.missing(TITLE),
        **shared.missing(TITLE, "optimizer_in_backward"),
        **pictures.kinds_of_adapter(TITLE, "lora_dora", "lora_rslora"),
        **shared.values(micro_batch_size="train_batch_size"),
        **shared.values(gradient_accumulation_steps="gradient_accumulation_steps"),
        "precision": _precision,
        "quantization": _quantization,
        "activation_checkpointing": pictures.checkpointing("gradient_checkpointing"),
        "activation_offload": _activation_offload,
        "parameter_offload": _parameter_offload,
        "optimizer": _optimizer,
        "lora_rank": _rank,
        "lora_alpha": lambda request: shared.lora_alpha(request, "network_alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, "network_dropout"),
        "lora_plus": _plus,
        "lora_targets": lambda request: pictures.targets_by_kind(request, _INSIDE, {}),
        "attention": lambda request: pictures.fused_attention(request, {"sdpa": True}),
        "compile": _compile,
    },
)
