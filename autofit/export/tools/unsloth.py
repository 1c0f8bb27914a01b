"""Unsloth: a script, and the YAML of `unsloth train --config`, which holds less.

Unsloth puts kernels of its own in the place of the model's, whatever is asked for. Its YAML knows no optimizer but
adamw_8bit, no precision, and no quantisation but that of 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import comment, yaml_file
from autofit.export.template import call, fill, literal, template
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import arguments, batches_fit, keywords, lora_alpha, unknown

_SCRIPT, _YAML = "train_unsloth.py", "unsloth.yaml"
_LESS = (
    "",
    f"This YAML holds less than {_SCRIPT} beside it: it always takes adamw_8bit as optimizer, chooses",
    "the precision by itself, and quantises weights to 4 bits or not at all.",
)


def _arguments(knob: str) -> Any:
    """What SFTConfig inherits from TrainingArguments."""

    def share(request: Request) -> ToolKeys:
        told = arguments(knob)(request)
        return ToolKeys({f"arguments.{name}": value for name, value in told.keys.items()}, told.departures)

    return share


def _precision(request: Request) -> ToolKeys:
    """Full training keeps weights in float32 where it is told to mix."""
    value, full = request.text("precision"), not request.config["lora_rank"]
    told = _arguments("precision")(request)
    keys = {"model.dtype": keywords(request, "precision").model["dtype"], **told.keys}
    if full:
        keys["model.float32_mixed_precision"] = value == "bf16-mixed"
        return ToolKeys(keys, told.departures)
    if value in ("bf16", "fp8"):
        why = "Unsloth holds adapters in float32, in more memory than measured"
        return ToolKeys(keys, (*told.departures, request.departs("precision", why, may_not_fit=True)))
    return ToolKeys(keys, told.departures)


def _checkpointing(request: Request) -> ToolKeys:
    """`unsloth` is to offload what enters the blocks."""
    value = request.text("activation_checkpointing")
    on = value in ("full", "alternate", "selective")
    offloads = on and request.text("activation_offload") != "none"
    keys = {"model.use_gradient_checkpointing": "unsloth" if offloads else on}
    if value in ("alternate", "selective"):
        why = "Unsloth checkpoints every block whole, with less memory and more time than measured"
        return ToolKeys(keys, (request.departs("activation_checkpointing", why),))
    if value.startswith("budget-"):
        return ToolKeys(keys, keywords(request, "activation_checkpointing").departures)
    return ToolKeys(keys)


def _offload(request: Request) -> ToolKeys:
    """ToolKeys by the value of the other key."""
    if request.text("activation_offload") == "none":
        return ToolKeys()
    if request.text("activation_checkpointing") in ("full", "alternate", "selective"):
        return ToolKeys({"model.use_gradient_checkpointing": "unsloth"})
    why = "Unsloth offloads the inputs of checkpointed blocks only, and needs more memory than measured"
    return ToolKeys({}, (request.departs("activation_offload", why, may_not_fit=True),))


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    return ToolKeys({"model.full_finetuning": not rank, **({"lora.r": rank} if rank else {})})


def _of_adapters(request: Request, key: str, value: Any) -> ToolKeys:
    return ToolKeys({f"lora.{key}": value} if request.config["lora_rank"] else {})


def _targets(request: Request) -> ToolKeys:
    targets = [name for name in request.found.targets if name not in request.found.outputs]
    told = _of_adapters(request, "target_modules", targets or "all-linear")
    if request.text("lora_targets") != "all-linear+head":
        return told
    why = "Unsloth trains the head whole or not at all; it has no adapter"
    return ToolKeys(told.keys, (request.departs("lora_targets", why),))


def _quantization(request: Request) -> ToolKeys:
    """4 bits are NF4 with double quantisation in Unsloth."""
    value = request.text("quantization")
    keys = {"model.load_in_4bit": value in ("nf4", "nf4-dq"), "model.load_in_8bit": value == "int8"}
    why = "Unsloth quantises the scales of blocks as well, in less memory than measured"
    return ToolKeys(keys, (request.departs("quantization", why),) if value == "nf4" else ())


def _loss(request: Request) -> ToolKeys:
    if request.text("loss") == "standard":
        return ToolKeys()
    why = "Unsloth computes the loss in its own way, whose memory was not measured"
    return ToolKeys({}, (request.departs("loss", why, may_not_fit=True),))


def _kernels(request: Request) -> ToolKeys:
    why = "Unsloth puts kernels of its own in the place of the model's, which were not measured"
    return ToolKeys({}, (request.departs("kernels", why),))


def _fixed(request: Request) -> dict[str, Any]:
    learning = Hyperparameters()
    return {
        "model.model_name": request.found.weights,
        "model.max_seq_length": request.found.sequence_length,
        "arguments.output_dir": "output",
        "arguments.max_length": request.found.sequence_length,
        "arguments.learning_rate": learning.lr,
        "arguments.lr_scheduler_type": learning.schedule,
        "arguments.weight_decay": learning.weight_decay,
        "arguments.max_grad_norm": learning.max_grad_norm or 0.0,
    }


def _files(document: Document) -> dict[str, str]:
    keys = document.keys
    model = _named(keys["model"])
    dtype = keys["model"]["dtype"]
    model = [f"dtype=torch.{dtype}" if each.startswith("dtype=") else each for each in model]
    lora = keys.get("lora")
    adapters = call("model = FastLanguageModel.get_peft_model", _adapters(keys), indent=0) if lora else []
    slots = {
        "head": comment(document.head),
        "model": call("model, tokenizer = FastLanguageModel.from_pretrained", model, indent=0),
        "adapters": adapters,
        "arguments": call("arguments = SFTConfig", _named(keys["arguments"]), indent=0),
    }
    script = fill(template("unsloth"), slots)
    return {_SCRIPT: script, _YAML: yaml_file((*document.head, *_LESS), _yaml(keys))}


def _adapters(keys: Mapping[str, Any]) -> list[str]:
    checkpointing = keys["model"]["use_gradient_checkpointing"]
    return ["model", *_named({**keys["lora"], "use_gradient_checkpointing": checkpointing})]


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={literal(value)}" for name, value in values.items()]


def _yaml(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What of it the command line has keys for."""
    model, given, lora = keys["model"], keys["arguments"], keys.get("lora")
    checkpointing = model["use_gradient_checkpointing"]
    told: dict[str, Any] = {
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
            "packing": False,
            "gradient_checkpointing": checkpointing if checkpointing == "unsloth" else str(checkpointing).lower(),
        },
    }
    if told["training"]["gradient_checkpointing"] == "false":
        told["training"]["gradient_checkpointing"] = "none"
    if lora:
        targets = lora["target_modules"]
        told["lora"] = {
            "lora_r": lora["r"],
            "lora_alpha": round(lora["lora_alpha"]),
            "lora_dropout": lora["lora_dropout"],
            "target_modules": targets if isinstance(targets, str) else ",".join(targets),
        }
    return told


TOOL = Tool(
    name="unsloth",
    title="Unsloth",
    versions=("2026.10.9",),
    run=f"python {_SCRIPT} TEXT_FILE, or unsloth train --config {_YAML}",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": _arguments("micro_batch_size"),
        "gradient_accumulation_steps": _arguments("gradient_accumulation_steps"),
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": _rank,
        "lora_alpha": lambda request: _of_adapters(request, "lora_alpha", lora_alpha(request)),
        "lora_dropout": lambda request: _of_adapters(request, "lora_dropout", request.config["lora_dropout"] or 0.0),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _arguments("optimizer"),
        "optimizer_offload": _arguments("optimizer_offload"),
        "optimizer_in_backward": _arguments("optimizer_in_backward"),
        "parameter_offload": _arguments("parameter_offload"),
        "compile": unknown(
            "compile", "Unsloth compiles parts of the model in its own way, which was not measured", may_not_fit=False
        ),
        "attention": unknown("attention", "Unsloth chooses the attention by itself"),
        "loss": _loss,
        "kernels": _kernels,
    },
)
