"""The Optuna study of a search, kept in a journal file so that nothing measured is ever lost.

A process may die at any moment, kill -9 and power cuts included, and disks change bytes: each
record has its number and a checksum. Opening the journal again repairs what that leaves: a torn
last line, damaged records, trials that nobody runs. The run directory's lock keeps other writers
out.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages.journal import BaseJournalBackend, JournalStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, is_whole, pluralize, shown
from autofit.core.events import Notify
from autofit.core.files import naming, write_atomically
from autofit.core.measurement import Measurement, Outcome
from autofit.core.plain import UNREADABLE, field_types
from autofit.core.some_blocks import SomeBlocks
from autofit.search.encoding import KnobValues
from autofit.search.finals import restore
from autofit.search.sampler import MEASUREMENT, measurements_of

SPACE = "space"  # in the identity: the values of each knob that is searched
_IDENTITY = "identity"
_BUDGET = "budget"
# Optuna's words: complete has a value, pruned was stopped by a limit, fail says nothing about the
# objective.
_PRUNED = (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.TIMED_OUT)

_START = b'{"op_code":'
# Where records start, also one that has become part of another's line.
_STARTS = re.compile(rb'\n|(?=\{"op_code":)')
_CHECKED = re.compile(rb'(\{"op_code":.*),"crc":"([0-9a-f]{8})"\}', re.DOTALL)
_CHECKSUM = re.compile(rb',"crc":"[0-9a-f]{8}"\}')
# Of an own record; tools such as optuna-dashboard add some with the first alone.
_OWN = {"op_code", "line", "crc"}
_OTHER = "Choose another --out."


@dataclass(frozen=True)
class Journal:
    """Where a search is kept, and what it is a search of: plain data such as model, workload,
    device and budget.

    A journal is only ever continued by a search of the same identity: its measurements mean nothing
    to another. What ran out of memory did so within `budget_bytes`, which `begun_with` tells those
    who go on with it.

    Attributes:
        path: of the file.
        identity: of the search.
        budget_bytes: what tensors may take.
        notify: gets a sentence about damage.
        lines: what the file holds, as far as it could be written.
        restored: makes a deleted file again, of `lines`; gives whether it was deleted.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    notify: Notify = lambda text: None
    lines: list[bytes] = field(default_factory=list)
    restored: Callable[[], bool] = lambda: False


