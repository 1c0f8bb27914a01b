"""litgpt: the YAML of `litgpt finetune_full --config` and `litgpt finetune_lora --config`.

On one device its finetuning neither checkpoints activations nor compiles; its loss widens the logits in chunks.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, unknown, whole_alpha

_FORMATS = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-true",
    "fp8": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
}
_QUANTIZED = {"int8": "bnb.int8-training", "nf4": "bnb.nf4", "nf4-dq": "bnb.nf4-dq"}
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {"fused": True}),
    "adamw-foreach": ("torch.optim.AdamW", {"foreach": True}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "adamw-4bit": ("torchao.optim.AdamW4bit", {}),
    "adamw-fp8": ("torchao.optim.AdamWFp8", {}),
    "adafactor": ("torch.optim.Adafactor", {}),
    "sgd": ("torch.optim.SGD", {}),
}


def _precision(request: Request) -> ToolKeys:
    """Quantised weights want one format for all else."""
    value, quantized = request.text("precision"), request.text("quantization") != "none"
    if quantized and value in ("bf16-mixed", "fp16-mixed"):
        why = "litgpt holds adapters beside quantised weights in bfloat16, with less memory and precision than measured"
        return ToolKeys({"precision": "bf16-true"}, (request.departs("precision", why),))
    instead = {
        "tf32": "litgpt multiplies in float32 unless torch.set_float32_matmul_precision('high') is called",
        "fp8": "litgpt multiplies in bfloat16 here, which is slower than measured",
    }.get(value)
    frozen = "litgpt holds frozen weights in float32, in more memory than measured"
    mixed = value in ("bf16-mixed", "fp16-mixed") and bool(request.config["lora_rank"])
    departures = [request.departs("precision", instead)] if instead else []
    departures += [request.departs("precision", frozen, may_not_fit=True)] if mixed else []
    return ToolKeys({"precision": _FORMATS[value]}, tuple(departures))


def _micro_batch(request: Request) -> ToolKeys:
    return ToolKeys({"train.micro_batch_size": request.config["micro_batch_size"]})


def _accumulation(request: Request) -> ToolKeys:
    """Worked out by litgpt from the whole batch."""
    micro, steps = request.config["micro_batch_size"], request.config["gradient_accumulation_steps"]
    return ToolKeys({"train.global_batch_size": int(micro or 1) * int(steps or 1)})


def _of_adapters(request: Request, key: str, value: Any) -> ToolKeys:
    return ToolKeys({key: value} if request.config["lora_rank"] else {})


def _targets(request: Request) -> ToolKeys:
    if not request.config["lora_rank"]:
        return ToolKeys()
    targets = request.text("lora_targets")
    attention = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection"), True)
    return ToolKeys({**attention, "lora_mlp": targets != "attention", "lora_head": targets == "all-linear+head"})


def _quantization(request: Request) -> ToolKeys:
    return ToolKeys({"quantize": _QUANTIZED.get(request.text("quantization"))} if request.config["lora_rank"] else {})


def _optimizer(request: Request) -> ToolKeys:
    value = request.text("optimizer")
    path, options = _OPTIMIZERS.get(value, _OPTIMIZERS["adamw"])
    learning = Hyperparameters()
    keys = {
        "optimizer.class_path": path,
        "optimizer.init_args.lr": learning.lr,
        "optimizer.init_args.weight_decay": learning.weight_decay,
        **{f"optimizer.init_args.{name}": option for name, option in options.items()},
    }
    why = "your own is not known here; torch's AdamW is named in its place"
    return ToolKeys(keys, () if value in _OPTIMIZERS else (request.departs("optimizer", why, may_not_fit=True),))


def _loss(request: Request) -> ToolKeys:
    if request.text("loss") == "standard":
        return ToolKeys()
    why = "litgpt holds the logits of all tokens, and widens them in chunks"
    return ToolKeys({}, (request.departs("loss", why, may_not_fit=True),))


def _fixed(request: Request) -> dict[str, Any]:
    return {
        "checkpoint_dir": f"checkpoints/{request.found.weights}",
        "out_dir": "output",
        "devices": 1,
        "data.class_path": "litgpt.data.JSON",
        "data.init_args.json_path": "path/to/data.json",
        "data.init_args.val_split_fraction": 0.05,
        "train.epochs": 1,
        "train.max_seq_length": request.found.sequence_length,
        "train.lr_warmup_steps": 1,
        "train.max_norm": Hyperparameters().max_grad_norm,
        "seed": 0,
    }


def _files(document: Document) -> dict[str, str]:
    return {"litgpt.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="litgpt",
    title="litgpt",
    versions=("0.5.13",),
    run="litgpt {finetune_full,finetune_lora} --config litgpt.yaml (finetune_lora where there are adapters)",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": _accumulation,
        "activation_checkpointing": unknown(
            "activation_checkpointing",
            "litgpt checkpoints on several devices only, and keeps all for the backward here",
        ),
        "activation_offload": unknown("activation_offload", "litgpt keeps activations on the device"),
        "lora_rank": lambda request: _of_adapters(request, "lora_r", request.config["lora_rank"]),
        "lora_alpha": whole_alpha("litgpt"),
        "lora_dropout": lambda request: _of_adapters(request, "lora_dropout", request.config["lora_dropout"] or 0.0),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "optimizer_offload": unknown("optimizer_offload", "litgpt keeps the optimizer's state on the device"),
        "optimizer_in_backward": unknown("optimizer_in_backward", "litgpt holds all gradients until the update"),
        "parameter_offload": unknown("parameter_offload", "litgpt keeps frozen weights on the device"),
        "compile": unknown("compile", "litgpt does not compile when it finetunes, which is slower than measured"),
        "attention": unknown("attention", "litgpt calls PyTorch's fused attention, which chooses by itself"),
        "loss": _loss,
        "kernels": unknown("kernels", "litgpt has none of Liger's, and keeps more for the backward"),
    },
)
