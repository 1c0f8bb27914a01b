"""LLaMA-Factory: the YAML of `llamafactory-cli train`.

It checkpoints unless told not to, by a key that says the opposite of the others', in a way of its own that knows
neither every second block nor offloading. Weights come in the format of the checkpoint where no other is named.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import arguments, batches_fit, lora_dropout, whole_alpha

_ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash": "fa2"}
_CHECKPOINTED = ("full", "alternate", "selective")


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    plain = value in ("fp32", "tf32")
    keys = {
        "pure_bf16": value in ("bf16", "fp8"),
        "bf16": value == "bf16-mixed",
        "fp16": value == "fp16-mixed",
        "infer_dtype": "float32" if plain else "auto",
        **({"tf32": value == "tf32"} if plain and request.found.device == "cuda" else {}),
    }
    departures = []
    if value == "fp8":
        why = "LLaMA-Factory multiplies in bfloat16 here, which is slower than measured"
        departures.append(request.departs("precision", why))
    if keys["pure_bf16"] and request.config["lora_rank"]:
        why = "LLaMA-Factory leaves adapters in peft's float32, in more memory than measured"
        departures.append(request.departs("precision", why, may_not_fit=True))
    return ToolKeys(keys, tuple(departures))


def _checkpointing(request: Request) -> ToolKeys:
    value = request.text("activation_checkpointing")
    keys = {"disable_gradient_checkpointing": value not in _CHECKPOINTED, "use_reentrant_gc": False}
    if value.startswith("budget-"):
        return ToolKeys(keys, arguments("activation_checkpointing")(request).departures)
    if value in ("alternate", "selective"):
        why = "LLaMA-Factory checkpoints every block whole, with less memory and more time than measured"
        return ToolKeys(keys, (request.departs("activation_checkpointing", why),))
    return ToolKeys(keys)


def _offload(request: Request) -> ToolKeys:
    """Of what enters checkpointed blocks: Unsloth's way, on the computing stream."""
    if request.text("activation_offload") == "none":
        return ToolKeys({"use_unsloth_gc": False})
    if request.text("activation_checkpointing") in _CHECKPOINTED:
        why = "LLaMA-Factory copies between the computations, not beside them, which is slower than measured"
        return ToolKeys({"use_unsloth_gc": True}, (request.departs("activation_offload", why),))
    why = "LLaMA-Factory offloads the inputs of checkpointed blocks only, and needs more memory than measured"
    return ToolKeys({"use_unsloth_gc": False}, (request.departs("activation_offload", why, may_not_fit=True),))


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    return ToolKeys({"finetuning_type": "lora", "lora_rank": rank} if rank else {"finetuning_type": "full"})


def _targets(request: Request) -> ToolKeys:
    return ToolKeys({"lora_target": ",".join(request.found.targets) or "all"} if request.config["lora_rank"] else {})


def _quantization(request: Request) -> ToolKeys:
    value = request.text("quantization")
    bits = {"int8": 8, "nf4": 4, "nf4-dq": 4}.get(value)
    if bits is None:
        return ToolKeys({"quantization_bit": None})
    return ToolKeys(
        {
            "quantization_bit": bits,
            "quantization_method": "bnb",
            "quantization_type": "nf4",
            "double_quantization": value == "nf4-dq",
        }
    )


def _liger(request: Request) -> dict[str, Any]:
    """One key for the kernels and the loss."""
    return {"enable_liger_kernel": request.text("kernels") == "liger" or request.text("loss") == "fused"}


def _loss(request: Request) -> ToolKeys:
    value, kernels = request.text("loss"), request.text("kernels") == "liger"
    if value == "fused" and not kernels:
        why = "LLaMA-Factory switches Liger's other kernels on with it"
        return ToolKeys(_liger(request), (request.departs("loss", why),))
    if value != "fused" and kernels:
        why = (
            "LLaMA-Factory switches Liger's fused loss on with its kernels, which never holds the logits of all tokens"
        )
        return ToolKeys(_liger(request), (request.departs("loss", why),))
    if value == "chunked":
        why = "LLaMA-Factory holds the logits of all tokens; with enable_liger_kernel it never does"
        return ToolKeys(_liger(request), (request.departs("loss", why, may_not_fit=True),))
    return ToolKeys(_liger(request), anyway=kernels)


def _kernels(request: Request) -> ToolKeys:
    """On already where the loss is fused."""
    return ToolKeys(_liger(request), anyway=request.text("loss") == "fused")


def _attention(request: Request) -> ToolKeys:
    return ToolKeys({"flash_attn": _ATTENTION.get(request.text("attention"), "auto")})


def _fixed(request: Request) -> dict[str, Any]:
    learning = Hyperparameters()
    return {
        "model_name_or_path": request.found.weights,
        "stage": "sft",
        "do_train": True,
        "dataset": "your_dataset",
        "template": "default",
        "cutoff_len": request.found.sequence_length,
        "packing": False,
        "output_dir": "output",
        "learning_rate": learning.lr,
        "lr_scheduler_type": learning.schedule,
        "weight_decay": learning.weight_decay,
        "max_grad_norm": learning.max_grad_norm or 0.0,
        "use_cpu": request.found.device == "cpu",
    }


def _files(document: Document) -> dict[str, str]:
    return {"llamafactory.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="llamafactory",
    title="LLaMA-Factory",
    versions=("0.9.5",),
    run="llamafactory-cli train llamafactory.yaml",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": arguments("micro_batch_size"),
        "gradient_accumulation_steps": arguments("gradient_accumulation_steps"),
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": _rank,
        "lora_alpha": whole_alpha("LLaMA-Factory"),
        "lora_dropout": lora_dropout,
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": arguments("optimizer"),
        "optimizer_offload": arguments("optimizer_offload"),
        "optimizer_in_backward": arguments("optimizer_in_backward"),
        "parameter_offload": arguments("parameter_offload"),
        "compile": arguments("compile"),
        "attention": _attention,
        "loss": _loss,
        "kernels": _kernels,
    },
)
