"""torchtune: the YAML of its single-device recipes, `full_finetune_single_device` and `lora_finetune_single_device`.

A recipe is given a builder of torchtune's own for the model: those are known here for the presets that it has one of.
Its chunked loss widens the logits in chunks, but holds them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import yaml_file
from autofit.export.source import ExportSource
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit, lora_alpha, unknown

_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {"fused": True}),
    "adamw-foreach": ("torch.optim.AdamW", {"fused": False, "foreach": True}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "adamw-4bit": ("torchao.optim.AdamW4bit", {}),
    "adamw-fp8": ("torchao.optim.AdamWFp8", {}),
    "adafactor": ("torch.optim.Adafactor", {}),
    "sgd": ("torch.optim.SGD", {}),
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


@dataclass(frozen=True)
class _Builder:
    """A model of torchtune: module and function that build it, its kind in checkpoints, its tokenizer's files.

    `tied`: its head is the embedding.
    """

    module: str
    name: str
    kind: str
    tokenizer: str = "tokenizer.model"
    merges: str | None = None
    tied: bool = False


_LLAMA_3 = "original/tokenizer.model"
_QWEN = ("QWEN2", "vocab.json", "merges.txt")
_BUILDERS = {
    "meta-llama/Llama-2-7b-hf": _Builder("llama2", "llama2_7b", "LLAMA2"),
    "meta-llama/Llama-2-13b-hf": _Builder("llama2", "llama2_13b", "LLAMA2"),
    "meta-llama/Llama-2-70b-hf": _Builder("llama2", "llama2_70b", "LLAMA2"),
    "meta-llama/Meta-Llama-3-8B": _Builder("llama3", "llama3_8b", "LLAMA3", _LLAMA_3),
    "meta-llama/Llama-3.1-8B": _Builder("llama3_1", "llama3_1_8b", "LLAMA3", _LLAMA_3),
    "meta-llama/Llama-3.2-1B": _Builder("llama3_2", "llama3_2_1b", "LLAMA3_2", _LLAMA_3, tied=True),
    "meta-llama/Llama-3.2-3B": _Builder("llama3_2", "llama3_2_3b", "LLAMA3_2", _LLAMA_3, tied=True),
    "mistralai/Mistral-7B-v0.1": _Builder("mistral", "mistral_7b", "MISTRAL"),
    "Qwen/Qwen2.5-0.5B": _Builder("qwen2_5", "qwen2_5_0_5b", *_QWEN, tied=True),
    "Qwen/Qwen2.5-1.5B": _Builder("qwen2_5", "qwen2_5_1_5b_base", *_QWEN, tied=True),
    "Qwen/Qwen2.5-7B": _Builder("qwen2_5", "qwen2_5_7b_base", *_QWEN),
}


def _known(found: ExportSource) -> str | None:
    if found.weights not in _BUILDERS:
        return f"no builder of torchtune's is known here for {found.weights}."
    return batches_fit(found)


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    dtype = "fp32" if value in ("fp32", "tf32") else "bf16"
    instead = {
        "tf32": "torchtune multiplies in float32 unless torch.set_float32_matmul_precision('high') is called",
        "bf16-mixed": "torchtune holds trained weights in bfloat16 too, with less memory and precision than measured",
        "fp16-mixed": "torchtune trains in bfloat16 throughout, with less memory and precision than measured",
        "fp8": "torchtune multiplies in bfloat16 here, which is slower than measured",
    }.get(value)
    return ToolKeys({"dtype": dtype}, (request.departs("precision", instead),) if instead else ())


def _checkpointing(request: Request) -> ToolKeys:
    value = request.text("activation_checkpointing")
    keys = {"enable_activation_checkpointing": value in ("full", "alternate", "selective")}
    if value in ("none", "full"):
        return ToolKeys(keys)
    whole = "torchtune checkpoints every block whole, with less memory and more time than measured"
    none = "torchtune has no budgets, and keeps more for the backward"
    budget = value.startswith("budget-")
    return ToolKeys(keys, (request.departs("activation_checkpointing", none if budget else whole, may_not_fit=budget),))


def _offload(request: Request) -> ToolKeys:
    """Beside checkpointing only: torchtune refuses it without."""
    if request.text("activation_offload") == "none":
        return ToolKeys({"enable_activation_offloading": False})
    if request.text("activation_checkpointing") in ("full", "alternate", "selective"):
        return ToolKeys({"enable_activation_offloading": True})
    why = "torchtune offloads with activation checkpointing only, and keeps activations on the device"
    return ToolKeys(
        {"enable_activation_offloading": False}, (request.departs("activation_offload", why, may_not_fit=True),)
    )


def _rank(request: Request) -> ToolKeys:
    builder, rank = _BUILDERS[request.found.weights], request.config["lora_rank"]
    prefix = f"torchtune.models.{builder.module}."
    if not rank:
        return ToolKeys({"model._component_": prefix + builder.name})
    return ToolKeys({"model._component_": f"{prefix}lora_{builder.name}", "model.lora_rank": rank})


def _adapters(request: Request, key: str, value: Any) -> ToolKeys:
    return ToolKeys({f"model.{key}": value} if request.config["lora_rank"] else {})


def _targets(request: Request) -> ToolKeys:
    if not request.config["lora_rank"]:
        return ToolKeys()
    targets = request.text("lora_targets")
    head, tied = targets == "all-linear+head", _BUILDERS[request.found.weights].tied
    keys = {
        "model.lora_attn_modules": _ATTENTION,
        "model.apply_lora_to_mlp": targets != "attention",
        **({} if tied else {"model.apply_lora_to_output": head}),
    }
    why = "torchtune puts no adapter on a head that is tied to the embedding"
    return ToolKeys(keys, (request.departs("lora_targets", why),) if head and tied else ())


def _quantization(request: Request) -> ToolKeys:
    value = request.text("quantization")
    if not request.config["lora_rank"]:
        return ToolKeys()
    keys = {"model.quantize_base": value in ("nf4", "nf4-dq")}
    if value == "none":
        return ToolKeys(keys)
    if value == "int8":
        why = "torchtune has no 8-bit weights, and holds them in the format of training"
        return ToolKeys(keys, (request.departs("quantization", why, may_not_fit=True),))
    why = "torchtune quantises by torchao, scales of blocks as well, and takes more time than measured"
    return ToolKeys(keys, (request.departs("quantization", why),))


def _optimizer(request: Request) -> ToolKeys:
    value = request.text("optimizer")
    component, options = _OPTIMIZERS.get(value, _OPTIMIZERS["adamw"])
    learning = Hyperparameters()
    keys = {
        "optimizer._component_": component,
        "optimizer.lr": learning.lr,
        "optimizer.weight_decay": learning.weight_decay,
        **{f"optimizer.{name}": option for name, option in options.items()},
    }
    why = "your own is not known here; torch's AdamW is named in its place"
    return ToolKeys(keys, () if value in _OPTIMIZERS else (request.departs("optimizer", why, may_not_fit=True),))


def _in_backward(request: Request) -> ToolKeys:
    """Of the recipe for full training alone."""
    on = bool(request.config["optimizer_in_backward"])
    if not request.config["lora_rank"]:
        return ToolKeys({"optimizer_in_bwd": on})
    why = "torchtune's recipe for adapters holds all gradients until the update"
    return ToolKeys({}, (request.departs("optimizer_in_backward", why, may_not_fit=True),) if on else ())


def _compile(request: Request) -> ToolKeys:
    """Block by block, as it was measured."""
    value = request.text("compile")
    why = "torchtune compiles in its default mode, without timing several kernels"
    other = value not in ("none", "default")
    return ToolKeys({"compile": value != "none"}, (request.departs("compile", why),) if other else ())


def _loss(request: Request) -> ToolKeys:
    if request.text("loss") == "standard":
        return ToolKeys({"loss._component_": "torch.nn.CrossEntropyLoss"})
    why = "torchtune holds the logits of all tokens, and widens them in chunks"
    return ToolKeys({"loss._component_": _CHUNKED}, (request.departs("loss", why, may_not_fit=True),))


def _fixed(request: Request) -> dict[str, Any]:
    found, builder = request.found, _BUILDERS[request.found.weights]
    merges = {"tokenizer.merges_file": f"path/to/weights/{builder.merges}"} if builder.merges else {}
    tokenizer = "llama3" if builder.module.startswith("llama3") else builder.module
    # What the recipe for adapters must be given; constant, for a cosine of no cycles stays where it begins.
    rest: dict[str, Any] = (
        {}
        if not request.config["lora_rank"]
        else {
            "lr_scheduler._component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "lr_scheduler.num_warmup_steps": 0,
            "lr_scheduler.num_cycles": 0.0,
            "save_adapter_weights_only": False,
        }
    )
    return {
        "output_dir": "output",
        "tokenizer._component_": f"torchtune.models.{tokenizer}.{tokenizer}_tokenizer",
        "tokenizer.path": f"path/to/weights/{builder.tokenizer}",
        **merges,
        "tokenizer.max_seq_len": found.sequence_length,
        "dataset._component_": "torchtune.datasets.text_completion_dataset",
        "dataset.source": "path/to/dataset",
        "dataset.packed": False,
        "seed": 0,
        "shuffle": True,
        "model._component_": "",
        "checkpointer._component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpointer.checkpoint_dir": "path/to/weights",
        "checkpointer.checkpoint_files": ["model.safetensors"],
        "checkpointer.recipe_checkpoint": None,
        "checkpointer.output_dir": "output",
        "checkpointer.model_type": builder.kind,
        "resume_from_checkpoint": False,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "clip_grad_norm": Hyperparameters().max_grad_norm,
        **rest,
        "device": "cpu" if found.device == "cpu" else "cuda",
        "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
        "metric_logger.log_dir": "output/logs",
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "profiler._component_": "torchtune.training.setup_torch_profiler",
        "profiler.enabled": False,
    }


def _files(document: Document) -> dict[str, str]:
    return {"torchtune.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="torchtune",
    title="torchtune",
    versions=("0.6.1",),
    run="tune run {full,lora}_finetune_single_device --config torchtune.yaml (lora_ where there are adapters)",
    tasks=("causal-lm",),
    refuse=_known,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": lambda request: ToolKeys({"batch_size": request.config["micro_batch_size"]}),
        "gradient_accumulation_steps": lambda request: ToolKeys(
            {"gradient_accumulation_steps": request.config["gradient_accumulation_steps"]}
        ),
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": _rank,
        "lora_alpha": lambda request: _adapters(request, "lora_alpha", lora_alpha(request)),
        "lora_dropout": lambda request: _adapters(request, "lora_dropout", request.config["lora_dropout"] or 0.0),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "optimizer_offload": unknown(
            "optimizer_offload", "torchtune's recipes keep the optimizer's state on the device"
        ),
        "optimizer_in_backward": _in_backward,
        "parameter_offload": unknown("parameter_offload", "torchtune's recipes keep frozen weights on the device"),
        "compile": _compile,
        "attention": unknown("attention", "torchtune calls PyTorch's fused attention, which chooses by itself"),
        "loss": _loss,
        "kernels": unknown("kernels", "torchtune has none of Liger's, and keeps more for the backward"),
    },
)
