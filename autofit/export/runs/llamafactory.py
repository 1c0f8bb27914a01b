"""`llamafactory-cli train`, on texts, or on answers to a prompt of one letter."""

import json
from typing import Any

from autofit.export.runs.run import OF_TRAINER, Keys, Stage, ToolRun, trainer_keys
from autofit.export.tools.llamafactory import TOOL

_DATASET = "samples"


def _keys(keys: Keys, stage: Stage) -> dict[str, Any]:
    rows = [{"prompt": "a", "text": text} for text in stage.texts]
    columns = {"prompt": "prompt", "response": "text"}
    if keys.get("stage") == "pt":
        columns = {"prompt": "text"}
    path = stage.write_rows("samples.jsonl", rows)
    described = {_DATASET: {"file_name": str(path), "columns": columns}}
    (stage.folder / "dataset_info.json").write_text(json.dumps(described))

    return {
        **trainer_keys(stage),
        "model_name_or_path": str(stage.weights),
        "dataset": _DATASET,
        "dataset_dir": str(stage.folder),
        "overwrite_cache": True,
        "preprocessing_num_workers": 1,
    }


RUN = ToolRun(
    tool=TOOL,
    package="llamafactory",
    file="llamafactory.yaml",
    program=lambda keys: ("-m", "llamafactory.cli", "train"),
    keys=_keys,
    without=(
        *OF_TRAINER,
        "adapter_name_or_path",
        "interleave_probs",
        "max_samples",
        "media_dir",
        "mix_strategy",
        "plot_loss",
        "streaming",
        "tokenized_path",
        "val_size",
    ),
)
