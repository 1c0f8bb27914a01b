"""litgpt: the YAML of `litgpt finetune_full --config` and `litgpt finetune_lora --config`. On one
device its finetuning neither checkpoints activations nor compiles, on several it divides weights
and checkpoints; its loss widens the logits in chunks."""

from dataclasses import replace
from pathlib import PurePosixPath

from autofit.core.workload import Hyperparameters
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource, batches_fit
from autofit.export.tool import LANGUAGE_MODELS, Request, Tool, ToolKeys

_INSTEAD = {"tf32": shared.TF32.format("litgpt"), "fp8": shared.FP8.format("litgpt")}
_FEWER_BYTES = "with less memory and more time than measured"
_QUANTIZED = {"int8": "bnb.int8-training", "nf4": "bnb.nf4", "nf4-dq": "bnb.nf4-dq"}


def _precision(request: Request) -> ToolKeys:
    """Quantised weights require one dtype for all the rest."""
    value = request.config.precision
    if value.endswith("-mixed") and request.config.quantization != "none":
        why = (
            "litgpt holds adapters beside quantised weights in bfloat16, "
            "with less memory and precision than measured"
        )
        return request.keys("precision", {"precision": "bf16-true"}, why)

    keys = {"precision": shared.LIGHTNING_PRECISION[value]}
    if shared.frozen_in_mixed_precision(request):
        more = "litgpt holds frozen weights in float32, in more memory than measured"
        return request.keys("precision", keys, more, may_not_fit=True)

    return request.keys("precision", keys, _INSTEAD.get(value))


def _checkpointing(request: Request) -> ToolKeys:
    knob = "activation_checkpointing"
    value = request.text(knob)
    if request.layout.world == 1 and value == "none":
        return ToolKeys()
    if request.layout.world == 1:
        why = "litgpt checkpoints on several devices only, and keeps all for the backward here"
        return request.keys(knob, {}, why, may_not_fit=True)

    if value == "full":
        return ToolKeys(as_measured=True)
    why = f"litgpt checkpoints every block on several devices, {_FEWER_BYTES}"
    return replace(request.keys(knob, {}, why), as_measured=True)


def _data_parallel(request: Request) -> ToolKeys:
    nodes = request.nodes
    keys = {"devices": request.layout.world // nodes}
    if nodes > 1:
        keys["num_nodes"] = nodes
    why = None
    if request.config.data_parallel == "ddp":
        why = f"litgpt divides weights, {_FEWER_BYTES}"

    return replace(request.keys("data_parallel", keys, why), as_measured=True)


def _replicate(request: Request) -> ToolKeys:
    why = None
    if several_devices.is_fsdp(request) and request.layout.replicate > 1:
        why = f"litgpt divides weights over all devices, {_FEWER_BYTES}"
    return replace(request.keys("data_parallel_replicate", {}, why), as_measured=True)


def _reshard(request: Request) -> ToolKeys:
    why = None
    if request.config.reshard_after_forward not in (None, True):
        why = f"litgpt gives weights up between forward and backward, {_FEWER_BYTES}"
    return replace(request.keys("reshard_after_forward", {}, why), as_measured=True)


def _offload(request: Request) -> ToolKeys:
    why = None
    if request.config.fsdp_offload == "cpu":
        why = "litgpt keeps all parts on the devices"
    share = request.keys("fsdp_offload", {}, why, may_not_fit=True)

    return replace(share, as_measured=True)


def _refuse(source: ExportSource) -> str | None:
    if source.layout.world > 1 and source.config.quantization != "none":
        return "litgpt quantises weights on one device only."
    return batches_fit(source)


def _targets(request: Request) -> ToolKeys:
    targets = request.config.lora_targets
    attention = dict.fromkeys(
        (
            "lora_query",
            "lora_key",
            "lora_value",
            "lora_projection",
        ),
        True,
    )
    keys = {
        **attention,
        "lora_mlp": targets != "attention",
        "lora_head": targets == "all-linear+head",
    }

    return request.keys("lora_targets", keys, shared.by_kind(request))


TOOL = Tool(
    title="litgpt",
    versions=("0.5.13",),
    run="litgpt {{finetune_full,finetune_lora}} "
    "--config {file} (finetune_lora where there are adapters)",
    tasks=LANGUAGE_MODELS,
    packs=False,
    refuse=_refuse,
    fixed=lambda request: {
        # a directory stays what it is
        "checkpoint_dir": str(PurePosixPath("checkpoints", request.source.weights)),
        "out_dir": "output",
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
            "activation_offload",
            "optimizer_offload",
            "optimizer_in_backward",
            "parameter_offload",
            "attention",
            "kernels",
            compile="litgpt does not compile when it finetunes, which is slower than measured",
            loss="litgpt holds the logits of all tokens, and widens them in chunks",
        ),
        **several_devices.rows(_data_parallel, _replicate, _reshard, _offload),
        "activation_checkpointing": _checkpointing,
        "precision": _precision,
        **shared.values(micro_batch_size="train.micro_batch_size"),
        "gradient_accumulation_steps": lambda request: shared.global_batch(
            request, "train.global_batch_size"
        ),
        "lora_rank": lambda request: shared.lora_rank(request, "lora_r"),
        "lora_alpha": shared.whole_alpha,
        "lora_dropout": shared.lora_dropout,
        "lora_targets": _targets,
        "quantization": shared.adapter(
            "quantize", lambda request: _QUANTIZED.get(request.config.quantization)
        ),
        "optimizer": lambda request: shared.optimizer_class(
            request,
            "optimizer.class_path",
            "optimizer.init_args",
        ),
    },
)
