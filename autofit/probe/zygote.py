"""The zygote: a process that has imported torch, transformers and peft once, and forks one child per job.

Importing them costs about five seconds; forking costs a tenth of one. It does no tensor work itself, because a process
that has computed with several threads deadlocks its forked children, and it never opens the CUDA driver, which does
not survive a fork. Run as `python -m autofit.probe.zygote FD`, so no `__main__` of the user's is run again.

It ends, and its child with it, however the parent ends: the socket between them closes.
"""

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from autofit.core.environment import die_with_parent
from autofit.probe.messages import Died, Job, Returned, TimedOut
from autofit.probe.preload import preload

_PRELOADED = ("transformers", "transformers.modeling_utils", "autofit.probe.measure", "peft")
_LOOK_SECONDS, _MOST_LOGGED, _KEPT_OF_LOG = 0.5, 2**24, 2**20  # what a model prints may be gigabytes
_BARE = "--bare"  # import autofit's own modules only


def main() -> None:
    """Serve jobs from the socket whose file descriptor is the first argument."""
    connection = Connection(int(sys.argv[1]))
    gc.disable()  # a fifth of the time of imports, which leave nothing to collect
    if _BARE in sys.argv:
        importlib.import_module("autofit.probe.measure")
    elif not preload(_PRELOADED):  # a library opened CUDA after all: no forked child could use it
        os.execv(sys.executable, [sys.executable, "-P", "-m", "autofit.probe.zygote", sys.argv[1], _BARE])
    gc.collect()
    gc.freeze()  # children then leave the pages of these objects shared
    gc.enable()
    deaths = _Deaths()
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        connection.send(None)  # it is ready
        while True:
            connection.send(_run(connection.recv(), connection, deaths))


class _Deaths:
    """A file that becomes readable when a child ends or stops.

    By SIGCHLD, because pidfd_open is missing from some kernels that containers run on (gVisor's).
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal would not write to the file

    def fileno(self) -> int:
        return self._reader

    def includes(self, child: int) -> bool:
        """Whether this child is dead; call it once the file is readable."""
        os.read(self._reader, 1 << 16)  # first, so that a later death makes the file readable again
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def forget(self) -> None:
        """Undo it in a forked child, whose own children do not count."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)


def _run(job: Job, connection: Connection, deaths: _Deaths) -> Returned | Died | TimedOut:
    """Fork a child for the job and wait for its answer, its death, its timeout or the parent's end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        deaths.forget()
        os.close(reader)
        connection.close()
        _child(job, writer)
    os.close(writer)
    answer: bytes | None = None
    try:
        answer = _collect(reader, child, deaths, connection, time.monotonic() + job.timeout, Path(job.log))
    finally:
        os.close(reader)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(ProcessLookupError):  # compiler workers and data loaders must not outlive it
            os.killpg(child, signal.SIGKILL)
    if answer is None:
        return TimedOut()
    code = os.waitstatus_to_exitcode(status)
    if answer and code == 0:  # else it was killed while it answered
        return Returned(answer)
    return Died(code)


def _collect(
    reader: int, child: int, deaths: _Deaths, connection: Connection, deadline: float, log: Path
) -> bytes | None:
    """What the child wrote before it ended; None when the time is up. Exits when the parent is gone. Of a log that
    would fill the disk the beginning stays.

    The pipe is read in parts, not as a `Connection`: a child that is killed halfway through its answer, leaving a
    process that holds the pipe open, would keep `Connection.recv` waiting for the rest past the deadline.
    """
    parts = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reader, deaths.fileno(), connection.fileno()], [], [], min(left, _LOOK_SECONDS))
        with contextlib.suppress(OSError):  # it is not there yet
            if log.stat().st_size > _MOST_LOGGED:
                _shorten(log)
        if connection.fileno() in ready:  # the parent sends nothing while a job runs: so it has ended
            raise SystemExit(0)
        if reader in ready:
            part = os.read(reader, 1 << 16)
            if not part:
                return bytes(parts)
            parts += part
        elif deaths.fileno() in ready and deaths.includes(child):
            os.set_blocking(reader, False)  # a process that the child left behind may hold the pipe open
            with contextlib.suppress(BlockingIOError):
                while part := os.read(reader, 1 << 16):  # written since the pipe was looked at
                    parts += part
            return bytes(parts)
    return None


def _shorten(log: Path) -> None:
    """Leave the beginning and the end of a log; the child, which appends to it, may go on meanwhile."""
    with log.open("r+b") as file:
        file.seek(-_KEPT_OF_LOG, os.SEEK_END)
        end = file.read(_KEPT_OF_LOG)
        file.truncate(_KEPT_OF_LOG)
        file.seek(0, os.SEEK_END)
        file.write(b"\n[much more was printed]\n" + end)


def _child(job: Job, writer: int) -> NoReturn:
    """Run the job in this forked process, and exit without the zygote's clean-up."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        function, arguments = pickle.loads(job.payload)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(function(*arguments), pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
