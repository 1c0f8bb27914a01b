"""The store: finished measurements of this user's searches in one SQLite file, which later searches
start from.

Any number of processes may write at once; each waits its turn. Stored measurements can be made
again, so trouble with the file never fails a search: it raises StoreError, and the caller goes on
without.
"""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.core.errors import StoreError, is_whole
from autofit.core.files import cache_file
from autofit.core.measurement import Measurement
from autofit.core.plain import UNREADABLE

SCHEMA = 2
# The newest measurements are kept.
MOST_OF_ONE = 200  # of a subject
MOST = 10_000  # of all: some 15 MB
DAYS = 180
_AT_ONCE = 1_000  # dropped with each addition: 200,000 at once take seconds, and others wait
_WAIT_SECONDS = 10.0  # for other writers; a transaction takes milliseconds
_CLEARING = "autofit doctor --clear-store begins a new one."
_CHECK = "Check the directory, or search without it: --no-store."
# Errors of the system or of other processes: locked for too long, no space, no permission.
_NOT_DAMAGED = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_READONLY",
    "SQLITE_CANTOPEN",
    "SQLITE_PERM",
)
_TABLE = """
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, workload TEXT NOT NULL, run TEXT NOT NULL,
    session TEXT NOT NULL, cap_bytes INTEGER NOT NULL, config TEXT NOT NULL,
    measurement TEXT NOT NULL, measured_at REAL NOT NULL
)
"""
_INDEX = "CREATE INDEX of_key ON measurements (key, id)"
_FIND = """
SELECT config, measurement, cap_bytes, run, session FROM measurements WHERE key = ? ORDER BY id
"""
_OLDEST = f"SELECT id, measured_at FROM measurements ORDER BY id LIMIT {_AT_ONCE}"
_ADD = "INSERT INTO measurements VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class Subject:
    """What was measured.

    Attributes:
        key: covers the workload, the device and versions.
        workload: the fingerprint of the workload alone.
    """

    key: str
    workload: str


@dataclass(frozen=True)
class Stored:
    """A measurement, and the search that made it.

    Attributes:
        cap_bytes: what tensors could take.
        run: the run directory.
        session: of one process, in which the machine was the same.
    """

    measurement: Measurement
    cap_bytes: int
    run: str
    session: str


@dataclass(frozen=True)
class Count:
    """How much a store holds."""

    measurements: int
    models: int


