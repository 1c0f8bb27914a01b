"""Recorders of a training run: a metrics file, TensorBoard, and a progress bar, all callbacks like a user's own."""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from autofit.core.files import write_atomically
from autofit.core.hardware import GIB
from autofit.core.notebook import Cell, in_notebook
from autofit.training.loop import StepReport
from autofit.training.memory_watch import StepMemory


class Recorder(ABC):
    """A callback that also records evaluations, and goes back where steps are done again."""

    @abstractmethod
    def __call__(self, report: StepReport) -> None:
        """Record one step."""

    @abstractmethod
    def evaluated(self, step: int, loss: float) -> None:
        """Record the mean loss on held-out data after a step."""

    @abstractmethod
    def back_to(self, first_step: int) -> None:
        """Go back to a step that is done again."""

    @abstractmethod
    def close(self) -> None:
        """Record nothing more."""


class MetricsFile(Recorder):
    """JSON lines, one per step or evaluation, each flushed at once. Opening drops the lines of steps after
    `first_step`, which a resumed run does again."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        # somebody's folder must not keep a run from going on
        if self._path.exists() and not self._path.is_file():
            self._path.rename(self._path.with_name(f"{self._path.name}.{time.time_ns()}.aside"))
        if self._path.exists():
            write_atomically(
                self._path, "".join(line for line, step in _lines(self._path) if step <= first_step)
            )
        self._file: IO[str] = self._path.open("a", encoding="utf-8")

    def back_to(self, first_step: int) -> None:
        self._file.close()
        self._open(first_step)

    def __call__(self, report: StepReport) -> None:
        row = asdict(report)
        self._write(row | row.pop("memory"))

    def evaluated(self, step: int, loss: float) -> None:
        self._write({"step": step, "evaluation": loss})

    def close(self) -> None:
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(
            json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"
        )
        self._file.flush()


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    """The readable lines, each with its step: a killed run leaves half a line, and a machine that went down may leave
    anything."""
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
        values = {"loss": report.loss, "lr": report.lr, "gradient_norm": report.gradient_norm}
        if report.seconds:
            values["samples_per_second"] = report.samples / report.seconds
        values |= vars(report.memory)
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, report.step)

    def evaluated(self, step: int, loss: float) -> None:
        self._writer.add_scalar("evaluation/loss", loss, step)

    def back_to(self, first_step: int) -> None:
        """Keep the former values; TensorBoard shows both."""

    def close(self) -> None:
        self._writer.close()


class Bar(Recorder):
    """A bar on stderr or in a notebook's cell: steps, loss, rate, the share of time spent waiting for data, and GiB of
    tensors now, at most and reserved; on a CPU those of the process."""

    def __init__(self, total: int, *, first_step: int = 0) -> None:
        options = {"total": total, "initial": first_step, "desc": "training", "unit": "step"}
        self._bar: Any = (
            _CellBar(**options) if in_notebook() else tqdm(**options, dynamic_ncols=True)
        )
        self._waiting = self._elapsed = 0.0

    def __call__(self, report: StepReport) -> None:
        self._waiting += report.data_seconds
        self._elapsed += report.data_seconds + report.seconds
        shown = {"loss": f"{report.loss:.4g}"}
        if self._elapsed and self._waiting / self._elapsed > 0.01:
            shown["waiting"] = f"{self._waiting / self._elapsed:.0%}"
        shown |= _sizes(report.memory)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def evaluated(self, step: int, loss: float) -> None:
        self._bar.set_description(f"training (evaluation {loss:.4g})")

    def back_to(self, first_step: int) -> None:
        self._bar.n = first_step
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    @staticmethod
    def wanted() -> bool:
        """Whether somebody is looking: a terminal, or a notebook."""
        return sys.stderr.isatty() or in_notebook()


def _sizes(memory: StepMemory) -> dict[str, str]:
    if memory.allocated_bytes is None:
        return (
            {}
            if memory.resident_bytes is None
            else {"resident": f"{memory.resident_bytes / GIB:.2f}G"}
        )
    sizes = memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes
    return {"now/peak/reserved": "/".join(f"{(size or 0) / GIB:.1f}" for size in sizes) + "G"}


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
