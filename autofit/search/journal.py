"""The Optuna study of a search, kept in a journal file so that nothing measured is ever lost.

A process may die at any moment, kill -9 and power cuts included, and disks change bytes: each record has its number and
a checksum. Opening the journal again repairs what that leaves: a torn last line, damaged records, trials that nobody
runs. The run directory's lock keeps other writers out.
"""

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages.journal import BaseJournalBackend, JournalStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from autofit.core.errors import InputError, counted, is_whole, shown
from autofit.core.events import Notify
from autofit.core.files import naming, write_atomically
from autofit.core.measurement import Measurement, Outcome
from autofit.core.plain import field_types
from autofit.search.finals import restore
from autofit.search.sampler import MEASUREMENT, measurements_of

_IDENTITY, _BUDGET = "identity", "budget"
# Optuna's words: complete has a value, pruned was stopped by a limit, fail says nothing about the objective.
_PRUNED = (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.TIMED_OUT)
_START = b'{"op_code":'
_STARTS = re.compile(rb'\n|(?=\{"op_code":)')  # where records start, also one that has become part of another's line
_CHECKED = re.compile(rb'(\{"op_code":.*),"crc":"([0-9a-f]{8})"\}', re.DOTALL)
_CHECKSUM = re.compile(rb',"crc":"[0-9a-f]{8}"\}')
_OWN = {"op_code", "line", "crc"}  # of an own record; tools such as optuna-dashboard add some with the first alone
_OTHER = "Choose another --out."


