"""torchtune: the YAML of its recipes `full_finetune_single_device` and
`lora_finetune_single_device`, and of those that end in `distributed`, which divide weights by FSDP2
over all devices.

A recipe takes one of torchtune's own builders; this file names those of the presets. Its chunked
loss widens the logits in chunks, but holds them all.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.tool import LANGUAGE_MODELS, Request, Tool, ToolKeys

_PRECISION_INSTEAD = {
    "tf32": shared.TF32.format("torchtune"),
    "bf16-mixed": "torchtune holds trained weights in bfloat16 too, "
    "with less memory and precision than measured",
    "fp16-mixed": "torchtune trains in bfloat16 throughout, "
    "with less memory and precision than measured",
    "fp8": shared.FP8.format("torchtune"),
}


@dataclass(frozen=True)
class _Builder:
    """A model of torchtune.

    Attributes:
        module, name: those of its function, below `torchtune.models`.
        kind: what checkpoints call it.
        tokenizer, merges: the files of its tokenizer.
        tied: whether its head is the embedding.
    """

    module: str
    name: str
    kind: str
    tokenizer: str = "tokenizer.model"
    merges: str | None = None
    tied: bool = False


_PLAN = {"tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan"}
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


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    dtype = "fp32" if value in ("fp32", "tf32") else "bf16"
    return request.keys("precision", {"dtype": dtype}, _PRECISION_INSTEAD.get(value))


def _rank(request: Request) -> ToolKeys:
    builder = _BUILDERS[request.source.weights]
    rank = request.config.lora_rank
    prefix = f"torchtune.models.{builder.module}."
    if not rank:
        return ToolKeys({"model._component_": prefix + builder.name})

    return ToolKeys(
        {
            "model._component_": f"{prefix}lora_{builder.name}",
            "model.lora_rank": rank,
        }
    )


def _targets(request: Request) -> ToolKeys:
    targets = request.config.lora_targets
    adapts_head = targets == "all-linear+head"
    keys = {
        "model.lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "model.apply_lora_to_mlp": targets != "attention",
    }
    instead = shared.by_kind(request)
    if not _BUILDERS[request.source.weights].tied:
        keys["model.apply_lora_to_output"] = adapts_head
    elif adapts_head:
        instead = "torchtune puts no adapter on a head that is tied to the embedding"

    return request.keys("lora_targets", keys, instead)


def _quantization(request: Request) -> ToolKeys:
    value = request.config.quantization
    if not request.config.lora_rank:
        return ToolKeys()

    keys = {"model.quantize_base": value in ("nf4", "nf4-dq")}
    if value == "none":
        return ToolKeys(keys)
    if value == "int8":
        instead = "torchtune has no 8-bit weights, and holds them in the format of training"
        return request.keys("quantization", keys, instead, may_not_fit=True)

    how = "by torchao, scales of blocks as well"
    instead = f"torchtune quantises {how}, and takes more time than measured"

    return request.keys("quantization", keys, instead)


def _in_backward(request: Request) -> ToolKeys:
    """Only the recipe for full training has it."""
    on = bool(request.config.optimizer_in_backward)
    if not request.config.lora_rank:
        return ToolKeys({"optimizer_in_bwd": on})
    if not on:
        return ToolKeys()
    why = "torchtune's recipe for adapters holds all gradients until the update"

    return request.keys("optimizer_in_backward", {}, why, may_not_fit=True)


def _loss(request: Request) -> ToolKeys:
    if request.config.loss == "standard":
        return ToolKeys({"loss._component_": "torch.nn.CrossEntropyLoss"})

    why = "torchtune holds the logits of all tokens, and widens them in chunks"
    keys = {"loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    return request.keys("loss", keys, why, may_not_fit=True)


def _data_parallel(request: Request) -> ToolKeys:
    why = None
    if request.config.data_parallel == "ddp":
        why = "torchtune divides weights, with less memory and more time than measured"
    return replace(request.keys("data_parallel", {}, why), as_measured=True)


def _replicate(request: Request) -> ToolKeys:
    why = None
    if several_devices.is_fsdp(request) and request.layout.replicate > 1:
        where = "over all devices, with less memory and more time than measured"
        why = f"torchtune divides weights {where}"

    return replace(request.keys("data_parallel_replicate", {}, why), as_measured=True)


def _optimizer(request: Request) -> ToolKeys:
    """Where layers are split, torchtune refuses the fused one."""
    share = shared.optimizer_class(
        request,
        "optimizer._component_",
        "optimizer",
        {"fused": False},
    )
    if request.layout.tensor == 1 or not share.keys.get("optimizer.fused"):
        return share

    why = "torchtune updates split weights without the fused kernel, in more time"
    return request.keys("optimizer", {**share.keys, "optimizer.fused": False}, why)


def _without_plan(source: ExportSource) -> str | None:
    if source.layout.tensor == 1 or _BUILDERS[source.weights].module.startswith("llama3"):
        return None
    return f"torchtune has no plan to split the layers of {source.weights}."


def _refuse(source: ExportSource) -> str | None:
    unknown = shared.refuse_unknown(source, _BUILDERS, "builder of torchtune's")
    return unknown or _without_plan(source)


def _fixed(request: Request) -> dict[str, Any]:
    source = request.source
    builder = _BUILDERS[source.weights]
    tokenizer = builder.module
    if tokenizer.startswith("llama3"):
        tokenizer = "llama3"
    merges = {}
    if builder.merges:
        merges = {"tokenizer.merges_file": f"path/to/weights/{builder.merges}"}

    of_adapters: dict[str, Any] = {}
    if request.config.lora_rank:
        # The recipe for adapters requires these; a cosine of no cycles is constant.
        schedule = "get_cosine_schedule_with_warmup"
        of_adapters = {
            "lr_scheduler._component_": f"torchtune.training.lr_schedulers.{schedule}",
            "lr_scheduler.num_warmup_steps": 0,
            "lr_scheduler.num_cycles": 0.0,
            "save_adapter_weights_only": False,
        }

    return {
        "output_dir": "output",
        "tokenizer._component_": f"torchtune.models.{tokenizer}.{tokenizer}_tokenizer",
        "tokenizer.path": f"path/to/weights/{builder.tokenizer}",
        **merges,
        "tokenizer.max_seq_len": source.sequence_length,
        "dataset._component_": "torchtune.datasets.text_completion_dataset",
        "dataset.source": "path/to/dataset",
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
        **of_adapters,
        "device": "cpu" if source.device == "cpu" else "cuda",
        "metric_logger._component_": "torchtune.training.metric_logging.DiskLogger",
        "metric_logger.log_dir": "output/logs",
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "profiler._component_": "torchtune.training.setup_torch_profiler",
        "profiler.enabled": False,
    }


TOOL = Tool(
    title="torchtune",
    versions=("0.6.1",),
    caches_casts=False,
    run_several="tune run --nproc_per_node {each}{rendezvous} {{full,lora}}_finetune_distributed "
    "--config {file} (lora_ where there are adapters)",
    run="tune run {{full,lora}}_finetune_single_device "
    "--config {file} (lora_ where there are adapters)",
    tasks=LANGUAGE_MODELS,
    packing="dataset.packed",
    apart=True,
    splits=("tensor_parallel",),
    refuse=_refuse,
    fixed=_fixed,
    knobs={
        **shared.missing("torchtune", "attention", "kernels"),
        **shared.missing("torchtune's recipe", "optimizer_offload", "parameter_offload"),
        **several_devices.rows(
            _data_parallel,
            _replicate,
            partial(several_devices.reshard, path="fsdp_reshard_after_forward"),
            partial(several_devices.offload, path="fsdp_cpu_offload"),
            tensor=partial(
                several_devices.split,
                knob="tensor_parallel",
                path="tensor_parallel_dim",
                further=_PLAN,
            ),
        ),
        "precision": _precision,
        **shared.values(
            micro_batch_size="batch_size", gradient_accumulation_steps="gradient_accumulation_steps"
        ),
        "activation_checkpointing": lambda request: shared.whole_blocks(
            request, "enable_activation_checkpointing"
        ),
        "activation_offload": lambda request: shared.offload_of_blocks(
            request,
            {"enable_activation_offloading": False},
            {"enable_activation_offloading": True},
            # Without checkpointing torchtune refuses to offload.
            "torchtune offloads with activation checkpointing only, "
            "and keeps activations on the device",
        ),
        "lora_rank": _rank,
        "lora_alpha": lambda request: shared.lora_alpha(request, "model.lora_alpha"),
        "lora_dropout": lambda request: shared.lora_dropout(request, "model.lora_dropout"),
        "lora_targets": _targets,
        "quantization": _quantization,
        "optimizer": _optimizer,
        "optimizer_in_backward": _in_backward,
        "compile": shared.compile_by_default,
        "loss": _loss,
    },
)
