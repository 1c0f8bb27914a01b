"""Recorders of a training run: a metrics file, TensorBoard, and a progress bar.

All are callbacks like a user's own.
"""

import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from autofit.core.files import write_atomically
from autofit.core.hardware import GIB
from autofit.core.notebook import Cell, in_notebook
from autofit.core.plain import UNREADABLE, Loss, from_plain
from autofit.training.evaluation import Evaluation
from autofit.training.loop import StepReport
from autofit.training.memory_watch import StepMemory

# On a stream that is no terminal: until the first line, and between two.
_FIRST_LINE_SECONDS = 10.0
_LINE_SECONDS = 60.0


class Recorder(ABC):
    """A callback that also records evaluations, and goes back where steps are done again."""

    @abstractmethod
    def __call__(self, report: StepReport) -> None:
        """Record one step."""

    @abstractmethod
    def evaluated(self, evaluation: Evaluation) -> None:
        """Record what held-out data say after a step."""

    @abstractmethod
    def back_to(self, first_step: int) -> None:
        """Go back to a step that is done again."""

    @abstractmethod
    def close(self) -> None:
        """Record nothing more."""


class MetricsFile(Recorder):
    """JSON lines, one per step or evaluation, each flushed at once.

    Opening drops the lines of steps after `first_step`, which a resumed run does again.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        """Open the file, without the lines of later steps."""
        path = self._path
        # somebody's folder must not keep a run from going on
        if path.exists() and not path.is_file():
            aside = f"{path.name}.{time.time_ns()}.aside"
            path.rename(path.with_name(aside))

        if path.exists():
            kept = [line for line, step in _lines(path) if step <= first_step]
            write_atomically(path, "".join(kept))

        self._file: IO[str] = path.open("a", encoding="utf-8")

    def back_to(self, first_step: int) -> None:
        self._file.close()
        self._open(first_step)

    def __call__(self, report: StepReport) -> None:
        row = asdict(replace(report, evaluations=()))  # which have rows of their own
        del row["evaluations"]
        self._write(row | row.pop("memory"))

    def evaluated(self, evaluation: Evaluation) -> None:
        row: dict[str, Any] = {"step": evaluation.step, "evaluation": float(evaluation)}
        if evaluation.metrics:
            row["metrics"] = evaluation.metrics

        self._write(row)

    def close(self) -> None:
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        known = {name: value for name, value in row.items() if value is not None}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()


def recorded(path: Path, last_step: int) -> tuple[list[StepReport], list[Evaluation]]:
    """The reports and evaluations in a metrics file, up to a step."""
    reports: list[StepReport] = []
    evaluations: list[Evaluation] = []
    if not path.is_file():
        return reports, evaluations

    for line, step in _lines(path):
        if step > last_step:
            continue

        row = json.loads(line)
        with contextlib.suppress(*UNREADABLE):  # of another autofit, or edited
            if "evaluation" in row:
                metrics = from_plain(Mapping[str, Loss], row.get("metrics", {}))
                loss = from_plain(Loss, row["evaluation"])
                evaluations.append(Evaluation(float(loss), step, metrics))
            else:
                memory = {name: row.pop(name) for name in vars(StepMemory()) if name in row}
                reports.append(from_plain(StepReport, {**row, "memory": memory}))

    return reports, evaluations


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """The readable lines, each with its step.

    A killed run leaves half a line, and a machine that went down may leave anything.
    """
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue

        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield f"{line}\n", row["step"]


class TensorBoard(Recorder):
    """TensorBoard's event files; it shows a step that is done again beside its former values."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def __call__(self, report: StepReport) -> None:
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "gradient_norm": report.gradient_norm,
        }
        if report.seconds:
            values["samples_per_second"] = report.samples / report.seconds

        values |= vars(report.memory)

        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(
                    f"train/{name}",
                    value,
                    report.step,
                )

    def evaluated(self, evaluation: Evaluation) -> None:
        for name, value in {"loss": float(evaluation), **evaluation.metrics}.items():
            self._writer.add_scalar(
                f"evaluation/{name}",
                value,
                evaluation.step,
            )

    def back_to(self, first_step: int) -> None:
        """Keep the former values; TensorBoard shows both."""

    def close(self) -> None:
        self._writer.close()


