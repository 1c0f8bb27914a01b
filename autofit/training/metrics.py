"""Recorders of a training run: a metrics file, TensorBoard, and a progress bar, all callbacks like a user's own."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from autofit.core.errors import InputError
from autofit.core.notebook import Cell, in_notebook
from autofit.training.loop import StepReport

_NAMES = (*(each.name for each in fields(StepReport)), "evaluation")


class MetricsFile:
    """One line per step, in JSON (`.jsonl`) or CSV (`.csv`), each flushed at once.

    Opening drops the lines of steps from `first_step` on, which a resumed run does again. `evaluation` is the mean
    loss on held-out data after a step.

    Raises:
        InputError: another suffix.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        if path.suffix not in (".jsonl", ".csv"):
            raise InputError(f"a metrics file cannot be {path.name}.", "Give a name that ends in .jsonl or .csv.")
        self._path, self._is_json = path, path.suffix == ".jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        path = self._path
        rows = [row for row in _rows(path) if int(row["step"]) < first_step] if first_step and path.exists() else []
        self._file: IO[str] = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.DictWriter(self._file, _NAMES)
        if not self._is_json:
            self._csv.writeheader()
        for row in rows:
            self._write(row)

    def back_to(self, first_step: int) -> None:
        """Drop the lines of steps that are done again."""
        self._file.close()
        self._open(first_step)

    def __call__(self, report: StepReport) -> None:
        """Write one step."""
        self._write(asdict(report))

    def evaluated(self, step: int, loss: float) -> None:
        """Write the loss on held-out data after a step."""
        self._write({"step": step, "evaluation": loss})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._is_json:
            self._file.write(json.dumps({name: value for name, value in row.items() if value is not None}) + "\n")
        else:
            self._csv.writerow(row)
        self._file.flush()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The readable lines: a killed run leaves half a line, and a machine that went down may leave anything."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return [row for row in csv.DictReader(file) if None not in row.values() and row["loss"] + row["evaluation"]]
        for line in file:
            try:
                row = json.loads(line) if line.endswith("\n") else None
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
    return rows


class TensorBoard:
    """TensorBoard's event files: loss, learning rate, gradient norm, samples per second, evaluation."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def __call__(self, report: StepReport) -> None:
        """Write one step."""
        values = {"loss": report.loss, "lr": report.lr, "gradient_norm": report.gradient_norm}
        if report.seconds:
            values["samples_per_second"] = report.samples / report.seconds
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, report.step)

    def evaluated(self, step: int, loss: float) -> None:
        """Write the loss on held-out data after a step."""
        self._writer.add_scalar("evaluation/loss", loss, step)

    def back_to(self, first_step: int) -> None:
        """Nothing to do: TensorBoard shows a step's later values beside its former ones."""

    def close(self) -> None:
        """Close the files."""
        self._writer.close()

    @staticmethod
    def installed() -> bool:
        """Whether the tensorboard package is there, which torch's writer needs."""
        return importlib.util.find_spec("tensorboard") is not None


class _CellBar(tqdm):  # type: ignore[misc]
    """tqdm's line as the output of a notebook's cell; tqdm's own notebook bar needs a package of widgets."""

    def __init__(self, **options: Any) -> None:
        self._cell = Cell()
        super().__init__(gui=True, ncols=100, **options)  # gui: nothing is written to stderr
        self.refresh()

    def display(self, *_: Any, **__: Any) -> None:
        self._cell.show(str(self))

    def close(self) -> None:
        if not self.disable:
            self.display()
        super().close()


class Bar:
    """A bar on stderr or in a notebook's cell: steps, loss, rate, and the share of time spent waiting for data."""

    def __init__(self, total: int, *, first_step: int = 0) -> None:
        options = {"total": total, "initial": first_step, "desc": "training", "unit": "step"}
        self._bar: Any = _CellBar(**options) if in_notebook() else tqdm(**options, dynamic_ncols=True)
        self._waiting = self._elapsed = 0.0

    def __call__(self, report: StepReport) -> None:
        """Advance by one step."""
        self._waiting += report.data_seconds
        self._elapsed += report.data_seconds + report.seconds
        shown = {"loss": f"{report.loss:.4g}"}
        if self._elapsed and self._waiting / self._elapsed > 0.01:
            shown["waiting"] = f"{self._waiting / self._elapsed:.0%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def evaluated(self, step: int, loss: float) -> None:
        """Show the loss on held-out data beside the bar."""
        self._bar.set_description(f"training (evaluation {loss:.4g})")

    def back_to(self, first_step: int) -> None:
        """Go back to a step."""
        self._bar.n = first_step
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    @staticmethod
    def wanted() -> bool:
        """Whether somebody is looking: a terminal, or a notebook."""
        return sys.stderr.isatty() or in_notebook()


Recorder = MetricsFile | TensorBoard | Bar
