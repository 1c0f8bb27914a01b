"""The Optuna study of a search, kept in a journal file so that nothing measured is ever lost.

A process may die at any moment, kill -9 and power cuts included. Opening the journal again repairs what that leaves: a
torn last line, stale locks, trials that nobody runs. The run directory's lock keeps other writers out.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState

from autofit.core.errors import InputError
from autofit.core.files import naming
from autofit.core.measurement import Measurement, Outcome
from autofit.search.sampler import MEASUREMENT, measurements_of

_STUDY = "autofit"
_IDENTITY, _BUDGET = "identity", "budget"
# Optuna's words: complete has a value, pruned was stopped by a limit, fail says nothing about the objective.
_PRUNED = (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY, Outcome.TIMED_OUT)


@dataclass(frozen=True)
class Journal:
    """Where a search is kept, and what it is a search of: plain data such as model, workload, device and budget.

    A journal is only ever continued by a search of the same identity: its measurements mean nothing to another. What
    ran out of memory did so within `budget_bytes`, which `begun_with` tells those who go on with it.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None


class _Backend(JournalFileBackend):
    """Waits for the disk only where something would be lost: with measurements, which take all lines before along.

    Optuna's own waits with each line, of which a trial has one for each knob: 70 ms for 18 of them were measured.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines."""
        with naming(self._path):
            if any("user_attr" in log for log in logs):
                super().append_logs(logs)
                return
            with self._path.open("ab") as file:  # unlocked: there is no other writer
                file.writelines(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs)


def open_study(journal: Journal | None, sampler: BaseSampler) -> Study:
    """The study of a journal, new, resumed or in memory; an InputError for a damaged one or one of something else."""
    if journal is None:
        return optuna.create_study(direction="maximize", sampler=sampler)
    _repair(journal.path)
    try:
        storage = JournalStorage(_Backend(journal.path))
        study = optuna.create_study(
            storage=storage, study_name=_STUDY, direction="maximize", sampler=sampler, load_if_exists=True
        )
        measurements_of(study)  # can they be read?
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        message = f"{journal.path} is not a journal that this version of autofit can read ({error!r})."
        raise InputError(message, "Choose another --out.") from error
    _check_identity(study, journal)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        held = trial.user_attrs.get(MEASUREMENT)
        _tell(study, trial.number, Measurement.from_trial(held) if held else None)
    return study


def begun_with(path: Path) -> tuple[Mapping[str, Any], int | None]:
    """The identity and the budget that a journal was begun with; nothing, and None, where it does not say."""
    told: dict[str, Any] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if _is_record(line):
            told |= json.loads(line).get("user_attr") or {}
    return told.get(_IDENTITY) or {}, told.get(_BUDGET)


def record(study: Study, trial: Trial, measurement: Measurement) -> None:
    """Finish a trial with its measurement."""
    # The measurement first: killed before the second line, the trial is still finished from it on resume.
    trial.set_user_attr(MEASUREMENT, measurement.to_trial())
    _tell(study, trial.number, measurement)


def _tell(study: Study, trial: int, measurement: Measurement | None) -> None:
    if measurement and measurement.fits:
        study.tell(trial, measurement.throughput, state=TrialState.COMPLETE)
    else:
        pruned = measurement and measurement.outcome in _PRUNED
        study.tell(trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)


def _repair(path: Path) -> None:
    """Cut off a torn last line, without which later lines could not be read, and remove locks of the dead."""
    for lock in path.parent.glob(f"{path.name}.lock*"):
        lock.unlink(missing_ok=True)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    whole = list(itertools.takewhile(lambda line: line.endswith(b"\n") and _is_record(line), lines))
    if len(whole) < len(lines) - 1:
        message = f"{path} is damaged: its line {len(whole) + 1} cannot be read, and others follow it."
        raise InputError(message, "Choose another --out.")
    with path.open("r+b") as file:
        file.truncate(sum(map(len, whole)))


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _check_identity(study: Study, journal: Journal) -> None:
    asked = json.loads(json.dumps(dict(journal.identity), default=str))
    held = study.user_attrs.get(_IDENTITY)
    if held is None:
        study.set_user_attr(_BUDGET, journal.budget_bytes)
        study.set_user_attr(_IDENTITY, asked)
        return
    before, now = dict(_leaves(held)), dict(_leaves(asked))
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    changes = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in changed]
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
