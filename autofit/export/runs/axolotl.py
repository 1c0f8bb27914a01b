"""`axolotl train`, on texts."""

from typing import Any

from autofit.export.runs.run import Keys, Stage, ToolRun
from autofit.export.tools.axolotl import TOOL


def _keys(keys: Keys, stage: Stage) -> dict[str, Any]:
    rows = stage.write_rows("rows.jsonl", [{"text": text} for text in stage.texts])
    dataset = {
        "path": str(rows),
        "ds_type": "json",
        "type": "completion",
        "field": "text",
    }
    return {
        "base_model": str(stage.weights),
        "datasets": [dataset],
        "dataset_prepared_path": str(stage.folder / "prepared"),
        "max_steps": stage.steps,
        "output_dir": str(stage.folder / "output"),
        "save_strategy": "no",
        "val_set_size": 0,
    }


RUN = ToolRun(
    tool=TOOL,
    package="axolotl",
    file="axolotl.yaml",
    program=lambda keys: ("-m", "axolotl.cli.train"),
    keys=_keys,
    # axolotl reports trainings to its authors; this one is on made-up rows
    environment={"AXOLOTL_DO_NOT_TRACK": "1"},
    without=(
        "added_tokens_overrides",
        "auto_resume_from_checkpoints",
        "base_model_config",
        "chat_template",
        "chat_template_jinja",
        "comet_project_name",
        "early_stopping_patience",
        "eval_sample_packing",
        "eval_steps",
        "eval_strategy",
        "evals_per_epoch",
        "hub_model_id",
        "load_best_model_at_end",
        "lora_model_dir",
        "mlflow_experiment_name",
        "mlflow_tracking_uri",
        "num_epochs",
        "pretraining_dataset",
        "resume_from_checkpoint",
        "revision_of_model",
        "save_first_step",
        "save_steps",
        "saves_per_epoch",
        "special_tokens",
        "test_datasets",
        "tokenizer_config",
        "tokens",
        "wandb_entity",
        "wandb_log_model",
        "wandb_name",
        "wandb_project",
        "wandb_watch",
    ),
)
