"""A zygote on another node: the actor that holds it there, and the worker that stands for it here.

Of Ray, only what an actor's handle does is known; what is asked and answered is as on one machine,
logs included.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, ProbeError
from autofit.core.hardware import Hardware
from autofit.core.links import Link
from autofit.core.workload import Workload
from autofit.probe.executors.gang import RanksExecutor
from autofit.probe.executors.local import LATE_SECONDS, LocalExecutor, Worker
from autofit.probe.measure import trace_fetched, trace_fetched_on_rank
from autofit.probe.placement import Place, physical_cores
from autofit.probe.steps import Request
from autofit.probe.timing import Plan
from autofit.probe.zygote import Ended, Job

_MOST_SENT = 2**20  # bytes of a log


class LostError(ProbeError):
    """The node, or the actor, that a probe ran on is gone; it can be done elsewhere."""


class Zygote:
    """An actor: a LocalExecutor of its node, for a driver elsewhere.

    Several of its methods may run at a time.

    Args:
        directory: where the driver is; used where this node has it, too.
        paths: that the driver imports from; the same.
    """

    def __init__(self, directory: str, paths: Sequence[str]) -> None:
        if Path(directory).is_dir():
            os.chdir(directory)
        sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]

        self._turn = threading.Lock()
        self._stopping = threading.Lock()
        self._running = 0  # the number of a call, as are those that are stopped
        self._stopped = 0

    def begin(self, number: int, part: int, parts: int) -> None:
        """Start the zygote, on one of so many parts of the node's cores.

        Raises ProbeError where it does not start.
        """
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it, by processors instead of cores
        place = Place(number)
        if parts > 1:
            cores = physical_cores()
            share = max(1, len(cores) // parts)
            first = part * share
            own = [cores[index % len(cores)] for index in range(first, first + share)]
            place = Place(number, processors=frozenset().union(*own), cores=share)

        self._local = LocalExecutor(place=place)
        self._local.ready()

    def port(self) -> int:
        """A port of this node that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
            return port

    def call(self, number: int, job: Job) -> tuple[Ended | AutofitError, bytes]:
        """How the child of a job ended, and what it wrote to its log.

        Args:
            number: of the call, from 1 upwards.
        """
        with self._turn:
            log = self._local.logs / job.log
            answer: Ended | AutofitError
            try:
                with self._stopping:
                    if number <= self._stopped:
                        return Ended(b"", None), b""
                    self._local.send(job)
                    self._running = number
                answer = self._local.receive(job.timeout + LATE_SECONDS)
            except AutofitError as error:
                answer = error

            text = log.read_bytes()[-_MOST_SENT:] if log.exists() else b""
            log.unlink(missing_ok=True)
            return answer, text

    def stop(self, number: int) -> None:
        """End the child of that call; one that is still to come does not start."""
        with self._stopping:
            self._stopped = number
            if self._running == number:
                self._local.stop()

    def close(self) -> None:
        """End the zygote."""
        self._local.give_up()
        with self._turn:
            self._local.close()


class FarWorker(Worker):
    """Stands for a Zygote that has begun.

    Closing it leaves the actor to whoever made that.

    Args:
        actor: the Zygote's handle.
    """

    connection: int

    def __init__(self, actor: Any, logs: Path, timeout: float) -> None:
        super().__init__(logs, timeout)
        self.actor = actor
        self.connection = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._number = 0  # of the call that runs
        self._log = logs  # of that call
        self._answer: Any = None
        self._ringing = threading.Lock()
        self._gave_up = False
        self._closed = False

    def send(self, job: Job) -> None:
        with contextlib.suppress(BlockingIOError):  # an answer that nobody waited for any more
            os.eventfd_read(self.connection)
        self._check()
        self._number += 1
        self._log = self.logs / job.log
        self._answer = self.actor.call.remote(self._number, job).future()
        self._answer.add_done_callback(self._done)

    def _done(self, answer: Any) -> None:
        if answer is self._answer:
            self._ring()

    def _ring(self) -> None:
        with self._ringing:
            if not self._closed:
                os.eventfd_write(self.connection, 1)

    def _check(self) -> None:
        if self._gave_up:
            raise ProbeError("probes were given up.")

    def stop(self) -> None:
        self._check()
        self.actor.stop.remote(self._number)

    def receive(self, timeout: float) -> Ended:
        try:
            rang = wait([self.connection], timeout)
        # Ctrl-C: the next caller would take the answer still to come for its own.
        except BaseException:
            self.give_up()
            raise

        self._check()
        if not rang:
            raise LostError("a node of the cluster does not answer.")

        os.eventfd_read(self.connection)
        try:
            answer, text = self._answer.result()
        except Exception as error:  # whatever Ray says
            raise LostError("a node of the cluster was lost.") from error

        if text:
            self._log.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
            with self._log.open("ab") as file:
                file.write(text)
        if isinstance(answer, AutofitError):
            raise LostError(answer.message, answer.remedy)

        ended: Ended = answer
        return ended

    def trace(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        budget: Budget,
        *,
        directory: Path,
    ) -> dict[str, str]:
        request = Request(config, hardware, budget, Plan())
        return _written(self._record(trace_fetched, workload, request), directory)

    def give_up(self) -> None:
        self._gave_up = True
        self._ring()

    def close(self) -> None:
        self.give_up()
        with self._turn, self._ringing:
            if not self._closed:
                os.close(self.connection)
            self._closed = True


class FarGang(RanksExecutor):
    """FarWorkers on one node or several.

    Args:
        host: the address of rank 0's node.
    """

    def __init__(self, workers: Sequence[FarWorker], host: str, timeout: float) -> None:
        super().__init__(workers, timeout)
        self._host = host
        self._first = workers[0].actor

    def meeting(self) -> tuple[str, str | None]:
        try:
            port = self._first.port.remote().future().result(LATE_SECONDS)
        except Exception as error:  # whatever Ray says
            raise LostError("a node of the cluster was lost.") from error

        return f"tcp://{self._host}:{port}", None

    def trace(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        budget: Budget,
        *,
        directory: Path,
    ) -> dict[str, str]:
        request = Request(config, hardware, budget, Plan())
        files = self.traced(trace_fetched_on_rank, workload, request)
        paths = [_written(files[rank], directory) for rank in range(self.devices)]
        return paths[0]

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        if hardware.nodes > 1:  # what is measured is the link within a node
            return None
        return super().link(hardware, budget)


def _written(files: dict[str, tuple[str, bytes]], directory: Path) -> dict[str, str]:
    """Write files that were sent beneath a directory; their paths by what they hold."""
    paths = {}
    for name, (relative, content) in files.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        paths[name] = str(path)
    return paths
