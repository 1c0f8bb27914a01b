"""ToolRun: how a tool trains some steps from a copy of a file of its own, on rows that are made up.

The file that is copied stays as it is. What the copy says otherwise is where the model and the rows
are, how many steps there are, and that nothing is saved, evaluated or reported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.strict_yaml import dump
from autofit.export.importers.command_line import ENVIRONMENT, LAUNCHER
from autofit.export.source import ExportSource
from autofit.export.tool import Tool, nested

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """What a tool is run on.

    Attributes:
        folder: where it is started, and writes.
        weights: a directory with a model and its tokenizer.
        texts: the rows, each as long as a sample less the token that ends it.
        tokens: the same rows with that token, as a `Dataset.save_to_disk`.
        steps: how many it trains.
    """

    folder: Path
    weights: Path
    texts: tuple[str, ...]
    tokens: Path
    steps: int

    def write_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """A file of JSON lines in a folder."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

        return path


def _nothing(source: ExportSource) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class ToolRun:
    """How one tool is run.

    Attributes:
        package: what Python imports of it.
        file: what the copy is called.
        program: by the keys of the file, what Python is given before the copy's name.
        keys: what the copy says instead; it writes the rows.
        without: keys that the copy lacks, with those below them.
        last: what Python is given after the copy's name.
        names_file: whether the copy is named to the program.
        beside: further files that the tool needs of a config, by name.
        environment: variables of the process.
    """

    tool: Tool
    package: str
    file: str
    program: Callable[[Keys], Sequence[str]]
    keys: Callable[[Keys, Stage], Keys]
    without: tuple[str, ...] = ()
    last: Callable[[Stage], Sequence[str]] = lambda stage: ()
    names_file: bool = True
    beside: Callable[[ExportSource], Mapping[str, str]] = _nothing
    environment: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, keys: Keys, stage: Stage) -> list[str]:
        """Write the copy of a file and the rows; returns what Python is given to train from them."""
        copy = {}
        for path, value in keys.items():
            if path.startswith((ENVIRONMENT, LAUNCHER)):
                continue
            if not any(f"{path}.".startswith(f"{name}.") for name in self.without):
                copy[path] = value

        copy |= self.keys(keys, stage)
        text = dump(nested(copy))
        (stage.folder / self.file).write_text(text)

        words = list(self.program(keys))
        if self.names_file:
            words.append(self.file)
        return [*words, *self.last(stage)]

    def variables(self, keys: Keys) -> dict[str, str]:
        """The variables of the process: the tool's, and those that a command sets before it."""
        found = dict(self.environment)
        for path, value in keys.items():
            if path.startswith(ENVIRONMENT):
                found[path.removeprefix(ENVIRONMENT)] = str(value)

        return found


def trainer_keys(stage: Stage) -> dict[str, Any]:
    """What the copy says to transformers' Trainer."""
    return {
        "max_steps": stage.steps,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "output_dir": str(stage.folder / "output"),
    }


# What Trainer is told of saving, evaluating and going on.
OF_TRAINER = (
    "do_eval",
    "eval_dataset",
    "eval_delay",
    "eval_on_start",
    "eval_steps",
    "evaluation_strategy",
    "greater_is_better",
    "hub_model_id",
    "load_best_model_at_end",
    "logging_dir",
    "metric_for_best_model",
    "num_train_epochs",
    "push_to_hub",
    "resume_from_checkpoint",
    "run_name",
    "save_steps",
    "save_total_limit",
)
