"""torchtitan: a module with one function that makes a Trainer.Config; torchtitan has no config
files.

Models are torchtitan's own, by flavour. Adapters go beside fused products, whose names differ from
those of the model in transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.core.learning_rates import default_hyperparameters
from autofit.core.quoting import comment
from autofit.core.some_blocks import SomeBlocks
from autofit.core.workload import Hyperparameters
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.template import call, fill, keyword_arguments, literal, template
from autofit.export.tool import LANGUAGE_MODELS, Header, Request, Tool, ToolKeys

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
_CHECKPOINTING = {
    "full": "FullAC.Config()",
    "selective": "SelectiveAC.Config()",
    "alternate": "FullAC.Config()",
}
_CHECKPOINTING_INSTEAD = {
    "alternate": shared.WHOLE_BLOCKS.format("torchtitan"),
    "selective": "torchtitan computes every second product again, "
    "with less memory and more time than measured",
}
_CROSS_ENTROPY = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    keys = {
        "training.dtype": "bfloat16" if value in ("bf16", "fp8") else "float32",
        "training.mixed_precision_param": "float32" if value in ("fp32", "tf32") else "bfloat16",
        "float8": value == "fp8",
    }
    instead = None
    if value == "tf32":
        instead = shared.TF32.format("torchtitan")
    elif value == "fp16-mixed":
        instead = "torchtitan has no float16, and computes in bfloat16"

    frozen = shared.frozen_in_mixed_precision(request)
    if frozen:
        instead = "torchtitan holds frozen weights in float32, in more memory than measured"
    return request.keys("precision", keys, instead, may_not_fit=frozen)


def _checkpointing(request: Request) -> ToolKeys:
    knob = "activation_checkpointing"
    value = request.text(knob)
    if value.startswith("budget-"):
        budget = value.removeprefix("budget-")
        return ToolKeys({knob: f"MemoryBudgetAC.Config(memory_budget={budget})"})

    if SomeBlocks.of(value):
        value = "alternate"  # of which it does as much

    return request.keys(
        knob,
        {knob: _CHECKPOINTING.get(value)},
        _CHECKPOINTING_INSTEAD.get(value),
    )


def _optimizer(request: Request) -> ToolKeys:
    value = request.config.optimizer
    keys = {"implementation": "foreach" if value == "adamw-foreach" else "fused"}
    if value in ("adamw", "adamw-foreach"):
        return ToolKeys(keys)
    state = "whose state takes 8 bytes for each weight that is trained"
    why = f"torchtitan is given AdamW here, {state}"

    return request.keys("optimizer", keys, why, may_not_fit=True)


def _loss(request: Request) -> ToolKeys:
    value = request.config.loss
    if value == "standard":
        return ToolKeys({"loss": _CROSS_ENTROPY})

    why = None
    if value == "fused":
        why = (
            "torchtitan goes through the logits in chunks without Liger's kernel, "
            "and never holds them all either"
        )

    loss = f"ChunkedLossWrapper.Config(loss_fn={_CROSS_ENTROPY})"

    return request.keys("loss", {"loss": loss}, why)


def _data_parallel(request: Request) -> ToolKeys:
    if request.config.data_parallel not in ("ddp", "fsdp"):
        return ToolKeys(as_measured=True)
    return ToolKeys(
        {
            "parallelism.data_parallel_replicate_degree": request.layout.replicate,
            "parallelism.data_parallel_shard_degree": request.layout.shard,
        }
    )


def _reshard(request: Request) -> ToolKeys:
    share = several_devices.reshard(request, "parallelism.fsdp_reshard_after_forward")
    keys = {path: "always" if value else "never" for path, value in share.keys.items()}
    return replace(share, keys=keys)


def _tensor(request: Request) -> ToolKeys:
    """What is between the split layers is whole on every device, as measured."""
    sequence = {"parallelism.enable_sequence_parallel": False}
    return several_devices.split(
        request,
        "tensor_parallel",
        "parallelism.tensor_parallel_degree",
        further=sequence,
    )


def _fixed(request: Request) -> dict[str, Any]:
    module, flavour = _FLAVOURS[request.source.weights]
    return {
        "spec.module": module,
        "spec.flavour": flavour,
        "training.seq_len": request.source.sequence_length,
        "training.steps": 1000,
        # No clipping: torchtitan's default is 1.0.
        "training.max_norm": Hyperparameters().max_grad_norm or 1.0e9,
    }


def _files(
    source: ExportSource,
    keys: Mapping[str, Any],
    header: Header,
    file: str,
) -> dict[str, str]:
    learning = default_hyperparameters(source.config)
    adamw = f"default_adamw(lr={learning.lr}, weight_decay={learning.weight_decay})"
    optimizer = f'replace({adamw}, implementation="{keys["implementation"]}")'

    names = "CompileConfig, TrainingConfig"
    parallel: list[str] = []
    if "parallelism" in keys:
        names = "CompileConfig, ParallelismConfig, TrainingConfig"
        parallel = _argument("parallelism=ParallelismConfig", keys["parallelism"])

    losses = "CrossEntropyLoss"
    if "Chunked" in keys["loss"]:
        losses = "ChunkedLossWrapper, CrossEntropyLoss"
    lora = []
    if "lora" in keys:
        lora = ["from torchtitan.components.lora import LoRAConverter"]
    float_eight = []
    if keys["float8"]:
        float_eight = ["from torchtitan.components.quantization import Float8LinearConverter"]
    checkpointing = str(keys["activation_checkpointing"])
    imported = []
    if keys["activation_checkpointing"]:
        kind, _, _ = checkpointing.partition(".")
        imported = [f"from torchtitan.distributed.activation_checkpoint import {kind}"]

    slots = {
        "head": comment(header),
        "losses": losses,
        "lora": lora,
        "float_eight": float_eight,
        "checkpointing_import": imported,
        "module": keys["spec"]["module"],
        "spec": _spec(keys),
        "loss": str(keys["loss"]),
        "optimizer": [f"        optimizer={optimizer},"],
        "training": _argument("training=TrainingConfig", keys["training"]),
        "config": names,
        "parallelism": parallel,
        "compile": str(keys["compile"]),
        "checkpointing": checkpointing,
    }

    return {file: fill(template("torchtitan"), slots)}


def _argument(function: str, keys: Mapping[str, Any]) -> list[str]:
    """A call as an argument of Trainer.Config, with the comma that follows it."""
    lines = call(function, keyword_arguments(keys), indent=8)
    lines[-1] += ","

    return [f"        {line}" for line in lines]


def _spec(keys: Mapping[str, Any]) -> list[str]:
    """The model, and the converters that change its layers."""
    converters = []
    if keys["float8"]:
        compiled = keys["compile"]
        converters.append(f"Float8LinearConverter.Config(model_compile_enabled={compiled})")
    if "lora" in keys:
        arguments = ", ".join(keyword_arguments(keys["lora"]))
        converters.append(f"LoRAConverter.Config({arguments})")

    given = [literal(keys["spec"]["flavour"])]
    if converters:
        given.append(f"converters=[{', '.join(converters)}]")
    lines = call("model_spec = model_registry", given, indent=4)
    return [f"    {line}" for line in lines]


def _targets(request: Request) -> ToolKeys:
    """The layers that get adapters, by kind."""
    names = _TARGETS.get(str(request.config.lora_targets), _TARGETS["all-linear"])
    keys = {}
    if request.config.lora_rank:
        keys["lora.target_modules"] = names
    return request.keys("lora_targets", keys, shared.by_kind(request))


def _dropout(request: Request) -> ToolKeys:
    if not request.config.lora_dropout:
        return ToolKeys()
    return request.keys("lora_dropout", {}, "torchtitan's adapters have none")


_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def _pipeline(request: Request) -> ToolKeys:
    """Stages of a model, which torchtitan cuts by the number of its layers."""
    schedule = _SCHEDULES.get(str(request.config.get("pipeline_schedule")))
    return several_devices.split(
        request,
        "pipeline_parallel",
        "parallelism.pipeline_parallel_degree",
        "torchtitan cuts stages by the number of layers, autofit by what they compute",
        {
            "parallelism.pipeline_parallel_schedule": schedule,
            "parallelism.pipeline_parallel_microbatch_size": request.config.micro_batch_size,
        },
    )


def _local_batch(request: Request) -> ToolKeys:
    """What a device sees at once: of a pipeline all micro-batches of a step."""
    samples = int(request.config.micro_batch_size or 1)
    if request.source.layout.pipeline > 1:
        samples *= int(request.config.gradient_accumulation_steps or 1)
    return ToolKeys({"training.local_batch_size": samples})


TOOL = Tool(
    title="torchtitan",
    versions=("0.3.0",),
    run="torchrun --nproc_per_node=1 -m torchtitan.train --module {module} --config autofit",
    splits=("tensor_parallel", "context_parallel", "pipeline_parallel"),
    run_several="{torchrun} -m torchtitan.train --module {module} --config autofit",
    tasks=LANGUAGE_MODELS,
    packs=True,
    refuse=lambda source: shared.refuse_unknown(source, _FLAVOURS, "flavour of torchtitan's"),
    fixed=_fixed,
    file="torchtitan_config.py",
    files=_files,
    knobs={
        **shared.missing(
            "torchtitan",
            "activation_offload",
            "optimizer_in_backward",
            "kernels",
            quantization="torchtitan has no quantised weights, and holds them as it trains",
            optimizer_offload="torchtitan offloads with FSDP on several devices only",
            parameter_offload="torchtitan offloads with FSDP on several devices only",
            attention="torchtitan takes the attention of the flavour, PyTorch's flex attention",
        ),
        **several_devices.rows(
            _data_parallel,
            reshard=_reshard,
            offload=partial(several_devices.offload, path="training.enable_cpu_offload"),
            tensor=_tensor,
            context=lambda request: several_devices.split(
                request,
                "context_parallel",
                "parallelism.context_parallel_degree",
                several_devices.RING.format("torchtitan"),
            ),
            pipeline=_pipeline,
        ),
        "precision": _precision,
        "micro_batch_size": _local_batch,
        "gradient_accumulation_steps": lambda request: shared.global_batch(
            request, "training.global_batch_size"
        ),
        "activation_checkpointing": _checkpointing,
        "lora_rank": lambda request: shared.lora_rank(request, "lora.rank"),
        "lora_alpha": lambda request: ToolKeys({"lora.alpha": float(shared.alpha(request))}),
        "lora_dropout": _dropout,
        "lora_targets": _targets,
        "optimizer": _optimizer,
        "compile": shared.compile_by_default,
        "loss": _loss,
    },
)
