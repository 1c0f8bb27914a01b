"""transformers: TrainingArguments as YAML, and a short script that loads and adapts the model and
runs Trainer.

The script holds what TrainingArguments have no names for: the dtype of weights, adapters,
quantisation, compiling block by block.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.core.quoting import comment, python_string
from autofit.core.tasks import TASKS
from autofit.export import several_devices, trainer_scripts
from autofit.export import shared_keys as shared
from autofit.export.source import ExportSource
from autofit.export.template import (
    call,
    fill,
    import_from,
    keyword_arguments,
    literal,
    template,
    yaml_file,
)
from autofit.export.tool import HUGGING_FACE, Header, Request, Tool, ToolKeys
from autofit.export.trainer import learning
from autofit.export.trainer_scripts import under

_SCRIPT = "train_transformers.py"


def _arguments(request: Request, knob: str) -> ToolKeys:
    """TrainingArguments, by the names of this version."""
    share = shared.arguments(request, knob)
    keys = share.keys if request.since(shared.RENAMED) else shared.named_before(share.keys)

    return ToolKeys(under("arguments", keys), share.deviations)


def _precision(request: Request) -> ToolKeys:
    share = _arguments(request, "precision")
    return ToolKeys({**share.keys, **trainer_scripts.precision(request)}, share.deviations)


def _checkpointing(request: Request) -> ToolKeys:
    """A budget is a setting of PyTorch, made by the script."""
    value = request.config.activation_checkpointing
    share = _arguments(request, "activation_checkpointing")
    if value.startswith("budget-"):
        return ToolKeys(
            {
                **share.keys,
                "settings.activation_memory_budget": float(value.removeprefix("budget-")),
            }
        )

    if not request.since(shared.OFFLOADS):
        for options in share.keys.values():
            if isinstance(options, dict):
                options.pop("offload", None)

    return share


def _offload(request: Request) -> ToolKeys:
    if request.since(shared.OFFLOADS) or request.config.activation_offload == "none":
        return _arguments(request, "activation_offload")
    why = "Trainer offloads nothing before transformers 5.17, and needs more memory than measured"
    return request.keys("activation_offload", {}, why, may_not_fit=True)


def _data_parallel(request: Request) -> ToolKeys:
    return replace(
        _arguments(request, "data_parallel"), as_measured=request.config.data_parallel == "none"
    )


def _replicate(request: Request) -> ToolKeys:
    """accelerate, below Trainer, reads the sizes of groups from the environment."""
    sizes = several_devices.parallelism(request) if several_devices.is_fsdp(request) else {}
    names = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}

    return ToolKeys(
        under(
            "environment", {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **names} if names else {}
        )
    )


def _tensor(request: Request) -> ToolKeys:
    given = "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...)"
    return several_devices.unsplit(
        request,
        "tensor_parallel",
        f"without {given} of from_pretrained Trainer splits no layers",
    )


def _context(request: Request) -> ToolKeys:
    if request.config.context_parallel in (None, 1):
        return several_devices.unsplit(request, "context_parallel")
    return request.keys(
        "context_parallel",
        _replicate(request).keys,
        several_devices.RING.format("Trainer"),
    )


def _targets(request: Request) -> ToolKeys:
    source = request.source
    keys: dict[str, Any] = {"lora.target_modules": source.layers("all-linear")}
    if source.heads:
        keys["lora.modules_to_save"] = list(source.heads)
    task = TASKS[source.task]
    if task.peft_type and not task.classifies:  # whose heads are named above
        keys["lora.task_type"] = task.peft_type

    return ToolKeys(keys)


def _files(
    source: ExportSource,
    keys: Mapping[str, Any],
    header: Header,
    file: str,
) -> dict[str, str]:
    """The file of TrainingArguments, and the script that trains by it."""
    task = TASKS[source.task]
    classes = ["HfArgumentParser", "Trainer", "TrainingArguments"]
    given = ["WEIGHTS", *keyword_arguments(keys["model"])]
    model: list[str] = []
    quantization = keys.get("quantization")
    if quantization:
        classes.insert(0, "BitsAndBytesConfig")
        arguments = keyword_arguments(quantization)
        model += call("quantization = BitsAndBytesConfig", arguments, indent=0)
        given.append("quantization_config=quantization")
    model += call(f"model = {task.auto_class}.from_pretrained", given, indent=0)

    peft = []
    if keys.get("lora"):
        peft.append("from peft import LoraConfig, get_peft_model")

    length = "as it was measured"
    if source.sequence_length:
        length = f"of {source.sequence_length} tokens"

    settings = []
    budget = keys.get("settings", {}).get("activation_memory_budget")
    if budget:
        settings.append(f"torch._functorch.config.activation_memory_budget = {budget}")

    agree = []
    if not task.predicts_next_token:
        agree.append("model.accepts_loss_kwargs = False  # its loss takes no count")

    slots = {
        "head": comment(header),
        **trainer_scripts.environment_lines(keys.get("environment", {})),
        "peft": peft,
        "transformers": import_from("transformers", task.auto_class, *classes),
        "weights": literal(source.weights),
        "length": length,
        "arguments": python_string(file),
        "settings": settings,
        "model": model,
        "adapters": trainer_scripts.adapter_lines(keys, "model = get_peft_model(model, lora)"),
        "agree": agree,
    }

    return {
        file: yaml_file(header, keys["arguments"]),
        _SCRIPT: fill(template("transformers"), slots),
    }


TOOL = Tool(
    title="transformers",
    versions=("5.16.1", shared.OFFLOADS, shared.RENAMED),
    run=f"python {_SCRIPT} DATA_DIRECTORY",
    splits=("context_parallel",),
    run_several=f"{{torchrun}} {_SCRIPT} DATA_DIRECTORY",
    tasks=HUGGING_FACE,
    expert_targets="lora.target_parameters",
    fixed=lambda request: {
        **under(
            "arguments",
            {"output_dir": "output", **learning(request.config), "remove_unused_columns": False},
        ),
        "arguments.use_cpu": request.source.device == "cpu",
    },
    file="training_arguments.yaml",
    files=_files,
    knobs={
        **{
            knob: partial(_arguments, knob=knob)
            for knob in (*shared.TRAINER_ALONE, "loss", "kernels")
        },
        **several_devices.rows(
            *(_data_parallel, _replicate),
            *(partial(_arguments, knob=knob) for knob in ("reshard_after_forward", "fsdp_offload")),
            tensor=_tensor,
            context=_context,
        ),
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        **trainer_scripts.adapters_and_weights(),
        "lora_targets": _targets,
        "compile": lambda request: shared.compile_by_blocks(request, "arguments.", "environment"),
    },
)