class Store:
    """The measurements in a file, by default in the user's cache directory.

    Every method raises StoreError where the file cannot be used; `find` and `add`, which searches
    call, set a damaged one aside.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_file("store", "measurements.sqlite")
        self._aside = self.path.with_name(f"{self.path.name}.damaged")

    def find(self, subject: Subject) -> list[Stored]:
        """All measurements of a subject that can be read, the oldest first."""
        rows = []
        with self._open() as file:
            if file:
                rows = file.execute(_FIND, (subject.key,)).fetchall()

        read = (_read(*row) for row in rows)
        return [stored for stored in read if stored is not None]

    def add(self, subject: Subject, stored: Stored) -> None:
        """Store a measurement, and drop what is too old."""
        now = time.time()
        trial = stored.measurement.to_trial()
        config = json.dumps(trial.pop("config"), sort_keys=True)
        row = (
            subject.key,
            subject.workload,
            stored.run,
            stored.session,
            stored.cap_bytes,
            config,
            json.dumps(trial),
            now,
        )
        with self._transaction() as file:
            file.execute(_ADD, row)

            for those, most in (("key = :key", MOST_OF_ONE), ("true", MOST)):
                matching = f"FROM measurements WHERE {those}"
                last_dropped = f"SELECT id {matching} ORDER BY id DESC LIMIT 1 OFFSET {most}"
                _drop(file, f"{matching} AND id <= ({last_dropped})", {"key": subject.key})
            _drop(file, f"FROM ({_OLDEST}) WHERE measured_at < :end", {"end": now - DAYS * 86400})

    def count(self) -> Count:
        """How much the store holds."""
        count = "SELECT count(*), count(DISTINCT workload) FROM measurements"
        with self._open(mend=False) as file:
            if file is None:
                return Count(0, 0)
            return Count(*file.execute(count).fetchone())

    def clear(self) -> Count | None:
        """Remove everything, also what was set aside.

        Returns:
            How much that was; None where it could not be read.
        """
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)

        try:
            before = self.count()
            if self.path.exists():  # it is kept: others may be writing
                with self._transaction() as file:
                    _create_tables(file)
                with self._open() as opened:
                    if opened:
                        opened.execute("VACUUM")
            return before
        except StoreError:
            with self._errors():
                self.path.unlink(missing_ok=True)
                self._remove_journals()
            return None

    def outdated(self) -> bool:
        """Whether the file is of an older autofit: it is not read, and the first addition begins it
        anew."""
        try:
            with self._open(mend=False) as file:
                return file is None and self.path.exists() and self.path.stat().st_size > 0
        except StoreError:
            return False

    @contextlib.contextmanager
    def _open(self, *, mend: bool = True) -> Iterator[sqlite3.Connection | None]:
        """The file as it is; None where there is none, or one of an older autofit."""
        with self._errors(mend):
            if not self.path.exists():
                yield None
                return

            with self._connected() as file:
                yield file if self._schema(file) == SCHEMA else None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The file, created where there is none, for writing."""
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)

            with self._connected() as file, file:
                file.execute("BEGIN IMMEDIATE")
                if self._schema(file) != SCHEMA:
                    _create_tables(file)
                yield file

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
        with contextlib.closing(connection) as file:
            # It need not survive a power cut whole, and waiting for the disk twice a measurement is
            # not worth that.
            file.execute("PRAGMA synchronous = NORMAL")  # a damaged file says so here
            yield file

    def _schema(self, file: sqlite3.Connection) -> int:
        schema = int(file.execute("PRAGMA user_version").fetchone()[0])
        if schema > SCHEMA:
            message = f"the store of measurements {self.path} was written by a newer autofit."
            raise StoreError(message, f"Use that one, or another cache directory; {_CLEARING}")

        return schema

    @contextlib.contextmanager
    def _errors(self, mend: bool = True) -> Iterator[None]:
        """Turn whatever goes wrong into a StoreError of one sentence.

        Args:
            mend: whether to set a damaged file aside.
        """
        store = f"the store of measurements {self.path}"
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{store} cannot be written: {error.strerror}.", _CHECK) from error
        # Of SQLite, or of reading what it gives: flipped bits may look like anything.
        except Exception as error:
            if getattr(error, "sqlite_errorname", "").startswith(_NOT_DAMAGED):
                raise StoreError(f"{store} cannot be used: {error}.", _CHECK) from error

            remedy = f"The next search sets it aside; {_CLEARING}"
            if mend:
                remedy = self._set_aside()
            raise StoreError(f"{store} is damaged ({error}).", remedy) from error

    def _set_aside(self) -> str:
        """Move the file away, so that the next search begins a new one.

        Returns:
            A sentence on what became of it.
        """
        try:
            self.path.replace(self._aside)
            self._remove_journals()
        except OSError as error:
            return f"It cannot be moved aside ({error.strerror}); {_CLEARING}"

        return f"It is set aside as {self._aside.name}; the next search begins a new one."

    def _remove_journals(self) -> None:
        """Remove the journals, which SQLite would play into a new file."""
        for end in ("-journal", "-wal", "-shm"):
            self.path.with_name(f"{self.path.name}{end}").unlink(missing_ok=True)


def _drop(file: sqlite3.Connection, rows: str, values: Mapping[str, str | float]) -> None:
    """Delete the oldest of some rows: more of them go with the next addition."""
    oldest = f"SELECT id {rows} ORDER BY id LIMIT {_AT_ONCE}"
    file.execute(f"DELETE FROM measurements WHERE id IN ({oldest})", values)


def _create_tables(file: sqlite3.Connection) -> None:
    """Begin with an empty table; those of an older autofit go."""
    names = file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (name,) in names:
        file.execute(f'DROP TABLE "{name}"')

    file.execute(_TABLE)
    file.execute(_INDEX)
    file.execute(f"PRAGMA user_version = {SCHEMA}")


def _read(config: str, measurement: str, cap_bytes: int, run: str, session: str) -> Stored | None:
    """None for a row that cannot be read: measurements have changed since, or bytes of the file."""
    try:
        trial = {**json.loads(measurement), "config": json.loads(config)}
        read = Measurement.from_trial(trial)
    except UNREADABLE:
        return None

    if not (is_whole(cap_bytes, 0) and isinstance(run, str) and isinstance(session, str)):
        return None
    return Stored(read, cap_bytes, run, session)
