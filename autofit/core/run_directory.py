"""The run directory, which holds every file of a search, so that no measurement is lost."""

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from autofit.core.errors import InputError
from autofit.core.events import Notify
from autofit.core.files import check_writable, expanded, locked, write_atomically
from autofit.core.quoting import shell_path

JOURNAL = "journal.log"
_OTHER = "Choose another --out."
_PAUSE = 0.2  # seconds in which whoever deletes a directory has deleted all of it


class TakenError(InputError):
    """A run directory that another search has, or that holds something."""


@contextlib.contextmanager
def free_run_directory(path: Path) -> Iterator["RunDirectory"]:
    """Enter the run directory at a path, or at the first free one of path-2, path-3, ..."""
    numbered = path
    with contextlib.ExitStack() as stack:
        for number in itertools.count(1):
            if number > 1:
                numbered = path.with_name(f"{path.name}-{number}")
            with contextlib.suppress(TakenError):
                directory = stack.enter_context(RunDirectory(numbered))
                break

        yield directory


class RunDirectory:
    """Paths inside a run directory, and the lock on it.

    The system drops the lock however a process dies. A context manager; raises InputError where
    another process uses it, or it holds something else than `resume` says. An error before the
    first measurement leaves nothing that was not there before.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.notify: Notify = lambda text: None  # is told when the directory had to be made again
        self.path = expanded(path, "out").absolute()
        self.result = self.path / "result.yaml"
        self.script = self.path / "train.py"
        self.exports = self.path / "exports"
        self.record = self.path / "result.json"
        self.report = self.path / "report.html"
        self.journal = self.path / JOURNAL
        self.probes = self.path / "probes"
        self.lines: list[bytes] = []  # of the journal, to make it again
        self._lock_path = self.path / ".lock"
        self._lock = contextlib.ExitStack()
        self._held: IO[str] | None = None  # the file of the lock
        self._made: list[Path] = []  # what was not there before
        self._elsewhere: Path | None = None  # where the journal is when it cannot be here
        self._resume = resume

    def check(self) -> None:
        """Raise the InputErrors of entering that need no lock."""
        if self._resume and not self.path.exists():
            message = f"there is no search to resume in {self.path}."
            raise InputError(message, "Leave out --resume, or check --out.")
        check_writable(self.path, folder=True, remedy=_OTHER)

        if self.journal.exists():
            if not self.journal.is_file():
                raise InputError(f"{self.journal} is no regular file.", _OTHER)
            if not self._resume:
                remedy = "Add --resume to continue it, or choose another --out."
                raise TakenError(f"{self.path} already holds a search.", remedy)
        elif self.path.is_dir() and self._holds_something():
            raise TakenError(f"{self.path} already holds other files.", _OTHER)

    def __enter__(self) -> "RunDirectory":
        try:
            self.check()
            own = (self.journal, self.probes, self._lock_path, self.path, *self.path.parents)
            self._made = [path for path in own if not path.exists()]
            self._hold()
        except OSError as error:
            self._discard()
            raise InputError(f"{self.path} cannot be written: {error.strerror}.", _OTHER) from error

        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_here = False  # whether the error is of a file in this directory
        if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
            is_here = Path(error.filename).is_relative_to(self.path)

        if not any(b'"measurement":' in line for line in self.lines):
            if error is not None and self._is_held():
                self._discard()
        elif is_here or (error is None and self._elsewhere is None):
            self.restored()
        self._lock.close()

        if isinstance(error, OSError) and is_here:
            remedy = _OTHER
            if self.journal.exists():
                resumed = f"--resume --out {shell_path(str(self.path))}"
                remedy = f"All measurements are safe: make room and continue with {resumed}."
            message = f"{error.filename} cannot be written: {error.strerror}."
            raise InputError(message, remedy) from error

    def restored(self) -> bool:
        """Make the directory and its journal again if they were deleted since; whether they were.

        Raises InputError, which says where the journal is instead, where that is impossible.
        """
        if self._is_held() and self.probes.is_dir() and (self.journal.exists() or not self.lines):
            return False

        deleted = f"{self.path} was deleted during the search"
        journal = b"".join(self.lines)
        time.sleep(_PAUSE)
        try:
            self._lock.close()
            self._hold()
            if self.journal.exists():
                beginning = self.journal.read_bytes()[:200]
                if not journal.startswith(beginning):
                    raise FileExistsError(errno.EEXIST, "another search was there meanwhile")
            if journal:
                write_atomically(self.journal, journal)
        except (InputError, OSError) as error:
            self._lock.close()
            self._elsewhere = self._elsewhere or Path(tempfile.mkdtemp(prefix="autofit-"))
            (self._elsewhere / self.journal.name).write_bytes(journal)

            reason = error.strerror if isinstance(error, OSError) else error
            resumed = f"--resume --out {shell_path(str(self._elsewhere))}"
            raise InputError(
                f"{deleted} and cannot be made again: {reason}.",
                f"All measurements are safe: continue with {resumed}.",
            ) from error

        self.notify(f"{deleted}: it is made again, with its journal.")
        return True

    def _hold(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._held = self._lock.enter_context(locked(self._lock_path))
        except BlockingIOError as error:
            message = f"{self.path} is in use by another autofit process."
            raise TakenError(message, "Wait for it to end, or choose another --out.") from error

        # After the lock: a directory with these two alone is that of a run that was killed here.
        self.probes.mkdir(exist_ok=True)

    def _is_held(self) -> bool:
        """Whether the lock is held on what is now at this path."""
        with contextlib.suppress(OSError):
            if self._held and not self._held.closed:
                return os.path.samestat(os.fstat(self._held.fileno()), self._lock_path.stat())
        return False

    def _discard(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):  # somebody put something else there
                if path == self.probes:
                    shutil.rmtree(path)
                elif path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()

    def _holds_something(self) -> bool:
        """Whether there is more than the files of a run killed before its first measurement."""
        names = {entry.name for entry in self.path.iterdir()}
        return names not in (set(), {".lock"}, {".lock", "probes"})
