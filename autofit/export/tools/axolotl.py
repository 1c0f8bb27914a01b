"""axolotl: the YAML of `axolotl train`.

It loads weights in the format of its autocast. Norms and embeddings it holds in float32, unless there are adapters, or
an attention that takes no float32: without autocast such a model fails at its first linear layer, so that full training
in bfloat16 is told as autocast. Keys of plugins count only where the plugin is named.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.deviation import Deviation
from autofit.export.formats import yaml_file
from autofit.export.tool import Document, Request, Tool, ToolKeys
from autofit.export.trainer import OPTIMIZERS, batch_sizes
from autofit.export.trainer_tools import arguments, batches_fit, keywords, lora_dropout, trainer_case, whole_alpha

_LIGER = "axolotl.integrations.liger.LigerPlugin"
_KEPT = ["attention", *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"))]
# Triton kernels that axolotl switches on by itself beside adapters.
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_OWN = {"adamw-4bit": "ao_adamw_4bit", "adamw-fp8": "ao_adamw_fp8"}  # torchao's, in the blocks that were measured


def _precision(request: Request) -> ToolKeys:
    value, adapters = request.text("precision"), bool(request.config["lora_rank"])
    bare = value == "bf16" and adapters
    keys: dict[str, Any] = {
        "bf16": value in ("bf16-mixed", "fp8") or (value == "bf16" and not adapters),
        "fp16": value == "fp16-mixed",
        "bfloat16": bare,
        "float16": False,
        "tf32": value == "tf32",
        "fp8": value == "fp8",
    }
    if adapters:
        keys["peft_autocast_adapter_dtype"] = value not in ("bf16", "fp8")
    return ToolKeys(keys, _dtypes_otherwise(request, value, adapters=adapters))


def _dtypes_otherwise(request: Request, value: str, *, adapters: bool) -> tuple[Deviation, ...]:
    if value == "fp8":
        why = "axolotl chooses the layers by itself, and runs the rest under autocast with norms in float32"
        return (request.departs("precision", why, may_not_fit=True),)
    if adapters:
        if value == "bf16" and request.text("quantization") != "none":
            why = "peft holds adapters beside quantised weights in float32, in more memory than measured"
            return (request.departs("precision", why, may_not_fit=True),)
        return ()
    instead = {
        "bf16": "axolotl holds embeddings and norms in float32 and runs under autocast, in more memory than measured",
        "bf16-mixed": "axolotl holds all weights but embeddings and norms in bfloat16, with less memory and precision",
        "fp16-mixed": "axolotl holds the weights in float16, whose gradients its loss scaler refuses; use bf16-mixed",
    }.get(value)
    return (request.departs("precision", instead, may_not_fit=value == "bf16"),) if instead else ()


def _micro_batch(request: Request) -> ToolKeys:
    micro, _ = batch_sizes(trainer_case(request))
    return ToolKeys({"micro_batch_size": micro, "eval_batch_size": micro})


def _checkpointing(request: Request) -> ToolKeys:
    """By Trainer's names of before transformers 5.23, whose `every_n_layers` they have."""
    value = request.text("activation_checkpointing")
    if value.startswith("budget-"):
        told = arguments("activation_checkpointing")(request)
        return ToolKeys({"gradient_checkpointing": False}, told.departures)
    if value == "none":
        return ToolKeys({"gradient_checkpointing": False})
    options: dict[str, Any] = {"use_reentrant": False}
    keys: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    if value == "alternate":
        return ToolKeys(
            {**keys, "gradient_checkpointing_kwargs": {**options, "every_n_layers": 2}},
            arguments("activation_checkpointing")(request).departures,
        )
    if value != "selective":
        return ToolKeys(keys)
    adapters = bool(request.config["lora_rank"])
    why = "beside adapters axolotl keeps the outputs of attention alone, with less memory and more time than measured"
    departures = (request.departs("activation_checkpointing", why),) if adapters else ()
    return ToolKeys({**keys, "selective_checkpointing": {"save": ["attention"] if adapters else _KEPT}}, departures)


