"""Files of transformers' TrainingArguments, YAML or JSON.

They name neither the model nor the length of a sample, which are the script's, but where they are
for a script that parses both beside them, as transformers' own do (examples/pytorch). The weights
are taken to be in float32, where nothing else is said, and to be trained whole.
"""

from dataclasses import replace
from typing import Any

from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.accelerate import divided_by_trainer
from autofit.export.importers.division import Division
from autofit.export.importers.fsdp import DEFAULTS, by_trainer
from autofit.export.importers.importer import Importer, Keys
from autofit.export.tools.transformers import TOOL

_SECTION = "arguments."
_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
}
# What transformers' run_clm.py takes beside TrainingArguments, and TRL's commands do not.
OF_SCRIPTS = frozenset(
    (
        "block_size",
        "cache_dir",
        "config_name",
        "config_overrides",
        "keep_linebreaks",
        "max_eval_samples",
        "max_train_samples",
        "overwrite_cache",
        "preprocessing_num_workers",
        "tokenizer_name",
        "token",
        "train_file",
        "use_fast_tokenizer",
        "validation_file",
        "validation_split_percentage",
    )
)
# What both take.
_OF_BOTH = frozenset(
    (
        "dataset_config_name",
        "dataset_name",
        "dtype",
        "max_length",
        "model_name_or_path",
        "model_revision",
        "streaming",
        "torch_dtype",
        "trust_remote_code",
    )
)


def _read(keys: Keys, division: Division) -> Keys:
    """The keys with the format of the weights by the exporter's name."""
    dtype = keys.get("dtype", keys.get("torch_dtype"))
    if dtype is None:
        return keys
    return {**keys, "model.dtype": "bfloat16" if dtype == "auto" else dtype}


def _meaning(key: str, value: Any) -> Any:
    if key.endswith("activation_checkpointing_kwargs") and isinstance(value, dict):
        return {**value, "use_reentrant": False}
    return value


IMPORTER = Importer(
    tool=replace(TOOL, knobs={**TOOL.knobs, **by_trainer(_SECTION)}),
    marks=("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    model="model_name_or_path",
    length=(("max_length", "block_size"), 0),
    task=lambda keys: CAUSAL_LM.name,
    refuse=lambda keys: None,
    divide=divided_by_trainer,
    section=_SECTION,
    read=_read,
    of_script=OF_SCRIPTS | _OF_BOTH,
    targets="target_modules",
    older={
        "activation_checkpointing": "gradient_checkpointing",
        "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    },
    defaults={
        **{f"{_SECTION}{key}": value for key, value in _DEFAULTS.items()},
        f"{_SECTION}activation_checkpointing_kwargs": {"use_reentrant": False},
        "model.dtype": "float32",
        "model.attn_implementation": "sdpa",
    },
    meaning=_meaning,
)
