"""Unsloth: a script, and the YAML of `unsloth train --config`, which holds less. Unsloth always
replaces the model's kernels with its own. Its YAML has no optimizer but adamw_8bit, no precision,
and no quantisation but 4 bits."""

from collections.abc import Mapping
from typing import Any

from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.core.quoting import comment
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.template import call, fill, keyword_arguments, template, yaml_file
from autofit.export.tool import LANGUAGE_MODELS, Header, Request, Tool, ToolKeys
from autofit.export.trainer import learning

_YAML = "unsloth.yaml"
_COMPILE = "Unsloth compiles parts of the model in its own way, which was not measured"
_KERNELS = "Unsloth puts kernels of its own in the place of the model's, which were not measured"
_LESS = (
    "This YAML holds less than the script beside it: it always takes adamw_8bit as optimizer, chooses",
    "the precision by itself, and quantises weights to 4 bits or not at all.",
)


def _precision(request: Request) -> ToolKeys:
    """Full training in mixed precision holds weights in float32; what loads a model on a CPU lacks
    the key."""
    value = request.config.precision
    share = shared.arguments(request, "precision", "arguments.")
    keys = {
        "model.dtype": shared.keywords(request, "precision").model["dtype"],
        **share.keys,
    }
    if not request.config.lora_rank:
        mixed = (
            {}
            if request.source.device == "cpu"
            else {"model.float32_mixed_precision": value == "bf16-mixed"}
        )
        return ToolKeys({**keys, **mixed}, share.deviations)

    why = "Unsloth holds adapters in float32, in more memory than measured"
    narrow = request.keys(
        "precision",
        {},
        why if value in ("bf16", "fp8") else None,
        may_not_fit=True,
    )

    return ToolKeys(keys, (*share.deviations, *narrow.deviations))


def _checkpointing(request: Request) -> ToolKeys:
    """The value `unsloth` also offloads the inputs of blocks."""
    value: bool | str = checkpoints_blocks(request.config.activation_checkpointing)
    if value and request.config.activation_offload != "none":
        value = "unsloth"

    keys = {"model.use_gradient_checkpointing": value}
    return shared.whole_blocks_of_trainer(request, keys)


def _targets(request: Request) -> ToolKeys:
    """The layers that get adapters; the head is none of them."""
    keys = {}
    if request.config.lora_rank:
        keys["lora.target_modules"] = request.source.inner_targets or "all-linear"

    instead = None
    if request.source.adapts_head:
        instead = "Unsloth trains the head whole or not at all; it has no adapter"
    return request.keys("lora_targets", keys, instead)


def _quantization(request: Request) -> ToolKeys:
    """4 bits are NF4 with double quantisation in Unsloth."""
    value = request.config.quantization
    keys = {
        "model.load_in_4bit": value in ("nf4", "nf4-dq"),
        "model.load_in_8bit": value == "int8",
    }
    instead = None
    if value == "nf4":
        instead = "Unsloth quantises the scales of blocks as well, in less memory than measured"
    return request.keys("quantization", keys, instead)


def _loss(request: Request) -> ToolKeys:
    """On cards a fused cross-entropy, on CPUs one in chunks."""
    if request.config.loss == "standard":
        return request.keys(
            "loss",
            {},
            "Unsloth never holds all logits, and needs less memory than measured",
        )

    why = "Unsloth computes the loss in its own way, whose memory was not measured"

    return request.keys("loss", {}, why, may_not_fit=True)


def _fixed(request: Request) -> dict[str, Any]:
    length = request.source.sequence_length
    return {
        "model.model_name": request.source.weights,
        "model.max_seq_length": length,
        "arguments.output_dir": "output",
        "arguments.max_length": length,
        "arguments.packing_strategy": "wrapped",  # samples are cut where a sequence ends, as they were
        **{f"arguments.{name}": value for name, value in learning(request.config).items()},
    }


