"""One training step written down for the viewers that people have: a profiler trace, and on CUDA a memory snapshot.

The trace opens in ui.perfetto.dev, the snapshot in pytorch.org/memory_viz. A search records its winner, a training one
of its own steps; both through here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from autofit.training.loop import StepReport

TRACE, SNAPSHOT = "step_trace.json.gz", "memory_snapshot.pickle"
WARM_STEPS = 2  # the optimizer's state exists after the first; the second has found its kernels
_SILENT = "6"  # above all levels of libkineto, which else tells stderr when it starts and stops
_MAX_EVENTS = 200_000  # of the allocator: an 8B model's step has some ten thousand


class StepTrace:
    """Writes what happens in one step into a directory, which is made; what lies there of these names is replaced."""

    def __init__(self, directory: Path, device: str) -> None:
        self._directory = directory
        self._cuda = device == "cuda"
        self._profiler: profile | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Know on CUDA where each tensor comes from that is made inside, whether before the step or in it."""
        if not self._cuda:
            yield
            return
        torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS, stacks="python")
        try:
            yield
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def begin(self) -> None:
        """Record from here on."""
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        self._profiler.start()

    def end(self) -> None:
        """Write down what happened since `begin`."""
        profiler = self._stopped()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(TRACE, lambda path: profiler.export_chrome_trace(str(path)))
        if self._cuda:
            self._write(SNAPSHOT, lambda path: torch.cuda.memory._dump_snapshot(str(path)))

    def abandon(self) -> None:
        """Record no longer, and write nothing; also where nothing was begun."""
        if self._profiler is not None:
            self._stopped()

    @property
    def told(self) -> str:
        """What has been written, and what opens it, in a sentence."""
        viewers = {"trace": "ui.perfetto.dev", "memory_snapshot": "pytorch.org/memory_viz"}
        places = [f"{path} (for {viewers[name]})" for name, path in self.files.items()]
        return f"one step was recorded: {', '.join(places)}."

    @property
    def files(self) -> dict[str, Path]:
        """What has been written, by what it is: `trace`, on CUDA also `memory_snapshot`."""
        named = {"trace": self._directory / TRACE, "memory_snapshot": self._directory / SNAPSHOT}
        return {name: path for name, path in named.items() if path.exists()}

    def _stopped(self) -> profile:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None, "begin() comes first"
        if self._cuda:
            torch.cuda.synchronize()
        profiler.stop()
        return profiler

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        aside = self._directory / f".part-{name}"  # its ending says whether it is compressed
        try:
            write(aside)
            aside.replace(self._directory / name)
        finally:
            aside.unlink(missing_ok=True)


class SteadyStep:
    """A callback that records the third step of a training, whatever lies between it and the step before included.

    A context manager: a training that ends before that step has leaves no record.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._seen = 0
        self._watching = ExitStack()

    def __enter__(self) -> SteadyStep:
        self._watching.enter_context(self._trace.watched())
        return self

    @property
    def done(self) -> bool:
        """Whether the step was recorded."""
        return self._seen > WARM_STEPS

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace.abandon()
        self._watching.close()

    def __call__(self, report: StepReport) -> None:
        """Take note that a step has ended."""
        self._seen += 1
        if self._seen == WARM_STEPS:
            self._trace.begin()
        elif self._seen == WARM_STEPS + 1:
            self._trace.end()
            self._watching.close()
