"""torchtitan: a module with one function that makes a Trainer.Config; torchtitan has no config files.

Models are torchtitan's own, by the flavours that it has; adapters go beside fused products, whose names are not those
of the model in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import comment
from autofit.export.source import ExportSource
from autofit.export.template import call, fill, literal, template
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, lora_alpha, unknown

_FLAVOURS = {
    "meta-llama/Meta-Llama-3-8B": ("llama3", "8B"),
    "meta-llama/Llama-3.1-8B": ("llama3", "8B"),
    "meta-llama/Llama-3.2-1B": ("llama3", "1B"),
    "meta-llama/Llama-3.2-3B": ("llama3", "3B"),
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen/Qwen3-8B": ("qwen3", "8B"),
}
_TARGETS = {
    "attention": ["wqkv", "wo"],
    "all-linear": ["wqkv", "wo", "w1", "w2", "w3"],
    "all-linear+head": ["wqkv", "wo", "w1", "w2", "w3", "lm_head"],
}
_CHECKPOINTING = {"full": "FullAC", "selective": "SelectiveAC", "alternate": "FullAC"}
_CROSS_ENTROPY = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"


def _known(found: ExportSource) -> str | None:
    if found.weights not in _FLAVOURS:
        return f"no flavour of torchtitan's is known here for {found.weights}."
    return batches_fit(found)


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    narrow = value in ("bf16", "fp8")
    keys = {
        "training.dtype": "bfloat16" if narrow else "float32",
        "training.mixed_precision_param": "float32" if value in ("fp32", "tf32") else "bfloat16",
        "float8": value == "fp8",
    }
    instead = {
        "tf32": "torchtitan multiplies in float32 unless torch.set_float32_matmul_precision('high') is called",
        "fp16-mixed": "torchtitan has no float16, and computes in bfloat16",
    }.get(value)
    if value.endswith("-mixed") and request.config["lora_rank"]:
        frozen = "torchtitan holds frozen weights in float32, in more memory than measured"
        return ToolKeys(keys, (request.departs("precision", frozen, may_not_fit=True),))
    return ToolKeys(keys, (request.departs("precision", instead),) if instead else ())


def _micro_batch(request: Request) -> ToolKeys:
    return ToolKeys({"training.local_batch_size": request.config["micro_batch_size"]})


def _accumulation(request: Request) -> ToolKeys:
    """Worked out by torchtitan from the whole batch."""
    micro, steps = request.config["micro_batch_size"], request.config["gradient_accumulation_steps"]
    return ToolKeys({"training.global_batch_size": int(micro or 1) * int(steps or 1)})


def _checkpointing(request: Request) -> ToolKeys:
    value = request.text("activation_checkpointing")
    knob = "activation_checkpointing"
    if value.startswith("budget-"):
        return ToolKeys({knob: f"MemoryBudgetAC.Config(memory_budget={value.removeprefix('budget-')})"})
    kind = _CHECKPOINTING.get(value)
    instead = {
        "alternate": "torchtitan checkpoints every block whole, with less memory and more time than measured",
        "selective": "torchtitan computes every second product again, with less memory and more time than measured",
    }.get(value)
    departures = (request.departs(knob, instead),) if instead else ()
    return ToolKeys({knob: f"{kind}.Config()" if kind else None}, departures)


def _lora(request: Request, key: str, value: Any) -> ToolKeys:
    return ToolKeys({f"lora.{key}": value} if request.config["lora_rank"] else {})


def _dropout(request: Request) -> ToolKeys:
    why = "torchtitan's adapters have none"
    return ToolKeys({}, (request.departs("lora_dropout", why),) if request.config["lora_dropout"] else ())


def _optimizer(request: Request) -> ToolKeys:
    value = request.text("optimizer")
    keys = {"implementation": "foreach" if value == "adamw-foreach" else "fused"}
    if value in ("adamw", "adamw-foreach"):
        return ToolKeys(keys)
    why = "torchtitan is given AdamW here, whose state takes 8 bytes for each weight that is trained"
    return ToolKeys(keys, (request.departs("optimizer", why, may_not_fit=True),))


def _compile(request: Request) -> ToolKeys:
    """Block by block, as it was measured."""
    value = request.text("compile")
    why = "torchtitan compiles in its default mode, without timing several kernels"
    other = value not in ("none", "default")
    return ToolKeys({"compile": value != "none"}, (request.departs("compile", why),) if other else ())


def _loss(request: Request) -> ToolKeys:
    value = request.text("loss")
    loss = _CROSS_ENTROPY if value == "standard" else f"ChunkedLossWrapper.Config(loss_fn={_CROSS_ENTROPY})"
    why = "torchtitan goes through the logits in chunks without Liger's kernel, and never holds them all either"
    return ToolKeys({"loss": loss}, (request.departs("loss", why),) if value == "fused" else ())


def _fixed(request: Request) -> dict[str, Any]:
    module, flavour = _FLAVOURS[request.found.weights]
    return {
        "spec.module": module,
        "spec.flavour": flavour,
        "training.seq_len": request.found.sequence_length,
        "training.steps": 1000,
        # No clipping: torchtitan's default is 1.0.
        "training.max_norm": Hyperparameters().max_grad_norm or 1.0e9,
    }


def _files(document: Document) -> dict[str, str]:
    keys = document.keys
    learning = Hyperparameters()
    training = call("training=TrainingConfig", _named(keys["training"]), indent=8)
    adamw = f"default_adamw(lr={learning.lr}, weight_decay={learning.weight_decay})"
    slots = {
        "head": comment(document.head),
        "imports": _imports(keys),
        "spec": _spec(keys),
        "loss": str(keys["loss"]),
        "optimizer": [f'        optimizer=replace({adamw}, implementation="{keys["implementation"]}"),'],
        "training": _indented(training),
        "compile": str(keys["compile"]),
        "checkpointing": str(keys["activation_checkpointing"]),
    }
    return {"torchtitan_config.py": fill(template("torchtitan"), slots)}


def _indented(lines: list[str]) -> list[str]:
    """As an argument of the call around it."""
    return [f"        {line}" for line in (*lines[:-1], f"{lines[-1]},")]


def _imports(keys: Mapping[str, Any]) -> list[str]:
    chunked = ["ChunkedLossWrapper"] if "Chunked" in keys["loss"] else []
    kind = str(keys["activation_checkpointing"]).partition(".")[0]
    checkpointing = f"from torchtitan.distributed.activation_checkpoint import {kind}"
    return [
        "from dataclasses import replace",
        "",
        f"from torchtitan.components.loss import {', '.join([*chunked, 'CrossEntropyLoss'])}",
        *(["from torchtitan.components.lora import LoRAConverter"] if "lora" in keys else []),
        "from torchtitan.components.optimizer import default_adamw",
        *(["from torchtitan.components.quantization import Float8LinearConverter"] if keys["float8"] else []),
        "from torchtitan.config import CompileConfig, TrainingConfig",
        *([checkpointing] if keys["activation_checkpointing"] else []),
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{keys['spec']['module']} import model_registry",
        "from torchtitan.trainer import Trainer",
    ]


def _spec(keys: Mapping[str, Any]) -> list[str]:
    """The model, with what is changed of its layers."""
    converters = []
    if keys["float8"]:
        converters.append(f"Float8LinearConverter.Config(model_compile_enabled={keys['compile']})")
    if "lora" in keys:
        converters.append(f"LoRAConverter.Config({', '.join(_named(keys['lora']))})")
    given = [literal(keys["spec"]["flavour"]), *([f"converters=[{', '.join(converters)}]"] if converters else [])]
    return [f"    {line}" for line in call("model_spec = model_registry", given, indent=4)]


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={literal(value)}" for name, value in values.items()]


TOOL = Tool(
    name="torchtitan",
    title="torchtitan",
    versions=("0.3.0",),
    run="torchrun --nproc_per_node=1 -m torchtitan.train --module torchtitan_config --config autofit",
    tasks=("causal-lm",),
    refuse=_known,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": _accumulation,
        "activation_checkpointing": _checkpointing,
        "activation_offload": unknown("activation_offload", "torchtitan keeps activations on the device"),
        "lora_rank": lambda request: _lora(request, "rank", request.config["lora_rank"]),
        "lora_alpha": lambda request: _lora(request, "alpha", float(lora_alpha(request))),
        "lora_dropout": _dropout,
        "lora_targets": lambda request: _lora(request, "target_modules", _TARGETS.get(request.text("lora_targets"))),
        "quantization": unknown("quantization", "torchtitan has no quantised weights, and holds them as it trains"),
        "optimizer": _optimizer,
        "optimizer_offload": unknown("optimizer_offload", "torchtitan offloads with FSDP on several devices only"),
        "optimizer_in_backward": unknown("optimizer_in_backward", "torchtitan holds all gradients until the update"),
        "parameter_offload": unknown("parameter_offload", "torchtitan offloads with FSDP on several devices only"),
        "compile": _compile,
        "attention": unknown("attention", "torchtitan takes the attention of the flavour, PyTorch's flex attention"),
        "loss": _loss,
        "kernels": unknown("kernels", "torchtitan has none of Liger's, and keeps more for the backward"),
    },
)
