"""Starts ranks on this machine for a function, and ends all of them as soon as one of them does.

    caller ── agent ─┬─ rank 0     its answer, and what it says meanwhile, come back over a socket
                     └─ rank 1...

The agent is a process of autofit's own, so that no rank runs the user's `__main__` again, and a
Ctrl-C in the terminal reaches the caller alone. Ranks are forked from it, which runs no tensor work
and opens no device. Where the caller is killed, the agent ends the ranks and removes what lies in
their folder; the job has no name in the file system at all. torch.distributed's elastic agent would
do for restarts on several machines (torchrun is it); here it would wait 30 s for ranks that hang,
and blame the first that ends, not the one that failed.
"""

import contextlib
import logging
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from autofit.core.environment import importing_alike, set_defaults
from autofit.core.errors import AutofitError, RankError, as_input_error, describe_error, printable
from autofit.core.forks import die_with_parent
from autofit.core.interrupts import SIGNALS, Interrupts
from autofit.core.place import Place
from autofit.distributed.group import TIMEOUT, Failure, failure_of, first_cause, joined, stuck
from autofit.distributed.pickling import pickled

Said = Callable[[Any], None]
_GRACE = 1.0  # seconds for ranks to say what they saw after one has failed, and as many to end
_LOOK_SECONDS = 0.2
# An interrupt while it imports, which takes seconds, ends it without a word. If somebody stopped it,
# it goes on when its caller is killed, and ends what it started.
_START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
from autofit.core.forks import die_with_parent
die_with_parent(signal.SIGCONT)
from autofit.distributed.launcher import main
main()"""
_LOG = "rank-{}.log"
_LAST_CHARACTERS = 2000  # of a log


@dataclass(frozen=True)
class _Told(Failure):
    """With what the caller of all ranks raises.

    Attributes:
        error: one of autofit's own.
    """

    error: AutofitError | None
    text: str
    traceback: str


def on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    count: int,
    device: str,
    timeout: float = TIMEOUT,
    said: Said = lambda _: None,
) -> Any:
    """What `function(say, *arguments)` returns on rank 0 of so many new processes, one for each
    device of this machine.

    Functions and arguments travel by cloudpickle. `say` sends a value to `said` in this process,
    from rank 0 only. Output of rank 0 goes where this process's does. The first SIGINT, SIGTERM or
    SIGHUP is passed on to all ranks, and acts here when they have ended; the second kills them.

    Raises:
        AutofitError: what a rank raised; RankError: a rank raised another error, died, or did not
        go on. All ranks are gone by then, within about 3 s, or after `timeout` seconds where one
        hangs.
    """
    agent: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        if agent is not None:
            agent.send_signal(number)

    # From before the folder is there until it is gone, or an interrupt would leave it.
    with (
        Interrupts(pass_on) as interrupts,
        tempfile.TemporaryDirectory(prefix="autofit-ranks-") as folder,
        tempfile.TemporaryFile() as job,
    ):
        with as_input_error(
            lambda error: f"this cannot be sent to other processes: {describe_error(error)}.",
            "Leave it out.",
        ):
            job.write(pickled((function, arguments)))
            job.flush()

        ours, theirs = socket.socketpair()
        environment = importing_alike()
        set_defaults(environment)
        descriptors = [theirs.fileno(), job.fileno()]
        given = map(str, (*descriptors, folder, count, device, timeout))
        with theirs:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *given],
                pass_fds=descriptors,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

        try:
            if interrupts.received is not None:  # before there was an agent to tell
                agent.terminate()
            with Connection(ours.detach()) as connection:
                kind, value = _listen(connection, said)
        finally:
            agent.kill()  # its ranks die with it
            agent.wait()

    if interrupts.received is not None:  # with the folder gone
        interrupts.act()
    if kind == "failed":
        raise value
    return pickle.loads(value)


def _listen(connection: Connection, said: Said) -> tuple[str, Any]:
    """How the ranks ended: "answer" and its pickle, or "failed" and the error."""
    while True:
        try:
            if not connection.poll(_LOOK_SECONDS):
                continue  # a signal that another thread got is acted on between two polls
            kind, value = connection.recv()
        except EOFError:
            return "failed", RankError("the process that starts ranks ended without an answer.")
        if kind != "said":
            return kind, value
        said(value)


def main() -> None:
    """The agent, told how to reach the caller, and what `_serve` needs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor, *given = sys.argv[1:]
    connection = Connection(int(descriptor))
    try:
        _serve(connection, *given)
    except Exception as error:
        message = f"the process that starts ranks failed: {describe_error(error)}."
        connection.send(("failed", RankError(message, details=traceback.format_exc())))