class _Backend(BaseJournalBackend):
    """Optuna's records in memory and in the file, each with its number and a checksum.

    It waits for the disk only where something would be lost: with measurements, which take all
    lines before along. Optuna's own waits with each line, of which a trial has one for each knob:
    70 ms for 18 of them were measured.

    Args:
        others: how many lines have no number.
    """

    def __init__(self, journal: Journal, others: int) -> None:
        self._journal = journal
        self._others = others
        self.written: int | None = None  # lines; None: not to be written yet

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The records from this number on."""
        return map(json.loads, self._journal.lines[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write records, and what an earlier call could not; a measurement with what makes it of
        use by itself."""
        lines = self._journal.lines
        for log in logs:
            if MEASUREMENT in (log.get("user_attr") or log.get("user_attrs") or ()):
                log = {
                    **log,
                    _IDENTITY: _plain(self._journal.identity),
                    _BUDGET: self._journal.budget_bytes,
                }
            record = {"op_code": log["op_code"], **log, "line": len(lines) - self._others}
            text = json.dumps(record, separators=(",", ":"))[:-1].encode()
            lines.append(b'%s,"crc":"%08x"}\n' % (text, zlib.crc32(text)))

        if self.written is None:
            return
        if not self._journal.restored():
            with naming(self._journal.path):
                self._write(lines[self.written :], wait=any("user_attr" in log for log in logs))

        self.written = len(lines)

    def _write(self, lines: list[bytes], *, wait: bool) -> None:
        """Append lines to the file, all or none; `wait` for the disk."""
        data = b"".join(lines)
        with self._journal.path.open("r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if wait:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise


class _Found:
    """What a journal file holds, but for a torn last line; there may be no file.

    Attributes:
        size: bytes, without a torn last line.
        lines: those of records that can be read, with or without a checksum.
        checked: the records with a checksum.
        lost: how many records cannot be read.
        is_whole: whether nothing is damaged.
        is_of_another_version: whether a measurement has figures that this version does not know.
        identity: of the search that began the journal; empty where it does not say.
        budget_bytes: likewise; None where it does not say.
    """

    def __init__(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        start = data.find(_START, end)
        if start < 0 or not _CHECKSUM.search(data, start):  # torn before the checksum, its end
            data = data[:end]

        self.size = len(data)
        self.lines: list[bytes] = []
        self.checked: list[dict[str, Any]] = []
        self.is_of_another_version = False
        self._facts: dict[str, Any] = {}
        pieces = list(filter(bytes.strip, _STARTS.split(data)))
        for piece in pieces:
            with contextlib.suppress(ValueError, RecursionError):
                self._read(piece)

        # Records are numbered from 0, so that a gap, or a line that is none, shows.
        numbers = [record["line"] for record in self.checked]
        count = max(len(pieces), 1 + max(numbers, default=-1))
        self.lost = count - len(numbers)
        complete = numbers == list(range(len(numbers)))
        self.is_whole = complete and b"".join(self.lines) == data

        identity = self._facts.get(_IDENTITY)
        self.identity = identity if isinstance(identity, dict) else {}
        budget = self._facts.get(_BUDGET)
        self.budget_bytes = budget if isinstance(budget, int) else None

    def _read(self, piece: bytes) -> None:
        """Keep what a piece of the file says; raises ValueError where it is no record."""
        match = _CHECKED.match(piece)
        if match and int(match[2], 16) == zlib.crc32(match[1]):
            piece = match[0]
            record = json.loads(piece)
            if not _is_readable(record):
                self.is_of_another_version |= _has_new_fields(record)
                return
            self.checked.append(record)
        else:
            record = json.loads(piece)
            if not isinstance(record, dict) or record.keys() & _OWN != {"op_code"}:
                return

        self.lines.append(piece + b"\n")
        attributes = record.get("user_attr")
        for facts in (attributes, record):
            if isinstance(facts, dict):
                for name in (_IDENTITY, _BUDGET):
                    if name in facts:
                        self._facts.setdefault(name, facts[name])


def _is_readable(record: Any) -> bool:
    """Whether a record with a right checksum makes sense.

    It has a number and, where it holds a measurement, one that a probe can have made.
    """
    if not isinstance(record, dict) or not is_whole(record.get("line"), 0):
        return False

    held = _held(record)
    return held is None or _measurement(held) is not None


def _has_new_fields(record: Any) -> bool:
    """Whether a record's measurement has figures that this version does not know.

    Then it is not damaged, but of another version.
    """
    held = _held(record) if isinstance(record, dict) else None
    return isinstance(held, dict) and not held.keys() <= field_types(Measurement).keys()


def _held(record: Mapping[str, Any]) -> Any:
    """The measurement that a record holds, as plain data."""
    for name in ("user_attrs", "user_attr"):
        attributes = record.get(name)
        if isinstance(attributes, dict) and MEASUREMENT in attributes:
            return attributes[MEASUREMENT]

    return None


def _measurement(held: Any) -> Measurement | None:
    """A measurement that was written; None for what is none."""
    try:
        measurement = Measurement.from_trial(held)
    except UNREADABLE:
        return None

    return measurement if measurement.throughput or not measurement.fits else None


def open_study(journal: Journal | None, sampler: BaseSampler) -> Study:
    """The study of a journal, new, resumed or, without a journal, in memory.

    A damaged journal is set aside, and the study has what is left of it.

    Raises InputError for a journal of something else, and for a damaged one without checksums.
    """
    if journal is None:
        return optuna.create_study(direction="maximize", sampler=sampler)

    journal.restored()
    path = journal.path
    found = _Found(path)

    _check_identity(found.identity, journal)
    if found.is_of_another_version:
        message = f"{path} is not a journal that this version of autofit can read"
        raise InputError(f"{message}: its figures differ.", _OTHER)

    if not found.is_whole and not found.checked:
        raise InputError(
            f"{path} is damaged, or no journal: no checksum shows any record to be right.",
            _OTHER,
        )

    try:
        backend, study = _opened(journal, found, sampler)
    except Exception as error:  # of any kind: records of another version say anything
        if not found.checked:
            raise InputError(
                f"{path} is not a journal that this version of autofit can read ({error!r}).",
                _OTHER,
            ) from error
        found.is_whole = False  # what is right of it are the measurements
        backend, study = _opened(journal, found, sampler)

    measured = len(measurements_of(study))
    if found.is_whole:
        with naming(path), path.open("ab") as file:
            file.truncate(found.size)
        backend.written = len(found.lines)

    if _IDENTITY not in study.user_attrs:
        study.set_user_attr(_BUDGET, journal.budget_bytes)
        study.set_user_attr(_IDENTITY, _plain(journal.identity))

    if not found.is_whole:
        aside = _set_aside(path)
        write_atomically(path, b"".join(journal.lines))
        backend.written = len(journal.lines)
        lost = pluralize(found.lost, "record")
        left = pluralize(measured, "measurement")
        losses = f"{lost} of it cannot be read, {left} can"
        journal.notify(f"{path} was damaged: {losses}; the damaged file is now {aside}.")

    _end_running(study)
    return study


def _set_aside(path: Path) -> Path:
    """Copy a damaged journal to a new file beside it."""
    for number in itertools.count(1):
        end = "" if number == 1 else f"-{number}"
        aside = path.with_name(f"{path.name}.damaged{end}")
        if not os.path.lexists(aside):
            break

    write_atomically(aside, path.read_bytes())
    return aside


def _end_running(study: Study) -> None:
    """Finish trials that nobody runs any more, with the measurement where there is one."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        held = trial.user_attrs.get(MEASUREMENT)
        measurement = Measurement.from_trial(held) if held else None
        state, value = _ending(measurement)
        study.tell(trial.number, value, state=state)


def _opened(
    journal: Journal,
    found: _Found,
    sampler: BaseSampler,
) -> tuple[_Backend, Study]:
    """The study of what a file holds: of all records where they are whole, else of the
    measurements."""
    journal.lines[:] = found.lines if found.is_whole else []
    backend = _Backend(journal, others=max(0, len(journal.lines) - len(found.checked)))
    study = optuna.create_study(
        storage=JournalStorage(backend),
        study_name="autofit",
        direction="maximize",
        sampler=sampler,
        load_if_exists=True,
    )

    if not found.is_whole:
        _add_measurements(study, found.checked)
        restore(study, found.checked)

    measurements_of(study)  # reads all of them
    return backend, study


def _add_measurements(study: Study, records: Iterable[dict[str, Any]]) -> None:
    """Add a finished trial for each measurement that records hold."""
    by_number = {}  # a record may be there twice
    for record in records:
        measurement = _measurement(_held(record))
        if measurement:
            by_number[measurement.number] = measurement

    for measurement in by_number.values():
        state, value = _ending(measurement)
        attributes = {MEASUREMENT: measurement.to_trial()}
        trial = optuna.trial.create_trial(state=state, value=value, user_attrs=attributes)
        trial.distributions = study.sampler.infer_relative_search_space(study, trial)
        trial.params = {knob: measurement.config.get(knob) for knob in trial.distributions}
        with contextlib.suppress(ValueError):  # of no config of this search
            study.add_trial(trial)


def identity_of_space(knobs: KnobValues, between: KnobValues) -> dict[str, list[Any]]:
    """The values of each knob, as a journal's identity has them.

    Numbers of blocks between two values are a word for all of them: errors show it to users.
    """
    found: dict[str, list[Any]] = {}
    for knob, values in knobs.items():
        numbers: dict[str, list[Value]] = {}
        for value in between.get(knob, ()):
            some = SomeBlocks.of(value)
            if some is not None:
                numbers.setdefault(some.rest, []).append(value)
        words = [f"{group[0]} to {group[-1]}" for group in numbers.values()]
        found[knob] = [*values, *words]
    return found


def check_resumable(journal: Journal, space: Mapping[str, Sequence[Any]]) -> None:
    """Raise InputError where the file holds a search of something else, as far as can be told
    before anything is predicted.

    Args:
        space: the values of each knob, of which a search may have kept a part.
    """
    held = _Found(journal.path).identity
    searched = held.get(SPACE)
    if not isinstance(searched, dict):
        searched = {}

    knobs: dict[str, Any] = {}
    for knob, values in space.items():
        before = searched.get(knob)
        is_part = isinstance(before, list) and all(value in values for value in before)
        knobs[knob] = before if is_part else list(values)

    identity = {**journal.identity, SPACE: knobs}
    _check_identity(held, replace(journal, identity=identity))


def measured_configs(path: Path) -> list[Config]:
    """The configs that a journal holds measurements of, each once; none where there is no file."""
    held = map(_held, _Found(path).checked)
    measurements = filter(None, map(_measurement, held))
    return list(dict.fromkeys(measurement.config for measurement in measurements))


def begun_with(path: Path) -> tuple[Mapping[str, Any], int | None]:
    """The identity and the budget in bytes that a journal was begun with.

    Nothing, and None, where it does not say.
    """
    found = _Found(path)
    return found.identity, found.budget_bytes


def record(study: Study, trial: Trial, measurement: Measurement) -> None:
    """Finish a trial with its measurement."""
    # The measurement first: killed before the second line, the trial is finished from it on resume.
    trial.set_user_attr(MEASUREMENT, measurement.to_trial())
    state, value = _ending(measurement)
    study.tell(trial.number, value, state=state)


def _ending(measurement: Measurement | None) -> tuple[TrialState, float | None]:
    """How a trial with this measurement ends, and its value."""
    if measurement and measurement.fits:
        return TrialState.COMPLETE, measurement.throughput
    if measurement and measurement.outcome in _PRUNED:
        return TrialState.PRUNED, None
    return TrialState.FAIL, None


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data as JSON holds it."""
    return dict(json.loads(json.dumps(dict(data), default=str)))


def _check_identity(held: Mapping[str, Any], journal: Journal) -> None:
    """Raise InputError where a journal holds a search of something else."""
    if not held:
        return

    before = dict(_leaves(held))
    now = dict(_leaves(_plain(journal.identity)))
    changes = []
    for name in before | now:
        was = before.get(name)
        given = now.get(name)
        if was != given:
            changes.append(f"{name} was {shown(was)}, is {shown(given)}")

    if changes:
        message = f"{journal.path} holds a search of something else: {'; '.join(changes)}."
        raise InputError(
            message,
            "Resume it with what it was started with, or choose another --out.",
        )


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by dots, with their values."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