def _offload(request: Request) -> ToolKeys:
    """What enters checkpointed blocks; without checkpointing axolotl refuses to offload."""
    if request.text("activation_offload") == "none":
        return ToolKeys({"activation_offloading": False})
    if request.text("activation_checkpointing") in ("full", "alternate", "selective"):
        return ToolKeys({"activation_offloading": "hidden_states"})
    why = "axolotl offloads with activation checkpointing only, and keeps activations on the device"
    return ToolKeys({"activation_offloading": False}, (request.departs("activation_offload", why, may_not_fit=True),))


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    if not rank:
        return ToolKeys()
    adapter = "qlora" if request.text("quantization") in ("nf4", "nf4-dq") else "lora"
    return ToolKeys({"adapter": adapter, "lora_r": rank, **dict.fromkeys(_LORA_KERNELS, False)})


def _targets(request: Request) -> ToolKeys:
    if not request.config["lora_rank"]:
        return ToolKeys()
    targets = list(request.found.targets)
    return ToolKeys({"lora_target_modules": targets} if targets else {"lora_target_linear": True})


def _quantization(request: Request) -> ToolKeys:
    value = request.text("quantization")
    keys: dict[str, Any] = {"load_in_8bit": value == "int8", "load_in_4bit": value in ("nf4", "nf4-dq")}
    if keys["load_in_4bit"]:
        keys["bnb_config_kwargs"] = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": value == "nf4-dq",
        }
    return ToolKeys(keys)


def _optimizer(request: Request) -> ToolKeys:
    value = request.text("optimizer")
    if value in _OWN:
        return ToolKeys({"optimizer": _OWN[value]})
    return ToolKeys({"optimizer": OPTIMIZERS.get(value, "adamw_torch")}, keywords(request, "optimizer").departures)


def _compile(request: Request) -> ToolKeys:
    """The mode that times several kernels has no name here; what it sets has."""
    value = request.text("compile")
    if value == "none":
        return ToolKeys({"torch_compile": False})
    keys: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "default"}
    if value == "max-autotune-no-cudagraphs":
        keys["torch_compile_options"] = {"max_autotune_gemm": True, "triton.cudagraphs": False}
    return ToolKeys(keys, keywords(request, "compile").departures)


def _attention(request: Request) -> ToolKeys:
    said = keywords(request, "attention")
    return ToolKeys({"attn_implementation": said.model.get("attn_implementation", "sdpa")}, said.departures)


def _liger(request: Request) -> dict[str, Any]:
    """The plugin's keys, the same for both of its knobs; none where neither is on."""
    kernels, fused = request.text("kernels") == "liger", request.text("loss") == "fused"
    if not (kernels or fused):
        return {}
    parts = dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation"), kernels)
    return {"plugins": [_LIGER], **parts, "liger_cross_entropy": False, "liger_fused_linear_cross_entropy": fused}


def _loss(request: Request) -> ToolKeys:
    """axolotl's chunked_cross_entropy holds the logits of all tokens, and only widens them in chunks."""
    if request.text("loss") != "chunked":
        return ToolKeys(_liger(request))
    why = "axolotl holds the logits of all tokens; Liger's plugin with liger_fused_linear_cross_entropy never does"
    return ToolKeys(_liger(request), (request.departs("loss", why, may_not_fit=True),))


def _fixed(request: Request) -> dict[str, Any]:
    learning = Hyperparameters()
    return {
        "base_model": request.found.weights,
        "datasets": [{"path": "path/to/dataset", "type": "completion"}],
        "output_dir": "output",
        "sequence_len": request.found.sequence_length,
        "sample_packing": False,
        "val_set_size": 0.0,
        "num_epochs": 1,
        "learning_rate": learning.lr,
        "lr_scheduler": learning.schedule,
        "weight_decay": learning.weight_decay,
        "max_grad_norm": learning.max_grad_norm or 0.0,
    }


def _files(document: Document) -> dict[str, str]:
    return {"axolotl.yaml": yaml_file(document.head, document.keys)}


TOOL = Tool(
    name="axolotl",
    title="axolotl",
    versions=("0.19.0",),
    run="axolotl train axolotl.yaml",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": arguments("gradient_accumulation_steps"),
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": _rank,
        "lora_alpha": whole_alpha("axolotl"),
        "lora_dropout": lora_dropout,
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "optimizer_offload": arguments("optimizer_offload"),
        "optimizer_in_backward": arguments("optimizer_in_backward"),
        "parameter_offload": lambda request: ToolKeys({"layer_offloading": request.text("parameter_offload") == "cpu"}),
        "compile": _compile,
        "attention": _attention,
        "loss": _loss,
        "kernels": lambda request: ToolKeys(_liger(request)),
    },
)
