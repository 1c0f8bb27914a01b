"""The executor of one machine: a zygote of this process, which forks one child per probe."""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from autofit.core.errors import AutofitError, ProbeError, as_input_error, describe_error, printable
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.core.zygote_process import (
    START,
    TRANSFORMERS,
    ZygoteProcess,
    environment_of_zygote,
    taken,
)
from autofit.distributed.pickling import pickled
from autofit.hardware.out_of_memory import outcome_of_last_words
from autofit.probe.executors import LEAST_SECONDS, Executor, Work
from autofit.probe.measure import check_free_memory, measure, serve
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.probe.zygote import Ended, Job, Preload

_START_SECONDS = 300.0  # until a zygote is ready
LATE_SECONDS = 60.0  # beyond a job's timeout, until its zygote is taken to be stuck
_END_SECONDS = 5.0  # until it has ended what its child started
_TIME_OVER = "The time limit was over: give a longer one."
_HINT = "The last line of its log: "
_PICKLING = threading.Lock()  # pickling runs the user's code, which need not be thread-safe


@dataclasses.dataclass(frozen=True)
class Call:
    """`function(workload, *arguments)` for a child.

    Attributes:
        scratch: a file that is deleted afterwards.
    """

    function: Work
    workload: Workload | None
    arguments: tuple[Any, ...]
    log: str
    timeout: float
    scratch: str | None = None


class Worker(Executor):
    """Has one zygote, wherever that is, fork a child for each call, one at a time; further callers
    wait.

    Each probe's output goes to `NNNN.log` in `logs`.
    """

    connection: Connection | int  # readable once there is an answer

    def __init__(self, logs: Path, timeout: float) -> None:
        self.logs = logs
        self.timeout = timeout
        self._probes = 0
        self._turn = threading.Lock()  # of the one caller whom the zygote serves
        self._pickled: tuple[Workload | None, bytes] | None = None

    @abstractmethod
    def send(self, job: Job) -> None:
        """Have a child do a job, for which `receive` waits; its log is named within `logs`.

        Raises a ProbeError where the zygote has ended, or was given up, as do `stop` and `receive`.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the child that runs, or has just ended, as if its time were up."""

    @abstractmethod
    def receive(self, timeout: float) -> Ended:
        """How the child ended, with the last line of its log."""

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        timeout = timeout_of_probe(self.timeout, request, is_first=not self._probes)
        self._probes += 1
        start = time.monotonic()
        answer = self._call(measure, workload, (request,), f"{number:04d}.log", timeout)
        seconds = time.monotonic() - start

        if not isinstance(answer, Measurement):
            outcome, reason = how_it_ended(answer, timeout)
            answer = Measurement(config=request.config, outcome=outcome, reason=reason)
        if answer.outcome is Outcome.OUT_OF_MEMORY and request.hardware.device == "cuda":
            # Other processes may have come meanwhile.
            self._look(check_free_memory, None, request.budget, request.hardware)
        return dataclasses.replace(answer, number=number, seconds=seconds)

    def run(
        self,
        function: Work,
        workload: Workload | None,
        *arguments: Any,
        log: str,
        timeout: float,
        task: str = "it",
    ) -> Any:
        seconds = self.seconds_within(timeout)
        answer = self._call(function, workload, arguments, log, seconds)
        if not isinstance(answer, Ended):
            return answer

        if answer.code is None:
            remedy = _TIME_OVER if seconds < timeout else ""
            raise ProbeError(f"{task} took more than {seconds:.0f} s.", remedy)
        raise ProbeError(
            f"{task} ended its process: {_cause_of_death(answer.code)}.", _hint(answer.last_line)
        )

    def _call(
        self,
        function: Work,
        workload: Workload | None,
        arguments: tuple[Any, ...],
        log: str,
        timeout: float,
    ) -> Any:
        """What `function(workload, *arguments)` returned in a child, or how that ended.

        Raises autofit's errors.
        """
        with self._turn:
            self.start(Call(function, workload, arguments, log, timeout))
            return self.finish(timeout + LATE_SECONDS)

    def start(self, call: Call) -> None:
        """Have a child answer a call, for which `finish` waits; for one caller at a time.

        Raises as `run`.
        """
        own = cloudpickle.dumps((call.function, call.arguments))
        payload = pickle.dumps((serve, (self._pickle(call.workload), own)))
        self.send(Job(payload, call.log, call.timeout, call.scratch))

    def finish(self, timeout: float) -> Any:
        """The answer to the call that was started, or an `Ended`; raises autofit's errors."""
        ended = self.receive(timeout)
        answer: Any = dataclasses.replace(ended, payload=b"")
        with contextlib.suppress(Exception):  # the model may have written into the pipe
            if ended.payload:
                answer = pickle.loads(ended.payload)

        if isinstance(answer, AutofitError):
            raise answer
        return answer

    def _pickle(self, workload: Workload | None) -> bytes:
        """The workload's pickle; the last one is kept."""
        if self._pickled and self._pickled[0] is workload:
            return self._pickled[1]

        def describe(error: BaseException) -> str:
            return f"the workload cannot be sent to a probe process: {describe_error(error)}."

        remedy = (
            "Give factories that hold no open files, locks or device handles: "
            "autofit.Workload(model=...)."
        )
        with as_input_error(describe, remedy), _PICKLING:
            payload = pickled(workload)
        self._pickled = workload, payload
        return payload


