"""The store: finished measurements of this user's searches in one SQLite file, which later searches start from.

Any number of processes may write at once; each waits its turn. What is stored can be measured again, so that the store
cannot be used is never a reason for a search to fail: it raises StoreError, and whoever asked goes on without.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autofit.core.config import Config
from autofit.core.errors import StoreError
from autofit.core.files import cache_file
from autofit.core.measurement import Measurement

SCHEMA = 1
MOST_OF_ONE, MOST, DAYS = 200, 10_000, 180  # kept, the newest: of one subject, in all (some 15 MB), and for how long
_WAIT_SECONDS = 10.0  # for others that write; a transaction takes milliseconds
_CLEARING = "autofit doctor --clear-store begins a new one."
_TABLES = """
CREATE TABLE subjects (
    id INTEGER PRIMARY KEY, device TEXT NOT NULL, versions TEXT NOT NULL, workload TEXT NOT NULL, model TEXT NOT NULL,
    UNIQUE (device, versions, workload)
);
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY, subject INTEGER NOT NULL REFERENCES subjects, run TEXT NOT NULL, session TEXT NOT NULL,
    plan TEXT NOT NULL, cap_bytes INTEGER NOT NULL, config TEXT NOT NULL, measurement TEXT NOT NULL,
    measured_at REAL NOT NULL
);
CREATE INDEX of_subject ON measurements (subject, id);
"""
_FIND = """
SELECT config, measurement, cap_bytes, run, session, plan FROM measurements JOIN subjects ON subjects.id = subject
WHERE (device, versions, workload) = (?, ?, ?) ORDER BY measurements.id
"""
_COUNT = "SELECT count(*), count(DISTINCT workload) FROM measurements JOIN subjects ON subjects.id = subject"


@dataclass(frozen=True)
class Subject:
    """What was measured, and on what: measurements of another device, version or workload are found by nobody else.

    `workload` is its fingerprint; `model`, its name, is for people and tells nothing apart.
    """

    device: str
    versions: str
    workload: str
    model: str


@dataclass(frozen=True)
class Stored:
    """A measurement, what it was made within, and by which search.

    cap_bytes: what tensors might take. run: the run directory. session: one process, in which the machine was the same.
    plan: "explored" or "verified", which is longer.
    """

    measurement: Measurement
    cap_bytes: int
    run: str
    session: str
    plan: str = "explored"


@dataclass(frozen=True)
class Count:
    """How much there is."""

    measurements: int
    models: int


class Store:
    """The measurements in a file; in the user's cache directory unless said otherwise.

    Every method raises StoreError where the file cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_file("store", "measurements.sqlite")

    def find(self, subject: Subject) -> list[Stored]:
        """All of a subject, the oldest first."""
        with self._open() as file:
            rows = file.execute(_FIND, (subject.device, subject.versions, subject.workload)).fetchall() if file else []
        return [stored for row in rows if (stored := _read(*row)) is not None]

    def add(self, subject: Subject, stored: Stored) -> None:
        """Keep a measurement, and drop what is too old."""
        now = time.time()
        with self._writing() as file:
            key = (subject.device, subject.versions, subject.workload)
            file.execute("INSERT OR IGNORE INTO subjects VALUES (NULL, ?, ?, ?, ?)", (*key, subject.model))
            (number,) = file.execute(
                "SELECT id FROM subjects WHERE (device, versions, workload) = (?, ?, ?)", key
            ).fetchone()
            file.execute(
                "INSERT INTO measurements VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", (number, *_written(stored), now)
            )
            file.execute(_older_than_newest(f"subject = {number}", MOST_OF_ONE))
            file.execute(_older_than_newest("true", MOST))
            file.execute("DELETE FROM measurements WHERE measured_at < ?", (now - DAYS * 86400,))
            file.execute("DELETE FROM subjects WHERE id NOT IN (SELECT subject FROM measurements)")

    def count(self) -> Count:
        """How much there is."""
        with self._open() as file:
            return Count(*file.execute(_COUNT).fetchone()) if file else Count(0, 0)

    def clear(self) -> Count | None:
        """Forget everything; how much that was, None where it could not be read."""
        try:
            before = self.count()
            if self.path.exists():
                self._empty()
            return before
        except StoreError:
            with self._told():
                self.path.unlink(missing_ok=True)
            return None

    def _empty(self) -> None:
        """Others may be writing, so the file stays."""
        with self._writing() as file:
            _make(file)
        with self._open() as file:
            if file:
                file.execute("VACUUM")

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """The file as it is; None where there is none, or one of an older autofit, which is read no more."""
        with self._told():
            if not self.path.exists():
                yield None
                return
            with contextlib.closing(self._connect()) as file:
                yield file if self._version(file) == SCHEMA else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """The file within a transaction, made where there is none."""
        with self._told():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(self._connect()) as file, file:
                file.execute("BEGIN IMMEDIATE")
                if self._version(file) != SCHEMA:
                    _make(file)
                yield file

    def _connect(self) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
        try:
            # It need not survive a power cut whole, and waiting for the disk twice a measurement is not worth that.
            file.execute("PRAGMA synchronous = NORMAL")
        except BaseException:  # a damaged file says so here
            file.close()
            raise
        return file

    def _version(self, file: sqlite3.Connection) -> int:
        version = int(file.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA:
            message = f"the store of measurements {self.path} was written by a newer autofit."
            raise StoreError(message, f"Use that one, or another cache directory; {_CLEARING}")
        return version

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong, in one sentence."""
        try:
            yield
        except sqlite3.OperationalError as error:  # locked for too long, no room, no permission
            message = f"the store of measurements {self.path} cannot be used: {error}."
            raise StoreError(message, "Check the directory, or search without it: --no-store.") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the store of measurements {self.path} is damaged: {error}.", _CLEARING) from error
        except OSError as error:
            message = f"the store of measurements {self.path} cannot be written: {error.strerror}."
            raise StoreError(message, "Check the directory, or search without it: --no-store.") from error


def _older_than_newest(of: str, most: int) -> str:
    oldest = f"SELECT id FROM measurements WHERE {of} ORDER BY id DESC LIMIT 1 OFFSET {most}"
    return f"DELETE FROM measurements WHERE {of} AND id <= ({oldest})"


def _make(file: sqlite3.Connection) -> None:
    """Empty tables, in the place of those that an older autofit left."""
    for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        file.execute(f'DROP TABLE "{name}"')
    for statement in filter(str.strip, _TABLES.split(";")):
        file.execute(statement)
    file.execute(f"PRAGMA user_version = {SCHEMA}")


def _written(stored: Stored) -> tuple[str, str, str, int, str, str]:
    trial = stored.measurement.to_trial()
    config = json.dumps(trial.pop("config"), sort_keys=True)
    return stored.run, stored.session, stored.plan, stored.cap_bytes, config, json.dumps(trial)


def _read(config: str, measurement: str, cap_bytes: int, *about: str) -> Stored | None:
    """None for what cannot be read: measurements have changed since, or bytes of the file."""
    try:
        trial = {**json.loads(measurement), "config": Config(json.loads(config))}
        return Stored(Measurement.from_trial(trial), cap_bytes, *about)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
