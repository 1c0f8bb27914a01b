from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement, Outcome
from autofit.search import journal as journal_module
from autofit.search.journal import Journal, begun_with, open_study, record
from autofit.search.sampler import measurements_of
from autofit.search.study import Limits, search

SAMPLER = optuna.samplers.RandomSampler(seed=0)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.log", {"model": "m", "workload": {"sequence_length": 128}, "budget": 24.0})


def measured(number: int, outcome: str = "fits") -> Measurement:
    return Measurement(Config(a=number), Outcome(outcome), number=number, samples_per_second=1.5, reason="é\n\r\x85")


def write(journal: Journal, *outcomes: str) -> None:
    study = open_study(journal, SAMPLER)
    for number, outcome in enumerate(outcomes, start=len(measurements_of(study))):
        record(study, study.ask(), measured(number, outcome))


def test_measurements_come_back_as_they_were(journal: Journal) -> None:
    write(journal, *Outcome)
    study = open_study(journal, SAMPLER)
    assert measurements_of(study) == [measured(number, outcome) for number, outcome in enumerate(Outcome)]


def test_optuna_sees_states_that_mean_the_same(journal: Journal) -> None:
    write(journal, *Outcome)
    states = [trial.state.name for trial in open_study(journal, SAMPLER).get_trials(deepcopy=False)]
    assert dict(zip(Outcome, states, strict=True)) == {
        Outcome.FITS: "COMPLETE",
        Outcome.OUT_OF_MEMORY: "PRUNED",
        Outcome.HOST_OUT_OF_MEMORY: "PRUNED",
        Outcome.TIMED_OUT: "PRUNED",
        Outcome.REFUSED: "FAIL",
        Outcome.DIVERGED: "FAIL",
        Outcome.FAILED: "FAIL",
    }
    assert open_study(journal, SAMPLER).best_value == 1.5


def test_a_journal_is_a_study_that_optuna_s_own_tools_open(tmp_path: Path, formula: Any) -> None:
    """As optuna-dashboard does it."""
    problem = formula()
    outcome = search(problem.space, problem.problem(), limits=Limits(trials=5), journal=Journal(tmp_path / "j.log", {}))
    file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(file))
    trials = study.get_trials()
    assert [trial.number for trial in trials] == [0, 1, 2, 3, 4]
    assert study.best_value == max(each.throughput for each in outcome.measurements)
    knobs = problem.space.knobs
    assert [{knob: trial.params[knob] for knob in knobs} for trial in trials] == [
        {knob: each.config[knob] for knob in knobs} for each in outcome.measurements
    ]


def test_the_disk_is_waited_for_with_each_measurement_and_not_with_each_knob(
    tmp_path: Path, formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bytes] = []

    def fsync(file: int) -> None:
        waited.append((tmp_path / "j.log").read_bytes().splitlines()[-1])

    monkeypatch.setattr(os, "fsync", fsync)
    problem = formula()
    search(problem.space, problem.problem(), limits=Limits(trials=5), journal=Journal(tmp_path / "j.log", {}))
    assert len([line for line in waited if b'"measurement"' in line]) == 5
    assert len(waited) <= 2 * 5  # and what the study itself is


def test_without_a_journal_the_study_is_in_memory() -> None:
    study = open_study(None, SAMPLER)
    record(study, study.ask(), measured(0))
    assert measurements_of(study) == [measured(0)]


@pytest.mark.parametrize("kept", [1, 17, -2])
def test_a_torn_last_line_costs_only_that_line(journal: Journal, kept: int) -> None:
    write(journal, "fits", "fits")
    whole = journal.path.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    with journal.path.open("ab") as file:
        file.write(line[:kept])
    write(journal, "out_of_memory")
    assert journal.path.read_bytes().startswith(whole)
    assert [each.number for each in measurements_of(open_study(journal, SAMPLER))] == [0, 1, 2]


def test_any_prefix_of_a_journal_can_be_resumed(journal: Journal) -> None:
    write(journal, "fits", "out_of_memory")
    whole = journal.path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        journal.path.write_bytes(whole[:length])
        write(journal, "timed_out")
        held = measurements_of(open_study(journal, SAMPLER))
        assert [each.number for each in held] == list(range(len(held)))
        assert held[-1].outcome is Outcome.TIMED_OUT


def test_zeros_after_a_power_cut_are_a_torn_line(journal: Journal) -> None:
    write(journal, "fits")
    with journal.path.open("ab") as file:
        file.write(bytes(512))
    write(journal, "fits")
    assert len(measurements_of(open_study(journal, SAMPLER))) == 2


@pytest.mark.parametrize("line", [b"{torn\n", b"[]\n", b"\xff\n"])
def test_damage_in_the_middle_is_said_not_skipped(journal: Journal, line: bytes) -> None:
    write(journal, "fits")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    lines.insert(3, line)
    journal.path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="is damaged: its line 4"):
        open_study(journal, SAMPLER)


