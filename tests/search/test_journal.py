from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

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
    return Journal(
        tmp_path / "journal.log",
        {"model": "m", "workload": {"sequence_length": 128}, "budget": 24.0},
    )


def measured(number: int, outcome: str = "fits") -> Measurement:
    return Measurement(
        Config(a=number),
        Outcome(outcome),
        number=number,
        samples_per_second=1.5,
        reason="é\n\r\x85",
    )


def write(journal: Journal, *outcomes: str) -> None:
    study = open_study(journal, SAMPLER)
    for number, outcome in enumerate(outcomes, start=len(measurements_of(study))):
        record(study, study.ask(), measured(number, outcome))


def test_measurements_come_back_as_they_were(journal: Journal) -> None:
    write(journal, *Outcome)
    study = open_study(journal, SAMPLER)
    assert measurements_of(study) == [
        measured(number, outcome) for number, outcome in enumerate(Outcome)
    ]


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
    outcome = search(
        problem.space,
        problem.problem(),
        limits=Limits(trials=5),
        journal=Journal(tmp_path / "j.log", {}),
    )
    study = optuna.load_study(
        study_name=None, storage=JournalStorage(JournalFileBackend(str(tmp_path / "j.log")))
    )
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
    search(
        problem.space,
        problem.problem(),
        limits=Limits(trials=5),
        journal=Journal(tmp_path / "j.log", {}),
    )
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


@pytest.mark.parametrize("start", ["", "\n"])
@pytest.mark.parametrize("end", ["", ',"crc":"0000000"}', ',"crc":"00000000"}'])
def test_a_torn_line_takes_time_by_its_length_alone(journal: Journal, start: str, end: str) -> None:
    """Of a megabyte that takes a tenth of a second; by its square it would be hours."""
    write(journal, "fits")
    with journal.path.open("a") as file:
        file.write(start + '{"op_code":' * 100_000 + end)
    began = time.process_time()
    begun_with(journal.path)
    assert time.process_time() - began < 5


def test_zeros_after_a_power_cut_are_a_torn_line(journal: Journal) -> None:
    write(journal, "fits")
    with journal.path.open("ab") as file:
        file.write(bytes(512))
    write(journal, "fits")
    assert len(measurements_of(open_study(journal, SAMPLER))) == 2


@pytest.mark.parametrize("line", [b"{torn\n", b"[]\n", b"\xff\n", b'{"a":1}\n', b"\n"])
def test_damage_in_the_middle_costs_no_more_than_it_touches(journal: Journal, line: bytes) -> None:
    write(journal, "fits", "out_of_memory")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    lines.insert(3, line)
    journal.path.write_bytes(b"".join(lines))
    said: list[str] = []
    study = open_study(dataclasses.replace(journal, notify=said.append), SAMPLER)
    assert measurements_of(study) == [measured(0), measured(1, "out_of_memory")]
    damaged, lost = (
        journal.path.with_name("journal.log.damaged"),
        "0 records" if line == b"\n" else "1 record",
    )
    told = f"{lost} of it cannot be read, 2 measurements can; the damaged file is now {damaged}."
    assert said == [f"{journal.path} was damaged: {told}"]
    assert damaged.read_bytes() == b"".join(lines)
    write(journal, "fits")  # and nothing is said again
    assert [each.number for each in measurements_of(open_study(journal, SAMPLER))] == [0, 1, 2]
    assert len(said) == 1


def test_a_file_set_aside_before_stays(journal: Journal) -> None:
    for number in range(3):
        write(journal, "fits")
        with journal.path.open("ab") as file:
            file.write(b"noise %d\n" % number)
    open_study(journal, SAMPLER)
    aside = sorted(each.name for each in journal.path.parent.iterdir())
    assert aside == [
        "journal.log",
        "journal.log.damaged",
        "journal.log.damaged-2",
        "journal.log.damaged-3",
    ]
    assert journal.path.with_name("journal.log.damaged-2").read_bytes().endswith(b"noise 1\n")


def damaged(whole: bytes) -> Iterator[tuple[bytes, int]]:
    """A journal of three measurements after many a fault, and how many of them must be left at least."""
    draw = random.Random(0)
    for place in [*range(0, len(whole), 89), *(each.start() for each in re.finditer(b"\n", whole))]:
        left = 3 if whole[place] == ord("\n") else 2
        yield (
            whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :],
            left,
        )
        yield whole[:place] + whole[place + 1 :], left
        yield whole[:place] + b"\n" + whole[place:], left
    for place in range(0, len(whole), 331):
        yield whole[:place], 0
        yield whole[:place] + draw.randbytes(300) + whole[place:], 2
        yield whole[:place] + draw.randbytes(300) + whole[place + 300 :], 0
        yield whole[:place] + bytes(512) + whole[place + 512 :], 0
        yield whole[:place] + whole[draw.randrange(len(whole)) :], 0
    lines = whole.splitlines(keepends=True)
    for place in range(len(lines)):
        yield b"".join(lines[:place] + lines[place + 1 :]), 2
        yield b"".join(lines[:place] + lines[place : place + 1] + lines[place:]), 3
        yield b"".join(lines[place:] + lines[:place]), 3
    yield whole + whole, 3
    yield whole.replace(b"\n", b"\r\n"), 3
    yield b"\xef\xbb\xbf" + whole, 3


