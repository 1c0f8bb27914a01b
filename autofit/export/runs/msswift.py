"""`swift sft` and `swift pt`, on an answer, or on answers to a prompt of one letter."""

from typing import Any

from autofit.export.importers.command_line import COMMAND
from autofit.export.runs.run import OF_TRAINER, Keys, Stage, ToolRun, trainer_keys
from autofit.export.tools.msswift import TOOL


def _does(keys: Keys) -> str:
    """What its command does."""
    return str(keys.get(COMMAND) or f"swift {TOOL.stage}").split()[-1]


def _keys(keys: Keys, stage: Stage) -> dict[str, Any]:
    asked = [] if _does(keys) == "pt" else [{"role": "user", "content": "a"}]
    rows = [{"messages": [*asked, {"role": "assistant", "content": text}]} for text in stage.texts]
    path = stage.write_rows("rows.jsonl", rows)

    return {
        **trainer_keys(stage),
        "model": str(stage.weights),
        "dataset": str(path),
        "dataset_num_proc": 1,
        "split_dataset_ratio": 0,
        "truncation_strategy": "right",  # its own leaves long rows out
    }


RUN = ToolRun(
    tool=TOOL,
    package="swift",
    file="msswift.yaml",
    program=lambda keys: ("-m", "swift.cli.main", _does(keys)),
    keys=_keys,
    without=(
        *OF_TRAINER,
        "adapters",
        "cached_dataset",
        "create_checkpoint_symlink",
        "custom_dataset_info",
        "model_author",
        "model_name",
        "streaming",
        "use_hf",
        "val_dataset",
    ),
    environment={"USE_HF": "1"},
)