class Bar(Recorder):
    """A progress bar on stderr or in a notebook's cell.

    It shows steps, loss, rate, the share of time spent waiting for data, and GiB of tensors now, at
    most and reserved; on a CPU those of the process.
    """

    def __init__(self, total: int, *, first_step: int = 0) -> None:
        options = {
            "total": total,
            "initial": first_step,
            "desc": "training",
            "unit": "step",
        }
        self._bar: Any

        if in_notebook():
            self._bar = _CellBar(**options)
        else:
            self._bar = tqdm(**options, dynamic_ncols=True)

        self._waiting_seconds = 0.0
        self._seconds = 0.0

    def __call__(self, report: StepReport) -> None:
        self._waiting_seconds += report.data_seconds
        self._seconds += report.data_seconds + report.seconds

        shown = {"loss": f"{report.loss:.4g}"}
        if self._waiting_seconds > 0.01 * self._seconds:
            shown["waiting"] = f"{self._waiting_seconds / self._seconds:.0%}"

        shown |= _sizes(report.memory)

        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def evaluated(self, evaluation: Evaluation) -> None:
        self._bar.set_description(f"training ({describe_evaluation(evaluation)})")

    def back_to(self, first_step: int) -> None:
        self._bar.n = first_step
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    @staticmethod
    def wanted() -> bool:
        """Whether somebody is looking: a terminal, or a notebook."""
        return sys.stderr.isatty() or in_notebook()


class ProgressLines(Recorder):
    """Where no terminal is: a line on stderr after some steps, with speed and remaining time."""

    def __init__(self, total: int, *, first_step: int = 0) -> None:
        self._total = total
        self._first_step = first_step
        self._began = time.monotonic()
        self._due = self._began + _FIRST_LINE_SECONDS
        self._samples = 0

    def __call__(self, report: StepReport) -> None:
        self._samples += report.samples
        now = time.monotonic()
        if now < self._due and report.step < self._total:
            return

        self._due = now + _LINE_SECONDS
        seconds = max(now - self._began, 1e-9)
        left = (self._total - report.step) * seconds / (report.step - self._first_step)
        self._say(
            f"step {report.step:,} of {self._total:,}: loss {report.loss:.4g}, "
            f"{self._samples / seconds:.4g} samples/s, {clock(left)} left"
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        self._say(f"after step {evaluation.step:,}: {describe_evaluation(evaluation)}")

    def back_to(self, first_step: int) -> None:
        self._first_step = first_step
        self._began = time.monotonic()
        self._samples = 0

    def close(self) -> None:
        """Nothing is open."""

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def describe_evaluation(evaluation: Evaluation) -> str:
    """The loss on held-out data and the metrics, in a few words."""
    values = {"evaluation loss": float(evaluation), **evaluation.metrics}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def clock(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"

    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"

    return f"{minutes // 60} h {minutes % 60:02} min"


def _sizes(memory: StepMemory) -> dict[str, str]:
    """What the bar shows of memory, in GiB."""
    if memory.allocated_bytes is not None:
        sizes = (memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes)
        shown = "/".join(f"{(size or 0) / GIB:.1f}" for size in sizes)
        return {"now/peak/reserved": f"{shown}G"}

    if memory.resident_bytes is not None:
        return {"resident": f"{memory.resident_bytes / GIB:.2f}G"}
    return {}


class _CellBar(tqdm):  # type: ignore[misc]
    """tqdm's line as the output of a notebook's cell.

    tqdm's own notebook bar needs a package of widgets.
    """

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
