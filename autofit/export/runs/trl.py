"""`trl sft`, on a folder of texts."""

from typing import Any

from autofit.export.runs.run import OF_TRAINER, Keys, Stage, ToolRun, trainer_keys
from autofit.export.tools.trl import TOOL


def _keys(keys: Keys, stage: Stage) -> dict[str, Any]:
    rows = stage.write_rows("texts/samples.jsonl", [{"text": text} for text in stage.texts])
    return {
        **trainer_keys(stage),
        "model_name_or_path": str(stage.weights),
        "dataset_name": str(rows.parent),
    }


RUN = ToolRun(
    tool=TOOL,
    package="trl",
    file="trl.yaml",
    program=lambda keys: ("-m", "trl.cli.main", "sft", "--config"),
    keys=_keys,
    without=(
        *OF_TRAINER,
        # every token of a text is learnt, as in the worst case
        "assistant_only_loss",
        "chat_template_path",
        "completion_only_loss",
        "dataset_config",
        "dataset_num_proc",
        "dataset_streaming",
        "dataset_test_split",
        "dataset_text_field",
        "dataset_train_split",
        "datasets",
        "eos_token",
        "pad_token",
    ),
)