def test_however_a_journal_is_damaged_what_is_read_is_right_and_the_search_goes_on(
    journal: Journal,
) -> None:
    write(journal, "fits", "out_of_memory", "failed")
    whole, truth = journal.path.read_bytes(), measurements_of(open_study(journal, SAMPLER))
    aside = journal.path.with_name("journal.log.damaged")
    for text, left in damaged(whole):
        aside.unlink(missing_ok=True)
        journal.path.write_bytes(text)
        said: list[str] = []
        study = open_study(dataclasses.replace(journal, notify=said.append), SAMPLER)
        held = measurements_of(study)
        assert len(held) >= left
        assert all(each in truth for each in held)
        # Nothing is said where records are only missing at the end, as those a process never wrote whole.
        end = text.rfind(b"\n") + 1
        only_cut = whole.startswith(text[:end]) and not re.search(rb'"crc":"\w{8}"}', text[end:])
        assert bool(said) == aside.exists() == (not only_cut)
        record(study, study.ask(), measured(7, "timed_out"))
        assert measurements_of(open_study(journal, SAMPLER)) == [*held, measured(7, "timed_out")]


def test_every_record_of_a_measurement_says_what_it_is_of(journal: Journal) -> None:
    """So that the journal is still known, and the budget, when what came first is lost."""
    write(dataclasses.replace(journal, budget_bytes=7), "fits")
    journal.path.write_bytes(b"\n".join(journal.path.read_bytes().splitlines()[3:]) + b"\n")
    assert begun_with(journal.path) == (journal.identity, 7)
    with pytest.raises(InputError, match="holds a search of something else: model was 'm'"):
        open_study(Journal(journal.path, {"model": "other"}), SAMPLER)
    assert len(measurements_of(open_study(journal, SAMPLER))) == 1


@pytest.fixture
def of_before(journal: Journal) -> Journal:
    """A journal that Optuna wrote by itself, without checksums."""
    storage = JournalStorage(JournalFileBackend(str(journal.path)))
    study = optuna.create_study(storage=storage, study_name="autofit", direction="maximize")
    study.set_user_attr("identity", dict(journal.identity))
    for number in range(2):
        trial = study.ask()
        trial.set_user_attr("measurement", measured(number).to_trial())
        study.tell(trial, 1.5)
    return journal


def test_a_journal_without_checksums_goes_on(of_before: Journal) -> None:
    for number in (2, 3):
        write(of_before, "fits")
        assert len(measurements_of(open_study(of_before, SAMPLER))) == number + 1
    assert begun_with(of_before.path) == (of_before.identity, None)


def test_a_damaged_journal_without_checksums_is_refused_because_nothing_in_it_is_sure(
    of_before: Journal,
) -> None:
    text = of_before.path.read_bytes().replace(b"true", b"trve").replace(b'"fits"', b'"fits', 1)
    of_before.path.write_bytes(text)
    with pytest.raises(
        InputError, match=r"is damaged, or no journal: no checksum shows any record"
    ):
        open_study(of_before, SAMPLER)
    assert of_before.path.read_bytes() == text


def test_what_other_tools_note_in_a_journal_stays(journal: Journal) -> None:
    """optuna-dashboard keeps the user's notes there."""
    write(journal, "fits")
    storage = JournalStorage(JournalFileBackend(str(journal.path)))
    storage.set_study_system_attr(storage.get_study_id_from_name("autofit"), "note", "mine")
    write(journal, "fits")
    assert len(measurements_of(open_study(journal, SAMPLER))) == 2
    assert b'"note":"mine"' in journal.path.read_bytes()
    assert list(journal.path.parent.iterdir()) == [journal.path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n', "is damaged, or no journal"),
        (
            '{"op_code": 77, "worker_id": "w"}\n',
            "is not a journal that this version of autofit can read",
        ),
    ],
)
def test_a_file_of_something_else(journal: Journal, text: str, said: str) -> None:
    journal.path.write_text(text)
    with pytest.raises(InputError, match=said):
        open_study(journal, SAMPLER)
    assert journal.path.read_text() == text


