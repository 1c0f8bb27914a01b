"""The run directory, which holds every file of a search, so that no measurement is lost."""

import contextlib
import os
import shutil
from pathlib import Path

from autofit.core.errors import InputError
from autofit.core.files import check_writable, expanded, locked


class RunDirectory:
    """Paths inside a run directory, and the lock on it, which the system drops however a process dies. A context
    manager; raises InputError where another process uses it, or it holds something else than `resume` says."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = expanded(path, "out").absolute()
        self.result = self.path / "result.yaml"
        self.script = self.path / "train.py"
        self.exports = self.path / "exports"
        self.record = self.path / "result.json"
        self.report = self.path / "report.html"
        self.journal = self.path / "journal.log"
        self.probes = self.path / "probes"
        self._lock_path = self.path / ".lock"
        self._lock = contextlib.ExitStack()
        self._resume = resume

    def check(self) -> None:
        """Raise the InputErrors of entering that need no lock."""
        if self._resume and not self.path.exists():
            raise InputError(f"there is no search to resume in {self.path}.", "Leave out --resume, or check --out.")
        check_writable(self.path, folder=True, remedy="Choose another --out.")
        if self.path.is_dir() and self._holds_something() and not (self._resume and self.journal.exists()):
            if self.journal.exists():
                remedy = "Add --resume to continue it, or choose another --out."
                raise InputError(f"{self.path} already holds a search.", remedy)
            raise InputError(f"{self.path} already holds other files.", "Choose another --out.")

    def __enter__(self) -> "RunDirectory":
        try:
            self.check()
            self.probes.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locked(self._lock_path))
        except BlockingIOError as error:
            message = f"{self.path} is in use by another autofit process."
            raise InputError(message, "Wait for it to end, or choose another --out.") from error
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}.", "Choose another --out.") from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.close()
        if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
            return
        if Path(error.filename).is_relative_to(self.path):
            remedy = "Choose another --out."
            if self.journal.exists():
                remedy = f"All measurements are safe: make room and continue with --resume --out {self.path}."
            raise InputError(f"{error.filename} cannot be written: {error.strerror}.", remedy) from error

    def discard_if_unused(self, *, keep_folder: bool) -> None:
        """Remove the files of a run without measurements, so that the same --out can be used again."""
        if self.journal.exists() and self.journal.stat().st_size:
            return
        shutil.rmtree(self.probes, ignore_errors=True)
        self.journal.unlink(missing_ok=True)
        if not keep_folder:
            self._lock_path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody put something else there
                self.path.rmdir()

    def _holds_something(self) -> bool:
        """Whether there is more than the files of a run killed before its first measurement."""
        names = {entry.name for entry in self.path.iterdir()}
        return bool(names - {".lock"}) and names != {".lock", "probes"}
