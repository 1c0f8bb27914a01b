"""Which processes live, asked of the system: for tests that nothing is left behind."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

DEADLINE = 60.0  # seconds: far beyond what anything here takes, also on a busy machine


def wait_until(true: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Poll until it is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


def number_in(path: Path) -> int:
    """The process id that somebody writes to a file, once it is there."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} is written")
    return int(path.read_text())


def alive(process: int) -> bool:
    """Whether a process still runs; one that is dead but not yet waited for does not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: Iterable[int]) -> None:
    """Wait for processes to end by themselves."""
    wanted = list(processes)
    wait_until(lambda: not any(map(alive, wanted)), f"{wanted} are gone")


def descendants(process: int) -> list[int]:
    """All children of a process and theirs, now."""
    return [each.pid for each in psutil.Process(process).children(recursive=True)]


def as_ordinary_user(test: Callable[[Path], None]) -> None:
    """Run a test in a forked process that has the rights of an ordinary user and a folder of its own, whoever runs the
    tests: root may read and write everything, and the folders of pytest are root's alone."""
    folder = Path(tempfile.mkdtemp())
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.chown(folder, 65534, 65534)
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            test(folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    ended = os.waitpid(child, 0)[1]
    shutil.rmtree(folder, ignore_errors=True)
    assert ended == 0, "see stderr"


@contextlib.contextmanager
def signals_by_default() -> Iterator[None]:
    """Whatever runs the tests may have handlers of its own, and so may what they run, as Ray does."""
    defaults = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    before: dict[int, Any] = {
        number: signal.signal(number, handler) for number, handler in defaults.items()
    }
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
