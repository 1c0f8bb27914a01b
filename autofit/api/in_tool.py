"""A tuned file, trained for some steps by its own tool: what that takes, beside what was said.

The tool trains a copy of the file, on random weights of the model's shape and on rows of the worst
length, under the memory that was given. The user's own files are only read.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autofit.api.staging import check_vocabulary, staged
from autofit.api.tool_file import Reading
from autofit.core.errors import InputError, require
from autofit.core.estimate import Estimate
from autofit.core.files import expanded, write_atomically
from autofit.core.result import Result
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.importers.importer import Keys
from autofit.export.runs import run_of
from autofit.export.runs.run import ToolRun
from autofit.export.runs.watched import Watch, Watched, run_watched
from autofit.export.source import ExportSource
from autofit.hardware.driver import why_no_gpu
from autofit.models.huggingface import HuggingFaceModel
from autofit.report.formatting import gib
from autofit.techniques import all_techniques

TRACKED = 3  # steps whose bytes are counted; on a CPU, counting takes time
TIMED = 3
_SPARE = 20  # steps that a loss scaler may skip
_NOTABLE = 0.05
_START_SECONDS = 900  # to import a tool, to read the weights, to tokenise the rows
_SLOWER = 20  # times as long as said a step may take before the tool is ended
_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_LAST_LINES = 200  # of what a tool wrote, kept in its log


@dataclass(frozen=True)
class InTool:
    """What a file's own tool took to train from it.

    Attributes:
        tool: its title.
        peak_bytes: of tensors, from the second step on; None where none was watched.
        tokens_per_second: None where no step was timed.
        said_bytes, said_tokens_per_second: what tuning measured of this config, else what it
            predicted; None where that is not known.
        failed: why the tool did not train, in a sentence; None: it did.
        notes: what differs by more than 5 %, a sentence each.
        log: the last lines that the tool wrote, where it did not train.
    """

    tool: str
    peak_bytes: int | None
    tokens_per_second: float | None
    said_bytes: int | None
    said_tokens_per_second: float | None
    failed: str | None
    notes: tuple[str, ...]
    log: Path | None

    def figures(self) -> dict[str, Any]:
        """What a report says of it, as `report.tuned.in_tool_lines` takes it."""
        return {
            "tool": self.tool,
            "peak_bytes": self.peak_bytes,
            "tokens_per_second": self.tokens_per_second,
            "said": (self.said_bytes, self.said_tokens_per_second),
            "notes": (self.failed, *self.notes) if self.failed else self.notes,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "tokens_per_second": self.tokens_per_second,
            "said_bytes": self.said_bytes,
            "said_tokens_per_second": self.said_tokens_per_second,
            "failed": self.failed,
            "notes": list(self.notes),
            "log": self.log and str(self.log),
        }


@dataclass(frozen=True)
class ToolPython:
    """A tool and an interpreter that has it."""

    run: ToolRun
    path: str


def python_of_tool(found: Reading, python: str | Path | None, device: str) -> ToolPython:
    """The tool of a file, with the interpreter that it is run by.

    Args:
        python: a path; None: this interpreter.

    Raises:
        InputError: the tool is not there, or this file cannot be trained here.
    """
    require(python is None or isinstance(python, str | Path), "tool_python must be a path", python)
    run = run_of(found.importer.tool.name)
    title = run.tool.title
    elsewhere = "Leave the verification out, or tune for this machine."
    if found.there.world > 1:
        message = f"{found.name} is for {found.there.world} devices, and a tool is run on one."
        raise InputError(message, elsewhere)
    if found.workload.task != CAUSAL_LM.name:
        message = f"{found.name} trains {found.workload.task}, and a tool is run for {CAUSAL_LM.name} alone."
        raise InputError(message, elsewhere)
    reason = why_no_gpu() if device == "cuda" else None
    if reason:
        raise InputError(f"{title} cannot be run for a card: {reason}.", elsewhere)
    assert isinstance(found.workload.model, HuggingFaceModel), "a file names its model"
    check_vocabulary(found.workload.model)

    path = sys.executable
    if python is not None:
        given = expanded(python, "tool_python")
        # not resolved: an environment's interpreter is a link
        path = str(given.absolute())
        if not given.exists():
            path = shutil.which(given) or path
    try:
        done = subprocess.run(
            [path, "-c", _HAS, run.package],
            cwd="/",
            capture_output=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{path} cannot be run as Python."
        raise InputError(message, "Give the interpreter of the tool: --tool-python.") from error
    if done.returncode:
        message = f"{title} is not installed for {path}."
        remedy = "Give an interpreter that has it: --tool-python."
        raise InputError(message, remedy)
    return ToolPython(run, path)


@dataclass(frozen=True)
class Said:
    """What tuning said of a config, and by what it did.

    Attributes:
        peak_bytes, step_seconds: what was measured, else what is predicted; None where that is not
            known.
        cap: the bytes that tensors may take.
        folder: of the search, for a log; None: it has none.
    """

    peak_bytes: int | None
    step_seconds: float | None
    cap: int
    folder: str | None

    @classmethod
    def of(cls, result: Result, predicted: Estimate | None) -> "Said":
        """Of a search, and the estimate of its config."""
        peak: int | None = None
        seconds: float | None = None
        best = result.best
        if best is not None:
            peak = best.peak_bytes.allocated if best.peak_bytes else None
            seconds = best.step_seconds.median if best.step_seconds else None
        elif predicted is not None:
            peak = predicted.allocated_bytes
            seconds = predicted.step_seconds
        hardware = result.hardware
        cap = result.budget.cap_bytes(hardware.device, hardware.context_bytes)
        return cls(peak, seconds, cap, result.run_directory)


def train_in_tool(
    python: ToolPython, found: Reading, *, keys: Keys, after: ExportSource, said: Said
) -> InTool:
    """Train some steps from a tuned file, by its own tool.

    Args:
        keys: what the tuned file says.
        after: its config.
        said: of this config.
    """
    workload = found.workload
    assert isinstance(workload.model, HuggingFaceModel) and workload.sequence_length
    samples = after.effective_batch_size or 1
    tokens = samples * workload.sequence_length
    compiles = any(
        technique.compiles(after.config[technique.name]) for technique in all_techniques()
    )
    watch = Watch(
        device=after.device,
        cap=said.cap,
        tracked=TRACKED,
        last=TRACKED + TIMED,
        compiles=compiles,
    )
    with tempfile.TemporaryDirectory(prefix="autofit-tool-") as folder:
        stage = staged(
            workload.model,
            Path(folder),
            name=Path(after.weights).name,
            samples=samples,
            tokens=workload.sequence_length,
            steps=TRACKED + TIMED + _SPARE,
        )
        beside = python.run.beside(replace(after, weights=str(stage.weights)))
        for name, text in beside.items():
            (stage.folder / name).write_text(text)
        arguments = python.run.prepare(keys, stage)
        watched = run_watched(
            [python.path, *arguments],
            stage.folder,
            python.run.variables(keys),
            watch=watch,
            seconds=_START_SECONDS + _SLOWER * (said.step_seconds or 60) * (TRACKED + TIMED),
        )
    return _judged(python.run.tool.title, watched, said, tokens)


def _judged(title: str, watched: Watched, said: Said, tokens: int) -> InTool:
    """What a tool took, with what differs from what was said; `tokens`: of a step."""
    steps = watched.ranks[0] if watched.ranks else ()
    peaks = []
    for step in steps[1:]:
        is_watched = step["tracked"] or "reserved_bytes" in step
        if is_watched and step["peak_bytes"] is not None:
            peaks.append(step["peak_bytes"])
    peak = max(peaks, default=None)
    times = [step["seconds"] for step in steps if not step["tracked"]]
    speed = tokens / statistics.median(times) if times else None
    said_speed = tokens / said.step_seconds if said.step_seconds else None

    failed = None
    if watched.out_of_memory or (peak is not None and peak > said.cap):
        failed = f"{title} needs more than the {gib(said.cap)} GiB that it may use."
    elif watched.code is None:
        failed = f"{title} did not finish {TRACKED + TIMED} steps in the time that it was given."
    elif watched.code or len(times) < TIMED:
        failed = f"{title} did not train {TRACKED + TIMED} steps from the tuned file."
    log = None
    if failed:
        log = _log_path(said)
        lines = watched.said.splitlines()[-_LAST_LINES:]
        write_atomically(log, "".join(f"{line}\n" for line in lines))
        failed += f" Its last lines are in {log}."

    notes = []
    if peak and said.peak_bytes and abs(peak / said.peak_bytes - 1) > _NOTABLE:
        notes.append(
            f"{title} needs {gib(peak)} GiB, {_differs(peak / said.peak_bytes, 'more', 'less')} "
            "than was said."
        )
    if speed and said_speed and abs(speed / said_speed - 1) > _NOTABLE:
        notes.append(
            f"{title} trains {speed:,.0f} tokens/s, "
            f"{_differs(speed / said_speed, 'more', 'fewer')} than was said."
        )
    return InTool(
        tool=title,
        peak_bytes=peak,
        tokens_per_second=speed,
        said_bytes=said.peak_bytes,
        said_tokens_per_second=said_speed,
        failed=failed,
        notes=tuple(notes),
        log=log,
    )


def _differs(ratio: float, more: str, less: str) -> str:
    return f"{abs(ratio - 1):.0%} {more if ratio > 1 else less}"


def _log_path(said: Said) -> Path:
    """Where the last lines of a tool are kept: with all else of the search."""
    folder = said.folder or tempfile.mkdtemp(prefix="autofit-tool-log-")
    return Path(folder) / "tool.log"