def _files(
    source: ExportSource,
    keys: Mapping[str, Any],
    header: Header,
    file: str,
) -> dict[str, str]:
    """The script, and the file of its command line."""
    model = keys["model"]
    loaded = []
    for argument, value in zip(keyword_arguments(model), model.items(), strict=True):
        name, dtype = value
        if name == "dtype":
            argument = f"dtype=torch.{dtype}"
        loaded.append(argument)

    adapters: list[str] = []
    lora = keys.get("lora")
    if lora:
        checkpointing = {"use_gradient_checkpointing": model["use_gradient_checkpointing"]}
        adapted = ["model", *keyword_arguments({**lora, **checkpointing})]
        adapters = call("model = FastLanguageModel.get_peft_model", adapted, indent=0)

    arguments = keyword_arguments(keys["arguments"])
    slots = {
        "head": comment(header),
        "model": call("model, tokenizer = FastLanguageModel.from_pretrained", loaded, indent=0),
        "adapters": adapters,
        "arguments": call("arguments = SFTConfig", arguments, indent=0),
    }

    return {
        file: fill(template("unsloth"), slots),
        _YAML: yaml_file((*header, "", *_LESS), _yaml(keys)),
    }


def _yaml(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the command line has."""
    model, given, lora = keys["model"], keys["arguments"], keys.get("lora")
    checkpointing = model["use_gradient_checkpointing"]
    yaml: dict[str, Any] = {
        "model": model["model_name"],
        "data": {"dataset": "path/to/dataset"},
        "training": {
            "training_type": "lora" if lora else "full",
            "max_seq_length": model["max_seq_length"],
            "load_in_4bit": model["load_in_4bit"],
            "output_dir": given["output_dir"],
            "learning_rate": given["learning_rate"],
            "weight_decay": given["weight_decay"],
            "batch_size": given["per_device_train_batch_size"],
            "gradient_accumulation_steps": given["gradient_accumulation_steps"],
            "packing": given["packing"],
            "gradient_checkpointing": {True: "true", False: "none"}.get(
                checkpointing, checkpointing
            ),
        },
    }
    if lora:
        targets = lora["target_modules"]
        yaml["lora"] = {
            "lora_r": lora["r"],
            "lora_alpha": round(lora["lora_alpha"]),
            "lora_dropout": lora["lora_dropout"],
            "target_modules": targets if isinstance(targets, str) else ",".join(targets),
        }

    return yaml


TOOL = Tool(
    title="Unsloth",
    versions=("2026.10.9",),
    run=f"python {{file}} TEXT_FILE, or unsloth train --config {_YAML}",
    tasks=LANGUAGE_MODELS,
    packing="arguments.packing",
    apart=False,
    fixed=_fixed,
    file="train_unsloth.py",
    files=_files,
    knobs={
        **shared.trainer_arguments(*shared.TRAINER_ALONE, prefix="arguments."),
        **shared.missing(
            "Unsloth",
            attention="Unsloth chooses the attention by itself",
        ),
        **shared.missing("Unsloth", may_not_fit=False, compile=_COMPILE),
        **several_devices.on_one_device("Unsloth"),
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        "activation_offload": lambda request: (
            shared.offload_of_blocks(  # by the value of the other key
                *(request, {}, {"model.use_gradient_checkpointing": "unsloth"}),
                "Unsloth offloads the inputs of checkpointed blocks only, and needs more memory than measured",
            )
        ),
        "lora_rank": lambda request: shared.lora_rank(
            request,
            "lora.r",
            beside={"model.full_finetuning": False},
            without={"model.full_finetuning": True},
        ),
        "lora_alpha": lambda request: shared.lora_alpha(request, "lora.lora_alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, "lora.lora_dropout"),
        **shared.values(lora_rslora="lora.use_rslora"),
        "lora_targets": _targets,
        "quantization": _quantization,
        "loss": _loss,
        "kernels": lambda request: request.keys("kernels", {}, _KERNELS),
    },
)
