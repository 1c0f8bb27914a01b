"""The zygote: a process that has imported torch, transformers and peft once, and forks a child for
each job.

Importing them costs about five seconds; forking costs a tenth of one. It does no tensor work
itself, because a process that has computed with several threads deadlocks its forked children, and
it never opens the CUDA driver, which does not survive a fork. It is started by `LocalExecutor`, so
that no `__main__` of the user's is run again.

It ends, and all that its child started, however the parent ends: the socket between them closes.
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
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil

from autofit.core.forks import adopt_orphans, die_with_parent, ending_forks
from autofit.core.zygote_process import START
from autofit.probe.preload import preload

_LOOK_SECONDS = 0.5  # between two looks at the log
# Bytes of a log, and of its end that is kept: what a model prints may be gigabytes.
_MOST_LOGGED = 2**24
_KEPT_OF_LOG = 2**20
# Seconds for what a job left running: to clean up (multiprocessing's tracker removes shared
# memory), and to be gone.
_PATIENCE = 0.5
_LONGEST_END = 10.0
_READ_BYTES = 2**16  # of a pipe, at once


@dataclass(frozen=True)
class Job:
    """Work for a child.

    Attributes:
        payload: a pickle of (function, arguments), opened in the child only.
        scratch: a file to delete afterwards.
    """

    payload: bytes
    log: str
    timeout: float
    scratch: str | None = None


@dataclass(frozen=True)
class Preload:
    """Names of modules to import before the next job; None is sent when that is done."""

    names: Sequence[str]


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        payload: its answer, a pickle of what the function returned; empty where there is none.
        code: its exit code; -number where that signal killed it; None where its time was up, or the
            parent stopped it.
        last_line: of its log, which the parent looks up.
    """

    payload: bytes
    code: int | None
    last_line: str = ""


def main() -> None:
    """Serve jobs from the socket whose file descriptor is the first argument.

    The other arguments name modules to import.
    """
    connection = Connection(int(sys.argv[1]))
    _import(sys.argv[2:])
    adopt_orphans()
    # From here on the socket tells, and what jobs started is ended first: one that somebody stopped
    # goes on for that.
    die_with_parent(signal.SIGCONT)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    # `deaths` is readable when a child ends or stops; by SIGCHLD, because gVisor, in which
    # containers run, lacks pidfd_open.
    deaths, wakeup = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal would not wake

    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        connection.send(None)  # it is ready
        while True:
            asked = connection.recv()
            if isinstance(asked, Preload):
                _import(asked.names)
                connection.send(None)
            elif asked:  # None is meant for a job that has just ended
                connection.send(_run(asked, connection, deaths))


def _import(names: Sequence[str]) -> None:
    """Import modules for children.

    Where a library opens CUDA, so that no child could use it, start again with autofit's own alone.
    """
    gc.disable()
    if names and not preload(names):
        os.execv(sys.executable, [sys.executable, "-P", "-c", START, sys.argv[1]])

    importlib.import_module("autofit.probe.measure")
    gc.collect()
    gc.freeze()  # children then leave the pages of these objects shared
    gc.enable()


def _run(job: Job, connection: Connection, deaths: int) -> Ended:
    """Fork a child for the job and wait for its answer, its death, its timeout, or the parent's end
    or word."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(reader)
        connection.close()
        _child(job, writer)

    os.close(writer)
    answer = None
    log = Path(job.log)
    deadline = time.monotonic() + job.timeout
    try:
        answer = _collect(reader, child, deaths, connection, deadline, log)
    finally:
        os.close(reader)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _end_orphans()
        _shorten(log)
        if job.scratch:
            Path(job.scratch).unlink(missing_ok=True)

    if answer is None:
        return Ended(b"", None)
    if code:  # it may have been killed while it answered
        answer = b""
    return Ended(answer, code)


def _end_orphans() -> None:
    """End what a job left running: compiler workers, data loaders, whatever the model started, also
    in another session.

    They become this process's children when their parents end.
    """
    start = time.monotonic()
    asked: set[int] = set()
    with contextlib.suppress(ChildProcessError):  # none is left
        while (passed := time.monotonic() - start) < _LONGEST_END:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue

            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if passed > _PATIENCE:
                        process.kill()
                    elif process.pid not in asked:
                        process.terminate()
                asked.add(process.pid)
            time.sleep(0.01)


def _collect(
    reader: int, child: int, deaths: int, connection: Connection, deadline: float, log: Path
) -> bytes | None:
    """What the child wrote before it ended; None when the time is up, or the parent says so.

    The pipe is read in parts, not as a `Connection`: a child that is killed halfway through its
    answer, leaving a process that holds the pipe open, would keep `Connection.recv` waiting for the
    rest past the deadline. Nor is its end the child's, which may close all its files and go on.

    Raises EOFError where the parent is gone.
    """
    parts = bytearray()
    sources = [reader, deaths, connection.fileno()]
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(sources, [], [], min(left, _LOOK_SECONDS))
        _shorten(log)

        if connection.fileno() in ready:
            connection.recv()
            return None

        if reader in ready:
            part = os.read(reader, _READ_BYTES)
            parts += part
            if not part:
                sources.remove(reader)
        elif deaths in ready:
            os.read(deaths, _READ_BYTES)  # first, so that a later death makes it readable again
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # A process that the child left behind may hold the pipe open.
                os.set_blocking(reader, False)
                with contextlib.suppress(BlockingIOError):
                    # The child may have written since select.
                    while part := os.read(reader, _READ_BYTES):
                        parts += part
                return bytes(parts)
    return None


def _shorten(log: Path) -> None:
    """Leave the beginning and the end of a log that is too long; the child may still append."""
    with contextlib.suppress(OSError), log.open("r+b") as file:  # it is not there yet, or no longer
        if file.seek(0, os.SEEK_END) <= _MOST_LOGGED:
            return

        file.seek(-_KEPT_OF_LOG, os.SEEK_END)
        end = file.read(_KEPT_OF_LOG)

        # Cut last: what the child appends from then on stands behind all that was kept.
        file.seek(_KEPT_OF_LOG)
        file.write(b"\n[much more was printed]\n" + end)
        file.truncate()


def _child(job: Job, writer: int) -> NoReturn:
    """Run the job in this forked process, and exit without the zygote's clean-up."""
    code = 1
    try:
        os.setsid()
        die_with_parent()

        try:
            log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:  # deleted meanwhile, or the disk is full: no reason for the probe to fail
            log = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)

        function, arguments = pickle.loads(job.payload)
        with ending_forks():
            answer = function(*arguments)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):  # the model may have replaced or closed it
                stream.flush()
        os._exit(code)
