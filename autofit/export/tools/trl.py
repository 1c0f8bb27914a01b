"""TRL: the YAML of `trl sft --config`, keys of SFTConfig, ModelConfig and ScriptArguments side by side.

Its loss goes through a fused output head, in chunks, whatever the config says: the logits of all tokens are never held,
and an adapter on the head is refused. Adapters beside weights that are not quantised are held in float32 (peft's
default), beside quantised ones in bfloat16.
"""

from __future__ import annotations

from autofit.core.workload import Hyperparameters
from autofit.export.deviation import Deviation
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import (
    RENAMED,
    arguments,
    batches_fit,
    keywords,
    lora_dropout,
    named_before,
    whole_alpha,
)

_REGIONAL = "env.ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
_OF_BLOCKS = ("full", "alternate", "selective")


def _precision(request: Request) -> ToolKeys:
    """The dtype of weights, which is float32 in TRL unless said otherwise, beside what Trainer is told."""
    told, said = arguments("precision")(request), keywords(request, "precision")
    held = "float32" if request.text("quantization") == "none" else "bfloat16"
    departures = told.departures
    if request.config["lora_rank"] and said.trained_dtype != held:
        more = held == "float32"
        instead = f"TRL holds adapters in {held}, {'more' if more else 'less'} memory than measured"
        departures += (request.departs("precision", instead, may_not_fit=more),)
    return ToolKeys({"dtype": said.model["dtype"], **told.keys}, departures)


def _checkpointing(request: Request) -> ToolKeys:
    """By the names of the transformers that it was measured with."""
    told = arguments("activation_checkpointing")(request)
    keys, departures = dict(told.keys), told.departures
    if request.text("activation_checkpointing") == "selective":
        keys["activation_checkpointing_kwargs"] |= {"selective": True}
        instead = "TRL keeps the outputs of attention, not those of other products, with less memory and more time"
        departures = (request.departs("activation_checkpointing", f"{instead} than measured"),)
    return ToolKeys(named_before(keys) if request.measured_before("transformers", RENAMED) else keys, departures)


def _offload(request: Request) -> ToolKeys:
    """Of checkpointed blocks, an option of checkpointing; of everything else TRL's own."""
    if request.text("activation_offload") == "none":
        return ToolKeys({"activation_offloading": False})
    if request.text("activation_checkpointing") in _OF_BLOCKS:
        told = arguments("activation_offload")(request)
        return ToolKeys({"activation_offloading": False, **told.keys}, told.departures)
    return ToolKeys({"activation_offloading": True})


def _quantization(request: Request) -> ToolKeys:
    value = request.text("quantization")
    return ToolKeys(
        {
            "load_in_4bit": value in ("nf4", "nf4-dq"),
            "load_in_8bit": value == "int8",
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": value == "nf4-dq",
        }
    )


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    return ToolKeys({"use_peft": True, "lora_r": rank} if rank else {"use_peft": False})


def _targets(request: Request) -> ToolKeys:
    if not request.config["lora_rank"]:
        return ToolKeys()
    targets = [name for name in request.found.targets if name not in request.found.outputs]
    departures: tuple[Deviation, ...] = ()
    if request.text("lora_targets") == "all-linear+head":
        departures = (request.departs("lora_targets", "TRL refuses an adapter on the output head; it has none"),)
    return ToolKeys({"lora_target_modules": targets or ["all-linear"]}, departures)


def _compile(request: Request) -> ToolKeys:
    """accelerate compiles block by block, as was measured, when the environment says so, which TRL's YAML can set."""
    told = arguments("compile")(request)
    return ToolKeys({**told.keys, **({_REGIONAL: "1"} if request.text("compile") != "none" else {})})


def _attention(request: Request) -> ToolKeys:
    said = keywords(request, "attention")
    return ToolKeys({"attn_implementation": said.model.get("attn_implementation", "sdpa")}, said.departures)


def _loss(request: Request) -> ToolKeys:
    instead = {
        "standard": "TRL goes through the logits in chunks and never holds them all, in less memory than measured",
        "fused": "TRL goes through the logits in chunks without Liger's kernel, and never holds them all either",
    }.get(request.text("loss"))
    return ToolKeys({"loss_type": "nll"}, (request.departs("loss", instead),) if instead else (), anyway=not instead)


def _kernels(request: Request) -> ToolKeys:
    """Liger's kernels without its losses, which TRL refuses."""
    if request.text("kernels") != "liger":
        return ToolKeys({"use_liger_kernel": False})
    without = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    return ToolKeys({"use_liger_kernel": True, "liger_kernel_config": without})


def _fixed(request: Request) -> dict[str, object]:
    learning = Hyperparameters()
    return {
        "model_name_or_path": request.found.weights,
        "dataset_name": "path/to/dataset",
        "output_dir": "output",
        "max_length": request.found.sequence_length,
        "packing": False,
        "learning_rate": learning.lr,
        "lr_scheduler_type": learning.schedule,
        "weight_decay": learning.weight_decay,
        "max_grad_norm": learning.max_grad_norm or 0.0,
        "use_cpu": request.found.device == "cpu",
    }


def _files(document: Document) -> dict[str, str]:
    return {"trl.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="trl",
    title="TRL",
    versions=("1.16.0",),
    run="trl sft --config trl.yaml (with the transformers that it was measured with, or a later 5.x)",
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
        "lora_alpha": whole_alpha("TRL"),
        "lora_dropout": lora_dropout,
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": arguments("optimizer"),
        "optimizer_offload": arguments("optimizer_offload"),
        "optimizer_in_backward": arguments("optimizer_in_backward"),
        "parameter_offload": arguments("parameter_offload"),
        "compile": _compile,
        "attention": _attention,
        "loss": _loss,
        "kernels": _kernels,
    },
)
