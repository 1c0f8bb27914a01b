"""transformers: TrainingArguments as YAML, and a short script that loads and adapts the model and runs Trainer.

What TrainingArguments have no names for (the dtype of weights, adapters, quantisation, compiling block by block) stands
in the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.formats import comment, yaml_file
from autofit.export.tasks import TASKS
from autofit.export.template import call, fill, import_from, literal, template
from autofit.export.tool import HUGGING_FACE, Document, Request, Tool, ToolKeys
from autofit.export.trainer_tools import OFFLOADS, RENAMED, arguments, batches_fit, keywords, lora_alpha, named_before

_YAML, _SCRIPT = "training_arguments.yaml", "train_transformers.py"
_REGIONAL = "environment.ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def _under(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}.{name}": value for name, value in values.items()}


def _arguments(request: Request, knob: str) -> ToolKeys:
    """TrainingArguments, by the names that this version has for them."""
    told = arguments(knob)(request)
    keys = told.keys if request.since(RENAMED) else named_before(told.keys)
    return ToolKeys(_under("arguments", keys), told.departures)


def _share(knob: str) -> Any:
    return lambda request: _arguments(request, knob)


def _precision(request: Request) -> ToolKeys:
    told, said = _arguments(request, "precision"), keywords(request, "precision")
    return ToolKeys({**told.keys, **_under("model", said.model), "trained.dtype": said.trained_dtype}, told.departures)


def _checkpointing(request: Request) -> ToolKeys:
    """A budget is a setting of PyTorch, made by the script; before 5.17 there is no option to offload."""
    value = request.text("activation_checkpointing")
    told = _arguments(request, "activation_checkpointing")
    if value.startswith("budget-"):
        return ToolKeys({**told.keys, "settings.activation_memory_budget": float(value.removeprefix("budget-"))})
    if request.since(OFFLOADS):
        return told
    without = {
        name: {option: each for option, each in value.items() if option != "offload"}
        for name, value in told.keys.items()
        if isinstance(value, dict)
    }
    return ToolKeys({**told.keys, **without}, told.departures)


def _offload(request: Request) -> ToolKeys:
    told = _arguments(request, "activation_offload")
    if request.since(OFFLOADS) or request.text("activation_offload") == "none":
        return told
    why = "Trainer offloads nothing before transformers 5.17, and needs more memory than measured"
    return ToolKeys({}, (request.departs("activation_offload", why, may_not_fit=True),))


def _compile(request: Request) -> ToolKeys:
    """Block by block, as it was measured, accelerate compiles when the environment says so."""
    told = _arguments(request, "compile")
    return ToolKeys({**told.keys, **({_REGIONAL: "1"} if request.text("compile") != "none" else {})})


def _attention(request: Request) -> ToolKeys:
    said = keywords(request, "attention")
    return ToolKeys({"model.attn_implementation": said.model.get("attn_implementation", "sdpa")}, said.departures)


def _quantization(request: Request) -> ToolKeys:
    return ToolKeys(_under("quantization", keywords(request, "quantization").quantization))


def _rank(request: Request) -> ToolKeys:
    rank = request.config["lora_rank"]
    return ToolKeys({"lora.r": rank} if rank else {})


def _alpha(request: Request) -> ToolKeys:
    return ToolKeys({"lora.lora_alpha": lora_alpha(request)} if request.config["lora_rank"] else {})


def _dropout(request: Request) -> ToolKeys:
    return ToolKeys({"lora.lora_dropout": request.config["lora_dropout"] or 0.0} if request.config["lora_rank"] else {})


def _targets(request: Request) -> ToolKeys:
    found = request.found
    if not request.config["lora_rank"]:
        return ToolKeys()
    keys: dict[str, Any] = {"lora.target_modules": list(found.targets) or "all-linear"}
    if found.heads:
        keys["lora.modules_to_save"] = list(found.heads)
    if found.task == "causal-lm":
        keys["lora.task_type"] = "CAUSAL_LM"
    return ToolKeys(keys)


def _fixed(request: Request) -> dict[str, Any]:
    learning = Hyperparameters()
    return _under(
        "arguments",
        {
            "output_dir": "output",
            "learning_rate": learning.lr,
            "lr_scheduler_type": learning.schedule,
            "weight_decay": learning.weight_decay,
            "max_grad_norm": learning.max_grad_norm or 0.0,
            "remove_unused_columns": False,
            "use_cpu": request.found.device == "cpu",
        },
    )


def _files(document: Document) -> dict[str, str]:
    keys = document.keys
    return {_YAML: yaml_file(document.head, keys["arguments"]), _SCRIPT: _script(document)}


def _script(document: Document) -> str:
    keys, found = document.keys, document.request.found
    lora, quantization = keys.get("lora"), keys.get("quantization")
    task = TASKS[found.task]
    classes = (*(("BitsAndBytesConfig",) if quantization else ()), "HfArgumentParser", "Trainer", "TrainingArguments")
    environment = [f'os.environ["{name}"] = "{value}"' for name, value in keys.get("environment", {}).items()]
    budget = keys.get("settings", {}).get("activation_memory_budget")
    slots = {
        "head": comment(document.head),
        "os": ["import os"] if environment else [],
        "environment": [*environment, ""] if environment else [],
        "peft": ["from peft import LoraConfig, get_peft_model"] if lora else [],
        "transformers": import_from("transformers", task.auto_class, *classes),
        "weights": literal(found.weights),
        "length": f"of {found.sequence_length} tokens" if found.sequence_length else "as it was measured",
        "arguments": _YAML,
        "settings": [f"torch._functorch.config.activation_memory_budget = {budget}"] if budget else [],
        "model": _model(document),
        "adapters": _adapters(lora, keys["trained"]["dtype"]) if lora else [],
        "agree": [] if found.task == "causal-lm" else ["model.accepts_loss_kwargs = False  # its loss takes no count"],
    }
    return fill(template("transformers"), slots)


def _model(document: Document) -> list[str]:
    """The call that loads the model."""
    keys = document.keys
    given = ["WEIGHTS", *(f"{name}={literal(value)}" for name, value in keys["model"].items())]
    lines = []
    if quantization := keys.get("quantization"):
        lines = call("quantization = BitsAndBytesConfig", _named(quantization), indent=0)
        given += ["quantization_config=quantization"]
    return [*lines, *call(f"model = {TASKS[document.request.found.task].auto_class}.from_pretrained", given, indent=0)]


def _adapters(lora: Mapping[str, Any], dtype: str) -> list[str]:
    return [
        *call("lora = LoraConfig", _named(lora), indent=0),
        "model = get_peft_model(model, lora)",
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        f"        parameter.data = parameter.data.to(torch.{dtype})",
    ]


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={literal(value)}" for name, value in values.items()]


TOOL = Tool(
    name="transformers",
    title="transformers",
    versions=("5.16.1", OFFLOADS, RENAMED),
    run=f"python {_SCRIPT} DATA_DIRECTORY",
    tasks=HUGGING_FACE,
    refuse=batches_fit,
    fixed=_fixed,
    files=_files,
    knobs={
        **{
            knob: _share(knob)
            for knob in (
                *("micro_batch_size", "gradient_accumulation_steps", "optimizer", "optimizer_offload"),
                *("optimizer_in_backward", "parameter_offload", "loss", "kernels"),
            )
        },
        "precision": _precision,
        "activation_checkpointing": _checkpointing,
        "activation_offload": _offload,
        "lora_rank": _rank,
        "lora_alpha": _alpha,
        "lora_dropout": _dropout,
        "lora_targets": _targets,
        "quantization": _quantization,
        "compile": _compile,
        "attention": _attention,
    },
)