@pytest.mark.parametrize("text", ['{"a": 1}\n', '{"op_code": 77, "worker_id": "w"}\n'])
def test_a_file_of_something_else(journal: Journal, text: str) -> None:
    journal.path.write_text(text)
    with pytest.raises(InputError, match="is not a journal that this version of autofit can read"):
        open_study(journal, SAMPLER)


def test_a_measurement_of_another_version(journal: Journal) -> None:
    study = open_study(journal, SAMPLER)
    trial = study.ask()
    trial.set_user_attr("measurement", {"config": {}, "outcome": "fits", "colour": "blue"})
    study.tell(trial, 1.0)
    with pytest.raises(InputError, match="this version of autofit"):
        open_study(journal, SAMPLER)


def test_a_lock_of_the_dead_is_removed(journal: Journal) -> None:
    write(journal, "fits")
    lock = journal.path.with_name("journal.log.lock")
    lock.symlink_to(journal.path)
    journal.path.with_name("journal.log.lock1234.rename").symlink_to(journal.path)
    write(journal, "fits")
    assert [path.name for path in journal.path.parent.iterdir()] == ["journal.log"]


def test_trials_left_running_are_given_up(journal: Journal) -> None:
    study = open_study(journal, SAMPLER)
    first, *_ = [study.ask() for _ in range(3)]
    record(study, first, measured(0))
    study = open_study(journal, SAMPLER)
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE", "FAIL", "FAIL"]
    assert measurements_of(study) == [measured(0)]


def test_a_trial_that_was_measured_but_not_finished_is_finished(journal: Journal) -> None:
    open_study(journal, SAMPLER).ask().set_user_attr("measurement", measured(0).to_trial())
    study = open_study(journal, SAMPLER)
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE"]
    assert measurements_of(study) == [measured(0)]


def test_another_identity_is_refused_and_says_what_differs(journal: Journal) -> None:
    write(journal, "fits")
    changed = {"model": "m", "workload": {"sequence_length": 256, "task": "custom"}, "budget": 24.0}
    with pytest.raises(InputError) as caught:
        open_study(Journal(journal.path, changed), SAMPLER)
    message = str(caught.value)
    assert "workload.sequence_length was 128, is 256" in message
    assert "workload.task was None, is 'custom'" in message
    assert "budget" not in message
    assert "model" not in message


def test_what_a_journal_was_begun_with_is_told_before_it_is_opened(journal: Journal) -> None:
    assert begun_with(journal.path) == ({}, None)
    write(dataclasses.replace(journal, budget_bytes=7), "fits")
    write(dataclasses.replace(journal, budget_bytes=9), "fits")
    with journal.path.open("ab") as file:
        file.write(b'{"op_code":')  # as a process that was killed leaves it
    assert begun_with(journal.path) == (journal.identity, 7)


def test_an_identity_is_compared_as_it_is_stored(journal: Journal) -> None:
    for _ in range(2):
        open_study(Journal(journal.path, {"path": Path("a"), "capability": (8, 0), "limit": None}), SAMPLER)


# A search in a process of its own that is killed while it writes line HALF of the journal: half the line is written
# and Optuna's lock is held, as kill -9 leaves them.
_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import Formula
from autofit.search.journal import Journal
from autofit.search.study import Limits, search
from autofit.search import journal as journal_module

whole, lines = journal_module._Backend.append_logs, 0

def append(self, logs):
    global lines
    lines += 1
    if lines < {half}:
        return whole(self, logs)
    self._lock.acquire()
    with open(self._file_path, "ab") as file:
        file.write(b'{{"op_code":8,"worker_id":"')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

journal_module._Backend.append_logs = append
search(Formula(3).space, Formula(3).problem(), limits=Limits(trials=30), journal=Journal(Path({path!r})), seed=1)
"""


@pytest.mark.parametrize("half", [1, 40, 51])
def test_a_search_killed_while_it_writes_is_resumed(tmp_path: Path, formula: Any, half: int) -> None:
    path = tmp_path / "journal.log"
    code = _KILLED.format(tests=str(Path(__file__).parent), half=half, path=str(path))
    environment = {**os.environ, "PYTHONPATH": str(Path(journal_module.__file__).parents[2])}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert path.with_name("journal.log.lock").is_symlink()
    assert not path.read_bytes().endswith(b"\n")

    problem, straight = formula(3), formula(3)
    outcome = search(problem.space, problem.problem(), limits=Limits(trials=12), journal=Journal(path), seed=1)
    assert [each.number for each in outcome.measurements] == list(range(12))
    assert (
        outcome.measurements
        == search(straight.space, straight.problem(), limits=Limits(trials=12), seed=1).measurements
    )
    assert len(problem.probed) < 12 or half == 1  # the rest was read back
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
