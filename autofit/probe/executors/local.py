"""The parent side of probing: starts the zygote, sends it jobs, and turns whatever comes back into data."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.environment import set_defaults
from autofit.core.errors import AutofitError, InputError, ProbeError
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Traits, Workload
from autofit.hardware.out_of_memory import outcome_of_last_words
from autofit.probe.measure import look, look_around, look_at_card, look_for_cards, look_for_room, measure, serve
from autofit.probe.messages import Died, Job, Ready, Returned, TimedOut, receive, send
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.probe.timing import Plan
from autofit.probe.trace_step import trace_step

_START_SECONDS = 300.0
_LOOK_SECONDS = 600.0
_PICKLING = threading.Lock()  # pickling runs the user's code, which need not bear being run in several threads


class LocalExecutor:
    """A zygote and the children it forks, one at a time. A context manager; leaving it ends them all.

    Args:
        log_directory: where each probe's output goes, `NNNN.log`; None: a temporary one.
        timeout: seconds a probe may take; the first may take twice that, since it warms caches.
        place: where they run; None: on all that this process may use.

    Raises:
        ProbeError: the zygote cannot be started.
    """

    def __init__(self, log_directory: Path | None = None, timeout: float = 600.0, place: Place | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory() if log_directory is None else None
        self._logs = log_directory or Path(self._temporary.name if self._temporary else "")
        self._timeout = timeout
        self._probes = 0
        self._connection, theirs = socket.socketpair()
        # The zygote imports from where this process does, and from nowhere else: "" is the current directory, which
        # `python -m` puts first unless told not to (-P), so that a types.py lying there would end it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        # Ask NVML whether there is a GPU: the plain check opens CUDA, which does not survive the forks to come.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        set_defaults(environment)
        self._log = f"zygote-{place.number}.log" if place else "zygote.log"
        place = place or Place(0)
        place.lay_down(environment)
        with (self._logs / self._log).open("ab") as log, theirs, place.entered():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.probe.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
            )
        self._ready = False
        self._pickled: tuple[Workload | None, bytes] | None = None

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hang_up(self) -> None:
        """Tell the zygote to end, and whoever waits for its answer in another thread not to."""
        with contextlib.suppress(OSError):  # the zygote has ended, or this was called before
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the zygote and its child; safe to call twice."""
        self.hang_up()  # closing alone would neither wake a thread that receives nor tell the zygote meanwhile
        self._connection.close()
        if not self._ready:
            self._process.kill()  # it has no child yet, and would import for seconds before it looked
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._temporary:
            self._temporary.cleanup()

    def detect(self, device: str | None) -> Hardware:
        """The hardware, seen by a child so that this process never opens the device.

        Raises:
            ProbeError: the device is not there, or the child died.
        """
        hardware: Hardware = self._look(look_around, device)
        return hardware

    def cards(self) -> tuple[str, ...]:
        """What CUDA_VISIBLE_DEVICES calls the visible cards, card 0 first; raises as `detect` does."""
        found: tuple[str, ...] = self._look(look_for_cards)
        return found

    def detect_idle(self, card: str) -> Hardware:
        """What one of the visible cards is, which nobody else may be using.

        Raises:
            ProbeError: others use it, or as of `detect`.
        """
        hardware: Hardware = self._look(look_at_card, card)
        return hardware

    def look(self, workload: Workload, device: str | None, budget_bytes: int | None) -> tuple[Hardware, Traits]:
        """The hardware, and the workload's traits on it.

        Raises:
            InputError: the workload is wrong; ProbeError: the device is not there, or the child died.
        """
        hardware, traits = self._look(look, device, budget_bytes, workload=workload)
        return hardware, traits

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        """Measure one Config in a child of its own.

        Raises:
            InputError: the workload cannot be sent, or not be opened there; ProbeError: the zygote itself is gone, the
                card cannot be used, or ran full because others use it.
        """
        log = self._logs / f"{number:04d}.log"
        said_before = log.stat().st_size if log.exists() else 0
        timeout = self._timeout * (1 if self._probes else 2)
        self._probes += 1
        start = time.monotonic()
        answer = self._call(measure, (request,), workload, log, timeout)
        seconds = time.monotonic() - start
        if isinstance(answer, AutofitError):
            raise answer
        if not isinstance(answer, Measurement):
            outcome, reason = _ending(answer, timeout, _last_line(log, said_before))
            answer = Measurement(config=request.config, outcome=outcome, reason=reason)
        if answer.outcome is Outcome.OUT_OF_MEMORY and request.hardware.device == "cuda":
            self._look(look_for_room, request.budget, request.hardware)  # others may have come while it ran
        return dataclasses.replace(answer, number=number, seconds=seconds)

    def trace(
        self, workload: Workload, config: Config, hardware: Hardware, budget: Budget, *, directory: Path
    ) -> dict[str, str]:
        """Keep a record of one step of a Config in a directory; what was written, by what it is (see `StepTrace`).

        Raises:
            InputError: as of `measure`; ProbeError: the step could not be run.
        """
        request = Request(config, hardware, budget, Plan())
        written: dict[str, str] = self.run(
            trace_step, workload, request, directory, log="step-trace.log", timeout=self._timeout
        )
        return written

    def run(self, function: Callable[..., Any], workload: Workload, *arguments: Any, log: str, timeout: float) -> Any:
        """What `function(workload, *arguments)` returns in a child of its own, which writes to the log of that name.

        Raises:
            InputError: what the function raises of that kind; ProbeError: the child died or took too long.
        """
        answer = self._call(function, arguments, workload, self._logs / log, timeout)
        if isinstance(answer, AutofitError):
            raise answer
        if isinstance(answer, TimedOut):
            raise ProbeError(f"it took more than {timeout:.0f} s.")
        if isinstance(answer, Died):
            raise ProbeError(f"its process ended: {_death(answer)}.", self._log_hint(log))
        return answer

    def _look(self, function: Callable[..., Any], *arguments: Any, workload: Workload | None = None) -> Any:
        answer = self._call(function, arguments, workload, self._logs / "look.log", _LOOK_SECONDS)
        if isinstance(answer, AutofitError):
            raise answer
        if isinstance(answer, TimedOut):
            raise ProbeError(f"looking at the model took more than {_LOOK_SECONDS:.0f} s.", "Make its factory faster.")
        if isinstance(answer, Died):
            raise ProbeError(f"looking at the model ended its process: {_death(answer)}.", self._log_hint("look.log"))
        return answer

    def _call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        workload: Workload | None,
        log: Path,
        timeout: float,
    ) -> Any:
        """What `function(workload, *arguments)` returned in a child, or TimedOut, or Died."""
        payload = pickle.dumps((serve, (function, self._pickle(workload), cloudpickle.dumps(arguments))))
        self._wait_until_ready()
        try:
            send(self._connection, Job(payload, str(log), timeout))
            answer = receive(self._connection)
        except (EOFError, OSError) as error:
            raise ProbeError("the process that starts probes ended.", self._log_hint(self._log)) from error
        return pickle.loads(answer.payload) if isinstance(answer, Returned) else answer

    def _pickle(self, workload: Workload | None) -> bytes:
        if self._pickled is None or self._pickled[0] is not workload:
            try:
                with _PICKLING:
                    self._pickled = workload, _pickle(workload)
            except Exception as error:  # pickling runs the user's code, which may raise anything
                message = f"the workload cannot be sent to a probe process: {type(error).__name__}: {error}."
                remedy = "Give factories that hold no open files, locks or device handles: autofit.Workload(model=...)."
                raise InputError(message, remedy) from error
        return self._pickled[1]

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._connection.settimeout(_START_SECONDS)
            message = receive(self._connection)
        except (EOFError, OSError) as error:
            raise ProbeError("the process that starts probes did not start.", self._log_hint(self._log)) from error
        assert isinstance(message, Ready)
        self._connection.settimeout(None)
        self._ready = True

    def _log_hint(self, name: str) -> str:
        try:
            lines = (self._logs / name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"Its last words: {lines[-1]}" if lines else ""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that also takes modules with parametrizations (weight_norm), which torch itself refuses to pickle:
    they could not be opened where their class does not exist, but cloudpickle sends the class along."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _pickle(workload: Workload | None) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(workload)
    return file.getvalue()


def _ending(answer: TimedOut | Died, timeout: float, last_line: str) -> tuple[Outcome, str]:
    if isinstance(answer, TimedOut):
        return Outcome.TIMED_OUT, f"took more than {timeout:.0f} s"
    if answer.signal == signal.SIGKILL:  # nobody here sent it: the kernel's out-of-memory killer did
        return Outcome.HOST_OUT_OF_MEMORY, "the system killed the process for want of host memory"
    told = outcome_of_last_words(last_line) if answer.code == 1 else None
    return told or (Outcome.FAILED, _death(answer))


def _last_line(log: Path, start: int) -> str:
    """The last line that was written to a log after its first so many bytes."""
    try:
        written = log.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
    return (written.strip().splitlines() or [""])[-1]


def _death(answer: Died) -> str:
    if answer.signal is not None:
        return f"killed by {signal.Signals(answer.signal).name}"
    return f"exit code {answer.code}"