class LocalExecutor(Worker):
    """A zygote on this machine; without a log directory, a temporary one."""

    connection: Connection

    def __init__(
        self, log_directory: Path | None = None, timeout: float = 600.0, place: Place | None = None
    ) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if log_directory is None:
            self._temporary = tempfile.TemporaryDirectory()
            log_directory = Path(self._temporary.name)
        super().__init__(log_directory, timeout)

        environment = environment_of_zygote()
        if place is None:
            self._log = "zygote.log"
            self._zygote = taken(environment) or ZygoteProcess(environment, START)
        else:
            self._log = f"zygote-{place.number}.log"
            place.set_environment(environment)
            with place.entered():
                self._zygote = ZygoteProcess(environment, START)

        self._process = self._zygote.process
        self._socket = self._zygote.socket
        self.connection = Connection(os.dup(self._socket.fileno()))
        self._ready = False
        self._gave_up = False
        self._logged = 0  # bytes of what the zygote printed
        self._written = self.logs, 0  # the log of the call that runs, and its size before

    def give_up(self) -> None:
        self._gave_up = True
        with contextlib.suppress(OSError):  # the zygote has ended, or this was called before
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone would neither wake a waiting thread nor reach the zygote meanwhile.
        self.give_up()
        with self._turn:
            self.connection.close()

        if not self._ready:  # it has no child yet, and would import for seconds before it looked
            self._process.kill()
        self._process.send_signal(signal.SIGCONT)  # somebody may have stopped it
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

        self._keep_log()
        self._zygote.close()
        if self._temporary:
            self._temporary.cleanup()

    def ready(self) -> None:
        """Wait until the zygote has started."""
        with self._talking():
            if self._ready:
                return

            self._receive(self.seconds_within(_START_SECONDS))
            lacks_them = self._zygote.names != TRANSFORMERS
            if lacks_them and "transformers.modeling_utils" in sys.modules:
                # Else each child would import them anew.
                self.connection.send(Preload(TRANSFORMERS))
                self._receive(self.seconds_within(_START_SECONDS))
            self._ready = True

    def send(self, job: Job) -> None:
        path = self.logs / job.log
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
        # An OSError is raised here where it cannot be made: the child could not say so.
        with path.open("ab") as file:
            self._written = path, file.tell()

        began = time.monotonic()
        self.ready()  # this may take seconds, of the job's time
        left = max(job.timeout - (time.monotonic() - began), LEAST_SECONDS)
        with self._talking():
            self.connection.send(dataclasses.replace(job, log=str(path), timeout=left))

    def stop(self) -> None:
        with self._talking():
            self.connection.send(None)

    def receive(self, timeout: float) -> Ended:
        with self._talking():
            ended: Ended = self._receive(timeout)
        return dataclasses.replace(ended, last_line=_last_line(_read(*self._written)))

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """With the zygote; a ProbeError where it has ended, or was given up."""
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._no_answer() from error
        # Ctrl-C: the next caller would take the answer still to come for its own.
        except BaseException:
            self.give_up()
            raise

    def _receive(self, timeout: float) -> Any:
        """The zygote's next message; an EOFError where none comes in time."""
        if not self.connection.poll(timeout):
            raise EOFError
        return self.connection.recv()

    def _no_answer(self) -> ProbeError:
        """How the zygote ended, with its last line where that tells of an error of its own."""
        gave_up = self._gave_up
        is_late = time.monotonic() >= self.until
        self.give_up()  # an answer that comes late would be taken for the next caller's
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if gave_up or is_late else _END_SECONDS)

        what = "ended" if self._ready else "did not start"
        code = self._process.returncode
        if code is None:
            if not gave_up:
                what = "does not answer"
            remedy = _TIME_OVER if is_late else ""
            return ProbeError(f"the process that starts probes {what}.", remedy)

        line = _last_line(self._keep_log()) if code > 0 else ""
        return ProbeError(
            f"the process that starts probes {what}: {_cause_of_death(code)}.", _hint(line)
        )

    def _keep_log(self) -> bytes:
        """Write what the zygote printed to its log; returns all of it."""
        printed = self._zygote.printed()
        # The folder may have been deleted since.
        with contextlib.suppress(OSError), (self.logs / self._log).open("ab") as log:
            log.write(printed[self._logged :])
            self._logged = len(printed)
        return printed


def timeout_of_probe(timeout: float, request: Request, *, is_first: bool) -> float:
    """The seconds of a probe: of the first one twice as many, since it warms caches."""
    if is_first:
        timeout *= 2
    return min(timeout, request.plan.seconds)


def how_it_ended(answer: Ended, timeout: float) -> tuple[Outcome, str]:
    """The outcome of a probe without an answer, and the reason."""
    if answer.code is None:
        return Outcome.TIMED_OUT, f"took more than {timeout:.0f} s"
    if answer.code == -signal.SIGKILL:  # nobody here sent it: the kernel's out-of-memory killer did
        return Outcome.HOST_OUT_OF_MEMORY, "the system killed the process for want of host memory"

    found = None
    if answer.code == 1:
        found = outcome_of_last_words(answer.last_line)
    return found or (Outcome.FAILED, _cause_of_death(answer.code))


def _cause_of_death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def _hint(line: str) -> str:
    """What to read where a process wrote something last."""
    return line and _HINT + line


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return printable(lines[-1]) if lines else ""


def _read(log: Path, start: int) -> bytes:
    """What a log holds after its first `start` bytes."""
    try:
        return log.read_bytes()[start:]
    except OSError:
        return b""
