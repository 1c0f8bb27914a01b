"""Files of TRL, as `trl sft --config FILE` takes them; which command it is for, the file does not
say. Or the command with its options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.accelerate import (
    LAUNCHED_BY,
    divided_by_launcher,
    divided_by_trainer,
    launched,
    read_launcher,
    with_devices,
)
from autofit.export.importers.command_line import COMMAND
from autofit.export.importers.division import Division
from autofit.export.importers.fsdp import DEFAULTS, by_trainer
from autofit.export.importers.importer import Importer, Keys, refused_key
from autofit.export.tools.trl import TOOL

_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "lora_r": 16,
    "optim": "adamw_torch_fused",
    "attn_implementation": "sdpa",
    "bnb_4bit_quant_type": "nf4",
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "dtype": "float32",
    "bf16": True,
}
_REFUSED = {
    "use_vllm": "it generates with vLLM; autofit estimate --task grpo plans that",
    "num_generations": "it generates; autofit estimate --task grpo plans that",
}
# The files for accelerate that TRL has by name, in which all else is accelerate's default.
_LAUNCHED: dict[str, dict[str, Any]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"num_processes": 8},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 1, "num_processes": 8},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2, "num_processes": 8},
    **{
        f"zero{stage}": {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config.zero_stage": stage,
            "num_processes": 8,
        }
        for stage in (1, 2, 3)
    },
}
_WHOLE = (
    "bnb_4bit_quant_storage is not a floating dtype, so accelerate divides no 4-bit weights: each device "
    "holds more than predicted."
)


def _task(keys: Keys) -> str:
    """By the command; a file alone does not say it."""
    command = str(keys.get(COMMAND) or "").removeprefix("trl ")
    for task in TASKS.values():
        if task.stages.get(TOOL.name) == command:
            return task.name

    return CAUSAL_LM.name


def _divide(keys: Keys, folder: Path) -> Division:
    """By arguments of Trainer, or by a file for accelerate, which `trl` launches itself by, or
    which its script is launched by."""
    launcher = str(keys.get("accelerate_config") or keys.get(LAUNCHED_BY) or "")
    if launcher in _LAUNCHED:
        division = divided_by_launcher(_LAUNCHED[launcher], folder)
    elif launcher:
        division = read_launcher(launcher, folder)
    else:
        division = divided_by_trainer(keys, folder)

    is_floating = "float" in str(keys.get("bnb_4bit_quant_storage"))
    if division.knobs.get("data_parallel") == "fsdp" and keys.get("load_in_4bit"):
        division = division if is_floating else division.noted(_WHOLE)

    return launched(with_devices(division, keys.get("num_processes")), keys)


def _keeps(keys: Keys) -> tuple[str, ...]:
    """What tells packed samples apart; and in a command the kernels, whose liger_kernel_config is a
    mapping that TRL's options do not take."""
    kept: tuple[str, ...] = ()
    if keys.get("packing"):
        kept = ("attn_implementation",)
    if keys.get(COMMAND):
        kept = (*kept, "use_liger_kernel")

    return kept


def _meaning(key: str, value: Any) -> Any:
    if key == "dtype" and value == "auto":
        return "bfloat16"
    if key == "attn_implementation" and str(value).startswith(("flash_attention", "kernels-")):
        return "flash_attention_2"
    if key == "activation_checkpointing_kwargs" and isinstance(value, dict):
        return {**value, "use_reentrant": False}

    return value


IMPORTER = Importer(
    tool=replace(TOOL, knobs={**TOOL.knobs, **by_trainer()}),
    programs=tuple(("trl", stage) for stage in TOOL.commands),
    marks=("model_name_or_path",),
    model="model_name_or_path",
    length=(("max_length",), 1024),
    task=_task,
    refuse=lambda keys: refused_key(keys, _REFUSED),
    divide=_divide,
    targets="lora_target_modules",
    takes_usual=True,
    keeps=_keeps,
    older={
        "activation_checkpointing": "gradient_checkpointing",
        "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
        "dtype": "torch_dtype",
    },
    single=("accelerate_config",),
    defaults=_DEFAULTS,
    meaning=_meaning,
)
