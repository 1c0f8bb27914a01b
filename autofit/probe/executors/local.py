"""The executor of one machine: a zygote of this process, which forks one child per probe."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from autofit.core.environment import set_defaults
from autofit.core.errors import AutofitError, InputError, ProbeError
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.hardware.out_of_memory import outcome_of_last_words
from autofit.probe.executors import Executor, Work
from autofit.probe.measure import check_free_memory, measure, serve
from autofit.probe.messages import Died, Job, Returned, TimedOut
from autofit.probe.placement import Place
from autofit.probe.steps import Request

_START_SECONDS = 300.0
_PICKLING = threading.Lock()  # pickling runs the user's code, which need not be thread-safe


class LocalExecutor(Executor):
    """One zygote and the children it forks, one at a time; further callers wait.

    Args:
        log_directory: where each probe's output goes, `NNNN.log`; None: a temporary one.
        timeout: seconds a probe may take; the first may take twice that, since it warms caches.
        place: the share of the machine it runs on; None: all that this process may use.
    """

    def __init__(self, log_directory: Path | None = None, timeout: float = 600.0, place: Place | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory() if log_directory is None else None
        self.logs = log_directory or Path(self._temporary.name if self._temporary else "")
        self.timeout = timeout
        self._probes = 0
        self._turn = threading.Lock()  # of the one caller whom the zygote serves
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        # The zygote imports from where this process does, and from nowhere else: "" is the current directory, which
        # `python -m` puts first unless told not to (-P), so that a types.py lying there would end it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        # Ask NVML whether there is a GPU: the plain check opens CUDA, which does not survive the forks to come.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        set_defaults(environment)
        self._log = f"zygote-{place.number}.log" if place else "zygote.log"
        place = place or Place(0)
        place.set_environment(environment)
        with (self.logs / self._log).open("ab") as log, theirs, place.entered():
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

    def give_up(self) -> None:
        with contextlib.suppress(OSError):  # the zygote has ended, or this was called before
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.give_up()  # closing alone would neither wake a waiting thread nor reach the zygote meanwhile
        with self._turn:
            self._connection.close()
            self._socket.close()
        if not self._ready:
            self._process.kill()  # it has no child yet, and would import for seconds before it looked
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._temporary:
            self._temporary.cleanup()

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        log = self.logs / f"{number:04d}.log"
        written_before = log.stat().st_size if log.exists() else 0
        timeout = self.timeout * (1 if self._probes else 2)
        self._probes += 1
        start = time.monotonic()
        answer = self._call(measure, workload, (request,), log, timeout)
        seconds = time.monotonic() - start
        if not isinstance(answer, Measurement):
            outcome, reason = _ending(answer, timeout, _last_line(log, written_before))
            answer = Measurement(config=request.config, outcome=outcome, reason=reason)
        if answer.outcome is Outcome.OUT_OF_MEMORY and request.hardware.device == "cuda":
            self._look(check_free_memory, None, request.budget, request.hardware)  # others may have come meanwhile
        return dataclasses.replace(answer, number=number, seconds=seconds)

    def run(
        self, function: Work, workload: Workload | None, *arguments: Any, log: str, timeout: float, task: str = "it"
    ) -> Any:
        answer = self._call(function, workload, arguments, self.logs / log, timeout)
        if isinstance(answer, TimedOut):
            raise ProbeError(f"{task} took more than {timeout:.0f} s.")
        if isinstance(answer, Died):
            raise ProbeError(f"{task} ended its process: {_cause_of_death(answer)}.", self._hint(log))
        return answer

    def _call(
        self, function: Work, workload: Workload | None, arguments: tuple[Any, ...], log: Path, timeout: float
    ) -> Any:
        """What `function(workload, *arguments)` returned in a child, or TimedOut, or Died; raises autofit's errors."""
        payload = pickle.dumps((serve, (self._pickle(workload), cloudpickle.dumps((function, arguments)))))
        with self._turn:
            try:
                if not self._ready:
                    if not self._connection.poll(_START_SECONDS):
                        raise EOFError
                    self._connection.recv()
                    self._ready = True
                self._connection.send(Job(payload, str(log), timeout))
                answer = self._connection.recv()
            except (EOFError, OSError) as error:
                what = "ended" if self._ready else "did not start"
                raise ProbeError(f"the process that starts probes {what}.", self._hint(self._log)) from error
            except BaseException:  # Ctrl-C: the next caller would take the answer still to come for its own
                self.give_up()
                raise
        returned = pickle.loads(answer.payload) if isinstance(answer, Returned) else answer
        if isinstance(returned, AutofitError):
            raise returned
        return returned

    def _pickle(self, workload: Workload | None) -> bytes:
        if self._pickled is None or self._pickled[0] is not workload:
            file = io.BytesIO()
            try:
                with _PICKLING:
                    _Pickler(file).dump(workload)
            except Exception as error:  # pickling runs the user's code, which may raise anything
                message = f"the workload cannot be sent to a probe process: {type(error).__name__}: {error}."
                remedy = "Give factories that hold no open files, locks or device handles: autofit.Workload(model=...)."
                raise InputError(message, remedy) from error
            self._pickled = workload, file.getvalue()
        return self._pickled[1]

    def _hint(self, log: str) -> str:
        line = _last_line(self.logs / log)
        return f"The last line of its log: {line}" if line else ""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that also takes modules with parametrizations (weight_norm), which torch itself refuses to pickle:
    they could not be opened where their class does not exist, but cloudpickle sends the class along."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _ending(answer: TimedOut | Died, timeout: float, last_line: str) -> tuple[Outcome, str]:
    if isinstance(answer, TimedOut):
        return Outcome.TIMED_OUT, f"took more than {timeout:.0f} s"
    if answer.code == -signal.SIGKILL:  # nobody here sent it: the kernel's out-of-memory killer did
        return Outcome.HOST_OUT_OF_MEMORY, "the system killed the process for want of host memory"
    found = outcome_of_last_words(last_line) if answer.code == 1 else None
    return found or (Outcome.FAILED, _cause_of_death(answer))


def _cause_of_death(answer: Died) -> str:
    return f"exit code {answer.code}" if answer.code >= 0 else f"killed by {signal.Signals(-answer.code).name}"


def _last_line(log: Path, start: int = 0) -> str:
    """The last line of a log after its first `start` bytes; "" where there is none."""
    try:
        text = log.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
    return (text.strip().splitlines() or [""])[-1]
