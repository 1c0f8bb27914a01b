"""Files of TRL, as `trl sft --config FILE` takes them; which command it is for, the file does not
say. Or the command with its options."""

from typing import Any

from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.command_line import COMMAND
from autofit.export.importers.importer import Importer, Keys
from autofit.export.tools.trl import TOOL

_DEFAULTS: dict[str, Any] = {
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
    "deepspeed": "its settings of DeepSpeed are in a file of their own, which is not read yet",
    "fsdp": "how it divides weights over devices is not tuned yet",
}


def _task(keys: Keys) -> str:
    """By the command; a file alone does not say it."""
    command = str(keys.get(COMMAND) or "").removeprefix("trl ")
    for task in TASKS.values():
        if task.stages.get(TOOL.name) == command:
            return task.name
    return CAUSAL_LM.name


def _refuse(keys: Keys) -> str | None:
    for name, why in _REFUSED.items():
        if keys.get(name):
            return f"{name}: {why}."
    return None


def _meaning(key: str, value: Any) -> Any:
    if key == "dtype" and value == "auto":
        return "bfloat16"
    if key == "attn_implementation" and str(value).startswith(("flash_attention", "kernels-")):
        return "flash_attention_2"
    if key == "activation_checkpointing_kwargs" and isinstance(value, dict):
        return {**value, "use_reentrant": False}
    return value


IMPORTER = Importer(
    tool=TOOL,
    programs=tuple(("trl", stage) for stage in TOOL.commands),
    marks=("model_name_or_path",),
    model="model_name_or_path",
    length=("max_length", 1024),
    task=_task,
    refuse=_refuse,
    targets="lora_target_modules",
    keeps=lambda keys: ("attn_implementation",) if keys.get("packing") else (),
    older={
        "activation_checkpointing": "gradient_checkpointing",
        "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
        "dtype": "torch_dtype",
    },
    defaults=_DEFAULTS,
    meaning=_meaning,
)
