from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Measurement
from autofit.search import finals as finals_module
from autofit.search.finals import Explored, Finals
from autofit.search.journal import Journal
from autofit.search.ranking import Ranking
from autofit.search.study import Limits, SearchOutcome, search
from autofit.search.verification import Verification, verify

LIMITS = Limits(trials=12, tolerance=0.03)


def explored(problem: Any, path: Path, limits: Limits = LIMITS) -> tuple[SearchOutcome, Finals]:
    outcome = search(problem.space, problem.problem(), limits=limits, journal=Journal(path), seed=1)
    assert outcome.finals
    return outcome, outcome.finals


def round_of(config: Config, number: int) -> float:
    """The speed of a config in a round, relative to what was explored: it differs between rounds."""
    return random.Random(f"{config.key}{number}").uniform(0.95, 1.05)


def verified(problem: Any, path: Path, log: Path, fate: str = "") -> Verification:
    """Explore and verify; every verified measurement that the journal has is logged. By its `fate` this process dies in
    its first new measurement, while that is written, or after it."""
    outcome, finals = explored(problem, path)
    rounds = Counter(each.config for each in finals.verified)

    def measure(finalist: Measurement) -> Measurement:
        if fate == "measuring":
            os.kill(os.getpid(), signal.SIGKILL)

        number = rounds[finalist.config]
        rounds[finalist.config] += 1
        seen = finalist.faster(round_of(finalist.config, number))

        if fate == "writing":
            with path.open("ab") as file:
                file.write(b'{"op_code":2,"worker_id":"a","user_attr":{"verif')
            os.kill(os.getpid(), signal.SIGKILL)
        finals.add(seen)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{finalist.config.key} {number}\n")
        if fate == "written":
            os.kill(os.getpid(), signal.SIGKILL)
        return seen

    found = verify(
        outcome.measurements,
        outcome.posterior,
        measure,
        Ranking(0.03, lambda config: ()),
        before=finals.verified,
        finished=finals.finished,
    )
    finals.finish()
    return found


_KILLED = """
import os, pickle, sys, warnings
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import Formula
from test_finals import verified

warnings.simplefilter("ignore")
folder = Path({folder!r})
for fate in {fates!r}:
    child = os.fork()
    if not child:
        found = verified(Formula(0), folder / "journal.log", folder / "log", fate)
        (folder / "found").write_bytes(pickle.dumps(found))
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def test_finals_that_are_killed_ten_times_measure_nothing_twice_and_end_as_undisturbed_ones(
    tmp_path: Path, formula: Any
) -> None:
    undisturbed = verified(formula(0), tmp_path / "other.log", tmp_path / "undisturbed")
    logged = (tmp_path / "undisturbed").read_text().splitlines()
    assert len(logged) > 4

    fates = [
        "written",
        "measuring",
        "writing",
        "written",
        "measuring",
        "writing",
        "written",
        "writing",
        "measuring",
    ]
    fates += ["written", "", ""]  # what ended is played once more
    code = _KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path), fates=fates)
    environment = {**os.environ, "PYTHONPATH": str(Path(finals_module.__file__).parents[2])}
    played = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert played.stdout.split() == [str(int(signal.SIGKILL))] * 10 + ["0", "0"], played.stderr

    assert (tmp_path / "log").read_text().splitlines() == logged
    assert pickle.loads((tmp_path / "found").read_bytes()) == undisturbed


def test_a_finished_search_gives_the_same_answer_whatever_is_predicted_by_then(
    tmp_path: Path, formula: Any
) -> None:
    path, log = tmp_path / "journal.log", tmp_path / "log"
    first = verified(formula(3), path, log)
    measured = log.read_text()
    size = path.stat().st_size

    for seed in (4, 5):
        other = formula(seed)  # of the same space: predictions change with what was learnt
        other.budget = 10.0**20
        assert verified(other, path, log) == first
    assert (log.read_text(), path.stat().st_size) == (measured, size)


def test_another_limit_explores_on_and_keeps_what_was_verified(
    tmp_path: Path, formula: Any
) -> None:
    path = tmp_path / "journal.log"
    verified(formula(3), path, tmp_path / "log")
    outcome, finals = explored(formula(3), path, Limits(trials=15, tolerance=0.03))
    assert len(outcome.measurements) == 15
    assert finals.verified
    assert not finals.finished

    _, finals = explored(formula(3), path, Limits(trials=15, tolerance=0.03, asked_seconds=60))
    assert not finals.finished


def test_a_quick_search_has_finals_of_its_own(tmp_path: Path, formula: Any) -> None:
    """They are shorter."""
    path = tmp_path / "journal.log"
    verified(formula(3), path, tmp_path / "log")
    _, finals = explored(formula(3), path, Limits(trials=12, tolerance=0.03, quick=2))
    assert not finals.verified


@pytest.mark.parametrize("lost", ["measurement", "verified"])
def test_of_a_damaged_journal_the_rest_is_read_back(
    tmp_path: Path, formula: Any, lost: str
) -> None:
    path, log = tmp_path / "journal.log", tmp_path / "log"
    verified(formula(3), path, log)
    count = len(log.read_text().splitlines())
    lines = path.read_bytes().splitlines(keepends=True)
    wanted = (
        b'"user_attr":{"measurement"'
        if lost == "measurement"
        else b'"user_attr":{"verified-000002"'
    )
    number = next(number for number, line in enumerate(lines) if wanted in line)
    lines[number] = lines[number].replace(b'"op_code"', b'"op_cude"')
    path.write_bytes(b"".join(lines))

    again = verified(formula(3), path, log)
    logged = log.read_text().splitlines()
    assert len(logged) == len(set(logged))
    assert again.verified
    if lost == "verified":  # nothing is measured for what had finished
        assert len(logged) == count


@pytest.mark.parametrize(
    "value", [None, 1, {}, {"asked": {}, "explored": 3}, {"quick": None, "measurement": []}]
)
def test_what_says_nothing_is_as_if_it_were_not_there(
    tmp_path: Path, formula: Any, value: Any
) -> None:
    outcome, finals = explored(formula(3), tmp_path / "journal.log")
    finals._study.set_user_attr("explored", value)
    finals._study.set_user_attr("verified-000000", value)
    again, finals = explored(formula(3), tmp_path / "journal.log")
    assert again == outcome
    assert finals.verified == []
    assert not finals.finished


def test_what_exploring_ended_with_is_of_its_measurements_alone(formula: Any) -> None:
    measurements = [
        formula(3).probe(number, config) for number, config in enumerate(formula(3).configs[:3])
    ]
    timed = {str(each.number): 1.0 for each in measurements if each.fits}
    assert Explored(3, "trials", None, timed).is_of(measurements)
    assert not Explored(2, "trials", None, timed).is_of(measurements)
    assert not Explored(3, "trials", None, {**timed, "7": 1.0}).is_of(measurements)
    assert (
        not Explored(3, "trials", None, dict.fromkeys(timed, -1.0)).is_of(measurements) or not timed
    )
    assert json.loads(json.dumps(timed)) == timed
