"""Files of transformers' TrainingArguments, YAML or JSON.

They name neither the model nor the length of a sample, which are the script's; its weights are
taken to be in float32, and to be trained whole.
"""

from typing import Any

from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.accelerate import divided_by_trainer
from autofit.export.importers.importer import Importer
from autofit.export.tools.transformers import TOOL

_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
}


def _meaning(key: str, value: Any) -> Any:
    if key.endswith("activation_checkpointing_kwargs") and isinstance(value, dict):
        return {**value, "use_reentrant": False}
    return value


IMPORTER = Importer(
    tool=TOOL,
    marks=("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    model="model_name_or_path",
    length=("max_length", 0),
    task=lambda keys: CAUSAL_LM.name,
    refuse=lambda keys: None,
    divide=divided_by_trainer,
    section="arguments.",
    targets="target_modules",
    older={
        "activation_checkpointing": "gradient_checkpointing",
        "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    },
    defaults={
        **{f"arguments.{key}": value for key, value in _DEFAULTS.items()},
        "arguments.activation_checkpointing_kwargs": {"use_reentrant": False},
        "model.dtype": "float32",
        "model.attn_implementation": "sdpa",
    },
    meaning=_meaning,
)