@dataclass(frozen=True)
class Journal:
    """Where a search is kept, and what it is a search of: plain data such as model, workload, device and budget.

    A journal is only ever continued by a search of the same identity: its measurements mean nothing to another. What
    ran out of memory did so within `budget_bytes`, which `begun_with` tells those who go on with it.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    notify: Notify = lambda text: None
    lines: list[bytes] = field(default_factory=list)  # what the file holds, as far as it could be written
    restored: Callable[[], bool] = lambda: False  # makes a deleted file again, of `lines`; whether it was deleted


class _Backend(BaseJournalBackend):
    """Optuna's records in memory and in the file, each with its number and a checksum.

    It waits for the disk only where something would be lost: with measurements, which take all lines before along.
    Optuna's own waits with each line, of which a trial has one for each knob: 70 ms for 18 of them were measured.
    """

    def __init__(self, journal: Journal, others: int) -> None:
        self._journal, self._others = journal, others  # the lines without a number
        self.written: int | None = None  # lines; None: not to be written yet

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The records from this number on."""
        return map(json.loads, self._journal.lines[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write records, and what an earlier call could not; a measurement with what makes it of use by itself."""
        lines = self._journal.lines
        for log in logs:
            if MEASUREMENT in (log.get("user_attr") or log.get("user_attrs") or ()):
                log = {**log, _IDENTITY: _plain(self._journal.identity), _BUDGET: self._journal.budget_bytes}
            record = {"op_code": log["op_code"], **log, "line": len(lines) - self._others}
            text = json.dumps(record, separators=(",", ":"))[:-1].encode()
            lines.append(b'%s,"crc":"%08x"}\n' % (text, zlib.crc32(text)))
        if self.written is None:
            return
        if not self._journal.restored():
            with naming(self._journal.path), self._journal.path.open("r+b", buffering=0) as file:
                size, data = file.seek(0, os.SEEK_END), b"".join(lines[self.written :])
                try:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if any("user_attr" in log for log in logs):
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        self.written = len(lines)


class _Found:
    """What a journal file holds, but for a torn last line; there may be no file."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        start = data.find(_START, end)
        if start < 0 or not _CHECKSUM.search(data, start):  # torn before its checksum, which comes last
            data = data[:end]
        self.size, self.lines, self.checked = len(data), list[bytes](), list[dict[str, Any]]()
        self.is_of_another_version = False
        told: dict[str, Any] = {}
        pieces = [piece for piece in _STARTS.split(data) if piece.strip()]
        for piece in pieces:
            match = _CHECKED.match(piece)
            is_checked = match is not None and int(match[2], 16) == zlib.crc32(match[1])
            text = match[0] if match and is_checked else piece
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(text)
                if is_checked and not _is_readable(record):
                    self.is_of_another_version |= _has_new_fields(record)
                    continue
                if is_checked or (isinstance(record, dict) and record.keys() & _OWN == {"op_code"}):
                    self.lines.append(text + b"\n")
                    self.checked += [record] if is_checked else []
                    attributes = record.get("user_attr")
                    facts = {**record, **(attributes if isinstance(attributes, dict) else {})}
                    for name in {_IDENTITY, _BUDGET} & facts.keys():
                        told.setdefault(name, facts[name])
        numbers = [record["line"] for record in self.checked]
        self.lost = max(len(pieces), 1 + max(numbers, default=-1)) - len(numbers)
        self.is_whole = b"".join(self.lines) == data and numbers == list(range(len(numbers)))
        self.identity = identity if isinstance(identity := told.get(_IDENTITY), dict) else {}
        self.budget_bytes = budget if isinstance(budget := told.get(_BUDGET), int) else None


def _is_readable(record: Any) -> bool:
    """Whether a record has a number and, where it holds a measurement, one that a probe can have made."""
    if not isinstance(record, dict) or not is_whole(record.get("line"), 0):
        return False
    held = _held(record)
    return held is None or _measurement(held) is not None


def _has_new_fields(record: Any) -> bool:
    """Whether a record's measurement has figures that this version does not know: what it says is not damaged."""
    held = _held(record) if isinstance(record, dict) else None
    return isinstance(held, dict) and not held.keys() <= field_types(Measurement).keys()


def _held(record: Mapping[str, Any]) -> Any:
    """The measurement that a record holds, as plain data."""
    attributes: dict[str, Any] = {}
    for name in ("user_attr", "user_attrs"):
        if isinstance(given := record.get(name), dict):
            attributes |= given
    return attributes.get(MEASUREMENT)


def _measurement(held: Any) -> Measurement | None:
    """A measurement that was written; None for what is none."""
    try:
        measurement = Measurement.from_trial(held)
    except (AttributeError, InputError, TypeError, ValueError):
        return None
    return measurement if measurement.throughput or not measurement.fits else None


def open_study(journal: Journal | None, sampler: BaseSampler) -> Study:
    """The study of a journal, new, resumed or in memory; of a damaged one, which is set aside, what is left of it.

    Raises InputError for a journal of something else, and for a damaged one without checksums.
    """
    if journal is None:
        return optuna.create_study(direction="maximize", sampler=sampler)
    journal.restored()
    path, found = journal.path, _Found(journal.path)
    _check_identity(found.identity, journal)
    if found.is_of_another_version:
        raise InputError(f"{path} is not a journal that this version of autofit can read: its figures differ.", _OTHER)
    if not found.is_whole and not found.checked:
        raise InputError(f"{path} is damaged, or no journal: no checksum shows any record to be right.", _OTHER)
    try:
        backend, study = _opened(journal, found, sampler)
    except Exception as error:  # of any kind: records of another version say anything
        if not found.checked:
            message = f"{path} is not a journal that this version of autofit can read ({error!r})."
            raise InputError(message, _OTHER) from error
        found.is_whole = False  # what is right of it are the measurements
        backend, study = _opened(journal, found, sampler)
    left = len(measurements_of(study))
    if found.is_whole:
        with naming(path), path.open("ab") as file:
            file.truncate(found.size)
        backend.written = len(found.lines)
    if _IDENTITY not in study.user_attrs:
        study.set_user_attr(_BUDGET, journal.budget_bytes)
        study.set_user_attr(_IDENTITY, _plain(journal.identity))
    if not found.is_whole:
        ends = ("", *map("-{}".format, range(2, 1000)))
        names = (path.with_name(f"{path.name}.damaged{end}") for end in ends)
        aside = next(each for each in names if not os.path.lexists(each))
        write_atomically(aside, path.read_bytes())
        write_atomically(path, b"".join(journal.lines))
        backend.written = len(journal.lines)
        lost, can = counted(found.lost, "record"), counted(left, "measurement")
        journal.notify(f"{path} was damaged: {lost} of it cannot be read, {can} can; the damaged file is now {aside}.")
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        held = trial.user_attrs.get(MEASUREMENT)
        state, value = _ending(Measurement.from_trial(held) if held else None)
        study.tell(trial.number, value, state=state)
    return study


def _opened(journal: Journal, found: _Found, sampler: BaseSampler) -> tuple[_Backend, Study]:
    """The study of what a file holds: of all records where they are whole, else of the measurements."""
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
    found = filter(None, map(_measurement, map(_held, records)))
    for measurement in {each.number: each for each in found}.values():  # a record may be there twice
        state, value = _ending(measurement)
        attributes = {MEASUREMENT: measurement.to_trial()}
        trial = optuna.trial.create_trial(state=state, value=value, user_attrs=attributes)
        trial.distributions = study.sampler.infer_relative_search_space(study, trial)
        trial.params = {knob: measurement.config.get(knob) for knob in trial.distributions}
        with contextlib.suppress(ValueError):  # of no config of this search
            study.add_trial(trial)


def begun_with(path: Path) -> tuple[Mapping[str, Any], int | None]:
    """The identity and the budget that a journal was begun with; nothing, and None, where it does not say."""
    found = _Found(path)
    return found.identity, found.budget_bytes


def record(study: Study, trial: Trial, measurement: Measurement) -> None:
    """Finish a trial with its measurement."""
    # The measurement first: killed before the second line, the trial is still finished from it on resume.
    trial.set_user_attr(MEASUREMENT, measurement.to_trial())
    state, value = _ending(measurement)
    study.tell(trial.number, value, state=state)


def _ending(measurement: Measurement | None) -> tuple[TrialState, float | None]:
    if measurement and measurement.fits:
        return TrialState.COMPLETE, measurement.throughput
    return TrialState.PRUNED if measurement and measurement.outcome in _PRUNED else TrialState.FAIL, None


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data as JSON holds it."""
    return dict(json.loads(json.dumps(dict(data), default=str)))


def _check_identity(held: Mapping[str, Any], journal: Journal) -> None:
    before, now = dict(_leaves(held)), dict(_leaves(_plain(journal.identity)))
    changed = [name for name in before | now if before.get(name) != now.get(name)] if held else []
    changes = [f"{name} was {shown(before.get(name))}, is {shown(now.get(name))}" for name in changed]
    if changes:
        message = f"{journal.path} holds a search of something else: {'; '.join(changes)}."
        raise InputError(message, "Resume it with what it was started with, or choose another --out.")


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested names joined by dots, with their values."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