def test_what_a_full_disk_refused_is_written_as_soon_as_there_is_room(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(journal, SAMPLER)
    trial, whole = study.ask(), journal.path.read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        record(study, trial, measured(0))
    assert caught.value.filename == str(journal.path)
    # no half of a line is left, after which others could not be read
    assert journal.path.read_bytes() == whole
    monkeypatch.undo()
    study.tell(trial, state=TrialState.FAIL)
    said: list[str] = []
    assert measurements_of(
        open_study(dataclasses.replace(journal, notify=said.append), SAMPLER)
    ) == [measured(0)]
    assert not said


def test_a_measurement_of_another_version(journal: Journal) -> None:
    study = open_study(journal, SAMPLER)
    trial = study.ask()
    trial.set_user_attr("measurement", {"config": {}, "outcome": "fits", "colour": "blue"})
    study.tell(trial, 1.0)
    with pytest.raises(InputError, match="this version of autofit"):
        open_study(journal, SAMPLER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples_per_second": 0.0},
        {"samples_per_second": float("nan")},
        {"samples_per_second": -4.0},
        {"samples_per_second": None},
        {"step_seconds": {"median": 0.0, "low": 0.0, "high": 0.0}},
        {"number": -3},
        {"number": "one"},
        {"seconds": float("inf")},
        {"peak_bytes": {"allocated": -1}},
        {"config": ["a"]},
        {"config": {"a": 1e400}},
        {"outcome": "won"},
        "no measurement",
    ],
    ids=str,
)
def test_a_measurement_that_no_probe_makes_is_set_aside_whatever_its_checksum(
    journal: Journal, wrong: Any
) -> None:
    write(journal, "fits", "fits", "fits")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    second = [index for index, line in enumerate(lines) if b'"user_attr":{"measurement"' in line][1]
    held = json.loads(lines[second])
    del held["crc"]
    measurement = held["user_attr"]["measurement"]
    held["user_attr"]["measurement"] = (
        {**measurement, **wrong} if isinstance(wrong, dict) else wrong
    )
    lines[second] = checked(held)
    journal.path.write_bytes(b"".join(lines))
    said: list[str] = []
    study = open_study(dataclasses.replace(journal, notify=said.append), SAMPLER)
    assert measurements_of(study) == [measured(0), measured(2)]
    assert "1 record of it cannot be read, 2 measurements can" in said[0]
    assert measurements_of(open_study(journal, SAMPLER)) == [measured(0), measured(2)]


@pytest.mark.parametrize(
    "record", [{"op_code": 77}, {"op_code": 8, "trial_id": 999}, {"op_code": 0}, {"line": None}]
)
def test_a_record_that_optuna_cannot_read_costs_no_measurement(
    journal: Journal, record: dict[str, Any]
) -> None:
    write(journal, "fits")
    number = len(journal.path.read_bytes().splitlines())
    with journal.path.open("ab") as file:
        file.write(checked({"op_code": 1, "line": number} | record))
    assert measurements_of(open_study(journal, SAMPLER)) == [measured(0)]


def checked(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"))[:-1].encode()
    return b'%s,"crc":"%08x"}\n' % (text, zlib.crc32(text))


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
        open_study(
            Journal(journal.path, {"path": Path("a"), "capability": (8, 0), "limit": None}), SAMPLER
        )


# A search in a process of its own that is killed while it writes line HALF of the journal, as kill -9 leaves it.
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
    with self._journal.path.open("ab") as file:
        file.write(b'{{"op_code":8,"worker_id":"')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

journal_module._Backend.append_logs = append
search(Formula(3).space, Formula(3).problem(), limits=Limits(trials=30), journal=Journal(Path({path!r})), seed=1)
"""


@pytest.mark.parametrize("half", [1, 40, 51])
def test_a_search_killed_while_it_writes_is_resumed(
    tmp_path: Path, formula: Any, half: int
) -> None:
    path = tmp_path / "journal.log"
    code = _KILLED.format(tests=str(Path(__file__).parent), half=half, path=str(path))
    environment = {**os.environ, "PYTHONPATH": str(Path(journal_module.__file__).parents[2])}
    died = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not path.read_bytes().endswith(b"\n")

    problem, straight = formula(3), formula(3)
    outcome = search(
        problem.space, problem.problem(), limits=Limits(trials=12), journal=Journal(path), seed=1
    )
    assert [each.number for each in outcome.measurements] == list(range(12))
    assert (
        outcome.measurements
        == search(straight.space, straight.problem(), limits=Limits(trials=12), seed=1).measurements
    )
    assert len(problem.probed) < 12 or half == 1  # the rest was read back
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
