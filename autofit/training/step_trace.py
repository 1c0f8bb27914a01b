"""A record of one training step for existing viewers.

A profiler trace, its operators as a table, and on CUDA a memory snapshot. The trace opens in
ui.perfetto.dev and in TensorBoard's profiler, the snapshot in pytorch.org/memory_viz. A search
records its winner, a training one of its own steps.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from autofit.training.loop import StepReport

TRACE = "step_trace.json.gz"
OPERATORS = "step_operators.txt"
SNAPSHOT = "memory_snapshot.pickle"
# the name that its plugin torch-tb-profiler looks for
_TENSORBOARD = "tensorboard/step.pt.trace.json.gz"
_FILES = {
    "trace": TRACE,
    "operators": OPERATORS,
    "tensorboard": _TENSORBOARD,
    "memory_snapshot": SNAPSHOT,
}
_VIEWERS = {
    "trace": "ui.perfetto.dev",
    "operators": "reading",
    "tensorboard": "TensorBoard's plugin torch-tb-profiler",
    "memory_snapshot": "pytorch.org/memory_viz",
}
_MOST_OPERATORS = 200  # rows of the table
_MOST_OF_NAME = 80  # characters of an operator's name
WARM_STEPS = 2  # the first makes the optimizer's state; the second has found its kernels
# above all levels of libkineto, which else reports on stderr when it starts and stops
_SILENT = "6"
_MAX_EVENTS = 200_000  # of the allocator: an 8B model's step has some ten thousand


class StepTrace:
    """Records one step into a directory, which is made; files of these names are replaced."""

    def __init__(self, directory: Path, device: str) -> None:
        self._directory = directory
        self._cuda = device == "cuda"
        self._profiler: profile | None = None

    @contextmanager
    def recording_allocations(self) -> Iterator[None]:
        """Record on CUDA where each tensor made inside comes from, also before the traced step."""
        if not self._cuda:
            yield
            return

        torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS, stacks="python")
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def begin(self) -> None:
        """Start the profiler."""
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)

        self._profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        self._profiler.start()

    def end(self) -> None:
        """Stop the profiler and write the files."""
        profiler = self.stop()
        assert profiler is not None, "begin() comes first"
        self._write(TRACE, lambda path: profiler.export_chrome_trace(str(path)))

        table = profiler.key_averages().table(
            sort_by="self_device_time_total" if self._cuda else "self_cpu_time_total",
            row_limit=_MOST_OPERATORS,
            max_name_column_width=_MOST_OF_NAME,
        )
        self._write(OPERATORS, lambda path: path.write_text(table, encoding="utf-8"))

        self._write(_TENSORBOARD, lambda path: shutil.copyfile(self._directory / TRACE, path))
        if self._cuda:
            self._write(SNAPSHOT, lambda path: torch.cuda.memory._dump_snapshot(str(path)))

    @property
    def message(self) -> str:
        """A sentence on what was written, and what opens it."""
        written = [f"{path} (for {_VIEWERS[name]})" for name, path in self.files.items()]
        return f"one step was recorded: {', '.join(written)}."

    @property
    def files(self) -> dict[str, Path]:
        """The written files: `trace`, `operators`, `tensorboard`, `memory_snapshot` (on CUDA)."""
        found = {}
        for name, file in _FILES.items():
            path = self._directory / file
            if path.exists():
                found[name] = path
        return found

    def stop(self) -> profile | None:
        """Stop the profiler, if it runs, and write nothing."""
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return None

        if self._cuda:
            torch.cuda.synchronize()
        profiler.stop()
        return profiler

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file whole: it gets its name once `write` has made it."""
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)

        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
            part = Path(folder, path.name)  # the suffix decides whether it is compressed
            write(part)
            part.replace(path)


class SteadyStep:
    """A callback that records the third step of a training.

    The pause between it and the step before is included. A context manager: a training that ends
    before that step leaves no record.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._steps = 0
        self._recording = ExitStack()

    def __enter__(self) -> Self:
        self._recording.enter_context(self._trace.recording_allocations())
        return self

    @property
    def done(self) -> bool:
        """Whether the step was recorded."""
        return self._steps > WARM_STEPS

    def __exit__(self, *_: object) -> None:
        self._trace.stop()
        self._recording.close()

    def __call__(self, report: StepReport) -> None:
        """Count a finished step."""
        self._steps += 1
        if self._steps == WARM_STEPS:
            self._trace.begin()
        elif self._steps == WARM_STEPS + 1:
            self._trace.end()
            self._recording.close()
