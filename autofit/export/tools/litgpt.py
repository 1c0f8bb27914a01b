"""litgpt: the YAML of `litgpt finetune_full --config` and `litgpt finetune_lora --config`. On one device its finetuning
neither checkpoints activations nor compiles; its loss widens the logits in chunks."""

from autofit.core.workload import Hyperparameters
from autofit.export import shared_keys as shared
from autofit.export.tool import Request, Tool, ToolKeys

_INSTEAD = {"tf32": shared.TF32.format("litgpt"), "fp8": shared.FP8.format("litgpt")}
_QUANTIZED = {"int8": "bnb.int8-training", "nf4": "bnb.nf4", "nf4-dq": "bnb.nf4-dq"}


def _precision(request: Request) -> ToolKeys:
    """Quantised weights require one dtype for all the rest."""
    value = request.text("precision")
    if value.endswith("-mixed") and request.text("quantization") != "none":
        why = "litgpt holds adapters beside quantised weights in bfloat16, with less memory and precision than measured"
        return request.keys("precision", {"precision": "bf16-true"}, why)
    frozen = shared.frozen_in_mixed_precision(request)
    more = "litgpt holds frozen weights in float32, in more memory than measured"
    keys = {"precision": shared.LIGHTNING_PRECISION[value]}
    return request.keys("precision", keys, more if frozen else _INSTEAD.get(value), may_not_fit=frozen)


def _targets(request: Request) -> ToolKeys:
    targets = request.text("lora_targets")
    attention = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection"), True)
    keys = {**attention, "lora_mlp": targets != "attention", "lora_head": targets == "all-linear+head"}
    return request.keys("lora_targets", keys, shared.by_kind(request))


TOOL = Tool(
    title="litgpt",
    versions=("0.5.13",),
    run="litgpt {finetune_full,finetune_lora} --config litgpt.yaml (finetune_lora where there are adapters)",
    tasks=("causal-lm",),
    fixed=lambda request: {
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
    },
    knobs={
        **shared.missing(
            "litgpt",
            *("activation_offload", "optimizer_offload", "optimizer_in_backward", "parameter_offload", "attention"),
            "kernels",
            activation_checkpointing="litgpt checkpoints on several devices only, and keeps all for the backward here",
            compile="litgpt does not compile when it finetunes, which is slower than measured",
            loss="litgpt holds the logits of all tokens, and widens them in chunks",
        ),
        "precision": _precision,
        **shared.values(micro_batch_size="train.micro_batch_size"),
        "gradient_accumulation_steps": lambda request: shared.global_batch(request, "train.global_batch_size"),
        "lora_rank": lambda request: shared.lora_rank(request, "lora_r"),
        "lora_alpha": shared.whole_alpha,
        "lora_dropout": shared.lora_dropout,
        "lora_targets": _targets,
        "quantization": shared.adapter("quantize", lambda request: _QUANTIZED.get(request.text("quantization"))),
        "optimizer": lambda each: shared.optimizer_class(each, "optimizer.class_path", "optimizer.init_args"),
    },
)
