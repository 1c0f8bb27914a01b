"""Ludwig: the YAML of `ludwig train --config` for a model of kind `llm`.

It trains weights in the format of the checkpoint, mixes precision by one switch, and knows neither offloading nor a
loss without the logits.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, rounded_alpha, unknown

_OPTIMIZERS = {
    "adamw": "adamw",
    "adamw-foreach": "adamw",
    "adamw-8bit": "adamw_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    why = "Ludwig leaves weights in the format of the checkpoint, and mixes in the one that the device prefers"
    keys = {"trainer.use_mixed_precision": value in ("bf16-mixed", "fp16-mixed")}
    return ToolKeys(keys, () if value == "fp32" else (request.departs("precision", why, may_not_fit=True),))


def _checkpointing(request: Request) -> ToolKeys:
    value = request.text("activation_checkpointing")
    keys = {"trainer.enable_gradient_checkpointing": value in ("full", "alternate", "selective")}
    if value in ("none", "full"):
        return ToolKeys(keys)
    budget = value.startswith("budget-")
    whole = "Ludwig checkpoints every block whole, with less memory and more time than measured"
    none = "Ludwig has no budgets, and keeps more for the backward"
    return ToolKeys(keys, (request.departs("activation_checkpointing", none if budget else whole, may_not_fit=budget),))


def _of_adapters(request: Request, key: str, value: Any) -> ToolKeys:
    return ToolKeys({f"adapter.{key}": value} if request.config["lora_rank"] else {})


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    return ToolKeys({"adapter.type": "lora", "adapter.r": rank} if rank else {})


def _alpha(request: Request) -> ToolKeys:
    whole, lost = rounded_alpha(request, "Ludwig")
    told = _of_adapters(request, "alpha", whole)
    return ToolKeys(told.keys, lost if told.keys else ())


def _targets(request: Request) -> ToolKeys:
    told = _of_adapters(request, "target_modules", list(request.found.targets) or None)
    if not told.keys or request.found.targets:
        return told
    why = "the names of its layers are not known here, and Ludwig takes those that peft has for the kind of model"
    return ToolKeys(told.keys, (request.departs("lora_targets", why),))


def _quantization(request: Request) -> ToolKeys:
    value = request.text("quantization")
    if value == "none":
        return ToolKeys()
    keys: dict[str, Any] = {"quantization.bits": 8 if value == "int8" else 4}
    if value != "int8":
        keys |= {
            "quantization.bnb_4bit_quant_type": "nf4",
            "quantization.bnb_4bit_use_double_quant": value == "nf4-dq",
            "quantization.bnb_4bit_compute_dtype": {"fp16-mixed": "float16", "fp32": "float32"}.get(
                request.text("precision"), "bfloat16"
            ),
        }
    return ToolKeys(keys)


def _optimizer(request: Request) -> ToolKeys:
    value = request.text("optimizer")
    keys = {"trainer.optimizer.type": _OPTIMIZERS.get(value, "adamw")}
    if value not in _OPTIMIZERS:
        why = "Ludwig has none; its AdamW, of 8 bytes for each weight that is trained, takes its place"
        return ToolKeys(keys, (request.departs("optimizer", why, may_not_fit=True),))
    if value == "adamw-foreach":
        why = "Ludwig has one AdamW, and lets PyTorch choose how it goes through the weights"
        return ToolKeys(keys, (request.departs("optimizer", why),))
    return ToolKeys(keys)


def _compile(request: Request) -> ToolKeys:
    value = request.text("compile")
    why = "Ludwig compiles the model as one, in its default mode"
    return ToolKeys({"trainer.compile": value != "none"}, () if value == "none" else (request.departs("compile", why),))


def _fixed(request: Request) -> dict[str, Any]:
    learning = Hyperparameters()
    return {
        "model_type": "llm",
        "base_model": request.found.weights,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "preprocessing.global_max_sequence_length": request.found.sequence_length,
        "trainer.type": "finetune",
        "trainer.epochs": 1,
        "trainer.learning_rate": learning.lr,
    }


def _files(document: Document) -> dict[str, str]:
    return {"ludwig.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="ludwig",
    title="Ludwig",
    versions=("0.17.10",),
    run="ludwig train --config ludwig.yaml --dataset DATA",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": lambda request: ToolKeys({"trainer.batch_size": request.config["micro_batch_size"]}),
        "gradient_accumulation_steps": lambda request: ToolKeys(
            {"trainer.gradient_accumulation_steps": request.config["gradient_accumulation_steps"]}
        ),
        "activation_checkpointing": _checkpointing,
        "activation_offload": unknown("activation_offload", "Ludwig keeps activations on the device"),
        "lora_rank": _rank,
        "lora_alpha": _alpha,
        "lora_dropout": lambda request: _of_adapters(request, "dropout", request.config["lora_dropout"] or 0.0),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "optimizer_offload": unknown("optimizer_offload", "Ludwig keeps the optimizer's state on the device"),
        "optimizer_in_backward": unknown("optimizer_in_backward", "Ludwig holds all gradients until the update"),
        "parameter_offload": unknown("parameter_offload", "Ludwig keeps frozen weights on the device"),
        "compile": _compile,
        "attention": unknown("attention", "Ludwig takes the attention that transformers chooses"),
        "loss": unknown("loss", "Ludwig holds the logits of all tokens"),
        "kernels": unknown("kernels", "Ludwig has none of Liger's, and keeps more for the backward"),
    },
)
