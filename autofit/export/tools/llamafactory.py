"""LLaMA-Factory: the YAML of `llamafactory-cli train`.

It checkpoints unless a key of opposite meaning says otherwise, in its own way without every second
block or offloading. Weights come in the dtype of the checkpoint unless another is named.
"""

from typing import Any

from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource, batches_fit
from autofit.export.tool import Request, Tool, ToolKeys, trained_by
from autofit.export.trainer import learning

_ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash": "fa2"}


def _precision(request: Request) -> ToolKeys:
    """The numbers of weights and products; adapters stay in peft's float32."""
    value = request.config.precision
    is_pure = value in ("bf16", "fp8")
    keys: dict[str, Any] = {
        "pure_bf16": is_pure,
        "bf16": value == "bf16-mixed",
        "fp16": value == "fp16-mixed",
        "infer_dtype": "auto",
    }
    if value in ("fp32", "tf32"):
        keys["infer_dtype"] = "float32"
        if request.source.device == "cuda":
            keys["tf32"] = value == "tf32"

    deviations = []
    if value == "fp8":
        instead = shared.FP8.format("LLaMA-Factory")
        deviations.append(request.deviation("precision", instead))
    if is_pure and request.config.lora_rank:
        instead = "LLaMA-Factory leaves adapters in peft's float32, in more memory than measured"
        deviations.append(request.deviation("precision", instead, may_not_fit=True))

    return ToolKeys(keys, tuple(deviations))


def _refuse(source: ExportSource) -> str | None:
    """Its check of `pure_bf16` asks for a card."""
    if source.device == "cpu" and source.config.precision in ("bf16", "fp8"):
        return "LLaMA-Factory holds weights in bfloat16 on a GPU only."
    return batches_fit(source)


def _checkpointing(request: Request) -> ToolKeys:
    off = not checkpoints_blocks(request.config.activation_checkpointing)
    keys = {"disable_gradient_checkpointing": off, "use_reentrant_gc": False}
    return shared.whole_blocks_of_trainer(request, keys)


def _quantization(request: Request) -> ToolKeys:
    value = request.config.quantization
    if value == "none":
        return ToolKeys({"quantization_bit": None})
    keys = {
        "quantization_bit": 8 if value == "int8" else 4,
        "quantization_method": "bnb",
        "quantization_type": "nf4",
    }

    return ToolKeys({**keys, "double_quantization": value == "nf4-dq"})


TOOL = Tool(
    title="LLaMA-Factory",
    versions=("0.9.5",),
    run="llamafactory-cli train {file}",
    run_several="accelerate launch --config_file llamafactory_accelerate.yaml{further} -m llamafactory.launcher {file}",
    files=several_devices.launched("llamafactory"),
    tasks=trained_by("llamafactory"),
    packing="packing",
    refuse=_refuse,
    fixed=lambda request: {
        "model_name_or_path": request.source.weights,
        "stage": "sft",
        **shared.of_task(request),
        "do_train": True,
        "dataset": "your_dataset",
        "template": "default",
        "cutoff_len": request.source.sequence_length,
        "neat_packing": request.source.apart,
        "output_dir": "output",
        **learning(request.config),
        "use_cpu": request.source.device == "cpu",
    },
    knobs={
        **shared.trainer_arguments(*shared.TRAINER_ALONE, "compile"),
        **several_devices.accelerate("accelerate."),
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        "activation_offload": lambda request: (
            shared.offload_of_blocks(  # Unsloth's way, on the computing stream
                *(request, {"use_unsloth_gc": False}, {"use_unsloth_gc": True}),
                "LLaMA-Factory offloads the inputs of checkpointed blocks only, and needs more memory than measured",
                slower="LLaMA-Factory copies between the computations, not beside them, which is slower than measured",
            )
        ),
        "lora_rank": lambda request: shared.lora_rank(
            request,
            "lora_rank",
            beside={"finetuning_type": "lora"},
            without={"finetuning_type": "full"},
        ),
        "lora_alpha": shared.whole_alpha,
        "lora_dropout": shared.lora_dropout,
        **shared.kinds_of_adapter(lora_plus="loraplus_lr_ratio"),
        "lora_targets": shared.adapter(
            "lora_target", lambda request: ",".join(request.source.targets) or "all"
        ),
        "quantization": _quantization,
        "attention": lambda request: ToolKeys(
            {"flash_attn": _ATTENTION.get(str(request.config.attention), "auto")}
        ),
        "reference": lambda request: shared.reference(request, None),
        **shared.liger_with_its_loss("enable_liger_kernel"),
    },
)
