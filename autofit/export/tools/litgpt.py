"""litgpt: the YAML of `litgpt finetune_full --config` and `litgpt finetune_lora --config`.

On one device its finetuning neither checkpoints activations nor compiles; its loss widens the logits in chunks.
"""

from __future__ import annotations

from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.shared_keys import (
    FP8,
    LIGHTNING_PRECISION,
    TF32,
    adapter,
    global_batch,
    lora_dropout,
    lora_rank,
    missing,
    optimizer_class,
    value_of,
    whole_alpha,
)
from autofit.export.tool import Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit

_INSTEAD = {"tf32": TF32.format("litgpt"), "fp8": FP8.format("litgpt")}
_QUANTIZED = {"int8": "bnb.int8-training", "nf4": "bnb.nf4", "nf4-dq": "bnb.nf4-dq"}


def _precision(request: Request) -> ToolKeys:
    """Quantised weights require one dtype for all the rest."""
    value = request.text("precision")
    mixed = value.endswith("-mixed")
    if mixed and request.text("quantization") != "none":
        why = "litgpt holds adapters beside quantised weights in bfloat16, with less memory and precision than measured"
        return request.keys("precision", {"precision": "bf16-true"}, why)
    frozen = mixed and bool(request.config["lora_rank"])
    more = "litgpt holds frozen weights in float32, in more memory than measured"
    keys = {"precision": LIGHTNING_PRECISION[value]}
    return request.keys("precision", keys, more if frozen else _INSTEAD.get(value), may_not_fit=frozen)


def _targets(request: Request) -> ToolKeys:
    if not request.config["lora_rank"]:
        return ToolKeys()
    targets = request.text("lora_targets")
    attention = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection"), True)
    return ToolKeys({**attention, "lora_mlp": targets != "attention", "lora_head": targets == "all-linear+head"})


def _fixed(request: Request) -> dict[str, Any]:
    return {
        "checkpoint_dir": f"checkpoints/{request.source.weights}",
        "out_dir": "output",
        "devices": 1,
        "data.class_path": "litgpt.data.JSON",
        "data.init_args.json_path": "path/to/data.json",
        "data.init_args.val_split_fraction": 0.05,
        "train.epochs": 1,
        "train.max_seq_length": request.source.sequence_length,
        "train.lr_warmup_steps": 1,
        "train.max_norm": Hyperparameters().max_grad_norm,
        "seed": 0,
    }


TOOL = Tool(
    name="litgpt",
    title="litgpt",
    versions=("0.5.13",),
    run="litgpt {finetune_full,finetune_lora} --config litgpt.yaml (finetune_lora where there are adapters)",
    tasks=("causal-lm",),
    refuse=batches_fit,
    fixed=_fixed,
    knobs={
        **missing(
            {
                "activation_checkpointing": "litgpt checkpoints on several devices only, and keeps all for the "
                "backward here",
                "activation_offload": "litgpt keeps activations on the device",
                "optimizer_offload": "litgpt keeps the optimizer's state on the device",
                "optimizer_in_backward": "litgpt holds all gradients until the update",
                "parameter_offload": "litgpt keeps frozen weights on the device",
                "compile": "litgpt does not compile when it finetunes, which is slower than measured",
                "attention": "litgpt calls PyTorch's fused attention, which chooses by itself",
                "loss": "litgpt holds the logits of all tokens, and widens them in chunks",
                "kernels": "litgpt has none of Liger's, and keeps more for the backward",
            }
        ),
        "precision": _precision,
        "micro_batch_size": value_of("micro_batch_size", "train.micro_batch_size"),
        "gradient_accumulation_steps": global_batch("train.global_batch_size"),
        "lora_rank": adapter("lora_r", lora_rank),
        "lora_alpha": whole_alpha("litgpt"),
        "lora_dropout": adapter("lora_dropout", lora_dropout),
        "lora_targets": _targets,
        "quantization": adapter("quantize", lambda request: _QUANTIZED.get(request.text("quantization"))),
        "optimizer": optimizer_class("optimizer.class_path", "optimizer.init_args"),
    },
)
