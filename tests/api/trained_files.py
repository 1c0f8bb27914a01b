"""A model's directory, a result that names it, and files to train it on with `autofit train`."""

import json
from pathlib import Path
from typing import Any

import yaml

from autofit.api.fit import Trained
from autofit.api.train import train


class Run:
    """A tiny model in a directory, from whose random weights a result trains; effective batch 4 in slices of 2."""

    def __init__(
        self, folder: Path, task: str, config: dict[str, Any], *, length: int | None = 64
    ) -> None:
        self.folder, self.model = folder, folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(config))
        self.content: dict[str, Any] = {
            "autofit": 1,
            "model": "model",
            "workload": {"task": task, "sequence_length": length, "effective_batch_size": 4},
            "source": {"kind": "directory", "path": str(self.model), "task": task},
            "hardware": {"device": "cpu"},
            "config": {"micro_batch_size": 2},
        }

    def data(self, *rows: Any, name: str = "data.jsonl") -> Path:
        """Rows as JSON lines beside the model."""
        path = self.folder / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    def train(self, data: Path, **options: Any) -> Trained:
        (self.folder / "result.yaml").write_text(yaml.safe_dump(self.content))
        return train(self.folder / "result.yaml", data, **{"lr": 1e-2, **options})

    def losses(self, data: Path, **options: Any) -> list[float]:
        return [step.loss for step in self.train(data, **options).history]