def _serve(connection: Any, job: str, folder: str, count: str, device: str, timeout: str) -> None:
    """Start the ranks, and tell the caller how they ended."""
    if connection.poll():  # the caller, which says nothing, was killed meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        return

    ranks = int(count)
    # It would say that it ends ranks: the caller hears that, and why.
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    # In memory: the reason may be that the disk is full.
    failures = [os.memfd_create(f"failure-of-rank-{rank}") for rank in range(ranks)]
    given = (int(job), Path(folder), ranks, device, float(timeout), connection, failures)
    tempfile.tempdir = folder  # torch leaves files there if this process is killed
    context: Any = start_processes(_rank, given, ranks, join=False, start_method="fork")

    def pass_on(number: int, _: object) -> None:
        for process_id in context.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)

    while True:
        alive = []
        failed: dict[int, int] = {}  # the exit codes of those that failed by themselves
        for rank, process in enumerate(context.processes):
            code = process.exitcode
            if code is None:
                alive.append(process.sentinel)
            elif code:
                failed[rank] = code
        if failed or not alive:
            break

        ready = multiprocessing.connection.wait([*alive, connection], _LOOK_SECONDS)
        if connection in ready:  # the caller is gone
            for process in context.processes:
                process.kill()
                process.join()
            shutil.rmtree(folder, ignore_errors=True)
            return

    is_over = False
    with contextlib.suppress(ProcessExitedException):
        while not is_over:
            is_over = context.join(_LOOK_SECONDS, grace_period=_GRACE)

    if failed:
        connection.send(("failed", _cause(Path(folder), failures, failed)))


def _rank(
    rank: int,
    job: int,
    folder: Path,
    count: int,
    device: str,
    timeout: float,
    connection: Any,
    failures: Sequence[int],
) -> None:
    """One rank from its start to its end."""
    die_with_parent()
    tempfile.tempdir = None
    if rank:  # its output is repeated where it fails
        with (folder / _LOG.format(rank)).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

    def say(value: Any) -> None:
        if not rank:
            connection.send(("said", value))

    place = Place(rank, count, rank, count, f"file://{folder}/store")
    try:
        with joined(place, device, timeout):
            with Path(f"/proc/self/fd/{job}").open("rb") as file:  # each rank from its beginning
                function, arguments = pickle.load(file)
            answer = function(say, *arguments)

        if not rank:
            connection.send(("answer", pickled(answer)))
    except BaseException as error:
        with os.fdopen(failures[rank], "wb") as reason:
            pickle.dump(_failure(rank, error), reason)
        with contextlib.suppress(OSError):  # of a log on a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)  # what is left may wait for ranks that are gone


def _failure(rank: int, error: BaseException) -> _Told:
    return _Told(
        **vars(failure_of(rank, error)),
        error=error if isinstance(error, AutofitError) else None,
        text=describe_error(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _cause(folder: Path, failures: Sequence[int], codes: dict[int, int]) -> AutofitError:
    """Why the ranks ended, some of them with exit codes; `failures` are files of the reasons."""
    count = len(failures)
    found: list[_Told] = []
    silent = dict(codes)  # of those that wrote no reason
    for rank, descriptor in enumerate(failures):
        reason = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if reason:
            found.append(pickle.loads(reason))
            silent.pop(rank, None)

    cause = first_cause(found, silent)
    if cause is None:
        return stuck(found, count)

    if isinstance(cause, int):
        code = silent[cause]
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        words = _last_words(folder, cause)
        remedy = ""
        if words:
            remedy = f"The last line of its output: {words.splitlines()[-1]}"
        return RankError(f"rank {cause} of {count} {how}.", remedy, words)

    if cause.error is not None:
        return cause.error
    return RankError(
        f"rank {cause.rank} of {count} raised {printable(cause.text)}.", "", cause.traceback
    )


def _last_words(folder: Path, rank: int) -> str:
    log = folder / _LOG.format(rank)
    if not log.exists():
        return ""
    return log.read_text(errors="replace").strip()[-_LAST_CHARACTERS:]
