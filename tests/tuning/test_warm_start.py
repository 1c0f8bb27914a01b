"""What earlier searches measured is found by what it depends on, and never stands in the way of a search."""

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from autofit import techniques
from autofit.core.config import Config
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.workload import Traits, Workload
from autofit.search.prior_measurements import PriorMeasurement
from autofit.setup import Setup, Technique
from autofit.training import fingerprint
from autofit.tuning import warm_start
from autofit.tuning.measurement_store import Store, Subject
from autofit.tuning.warm_start import WarmStart, subject_of
from tests import tiny

VERSIONS = {"autofit": "1", "torch": "2", "torchao": "3", "python": "3.11.1", "optuna": "4"}
TRAITS = Traits(
    1000, 2, 4, attention=False, sdpa=False, batch_norm=False, dropout=False, fingerprint="f00"
)
WORKLOAD = dataclasses.replace(tiny.mlp_workload(), traits=TRAITS)


def subject(
    workload: Workload = WORKLOAD, versions: dict[str, str] | None = None, **hardware: Any
) -> Subject:
    found = subject_of(
        workload, dataclasses.replace(tiny.CPU, **hardware), VERSIONS | (versions or {})
    )
    assert found is not None
    return found


def knows(
    found: Subject | None,
    run: Path = Path("run"),
    *,
    told: list[str] | None = None,
    cap: int = GIB,
    exact: bool = True,
) -> WarmStart:
    notify = (told if told is not None else []).append
    return WarmStart(found, cap, exact=exact, run=run, notify=notify, hardware=tiny.CPU)


def fits(size: int, peak: int = MIB, seconds: float = 2.0) -> Measurement:
    steps = StepSeconds(seconds, seconds, seconds)
    return Measurement(
        Config(micro_batch_size=size), Outcome.FITS, 3, steps, 4.0, peak_bytes=PeakBytes(peak)
    )


# What measurements are found by


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another CPU"},
        {"memory_bytes": 16 * GIB},
        {"cores": 4},
        {"capability": (9, 0)},
        {"device": "cuda"},
        {"versions": {"torch": "2.1"}},
        {"versions": {"torchao": "3.1"}},
        {"versions": {"bitsandbytes": "1"}},
        {
            "workload": dataclasses.replace(
                WORKLOAD, traits=dataclasses.replace(TRAITS, fingerprint="bar")
            )
        },
    ],
    ids=lambda change: "-".join(change),
)
def test_another_device_version_or_workload_is_another_subject(change: dict[str, Any]) -> None:
    assert subject(**change) != subject() == subject()


@pytest.mark.parametrize(
    "change",
    [
        {"host_free_bytes": GIB},
        {"memory_bytes": tiny.CPU.memory_bytes - MIB},
        {"versions": {"optuna": "5"}},
        {"versions": {"python": "3.11.2"}},
    ],
    ids=str,
)
def test_what_no_step_depends_on_does_not_matter(change: dict[str, Any]) -> None:
    assert subject(**change) == subject()


def test_the_environment_of_probes_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = subject()
    monkeypatch.delenv("OMP_WAIT_POLICY")  # probes set it where the user has not
    assert subject() == before
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert subject() != before


def test_the_code_that_measures_matters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = subject()
    for room in warm_start.MEASURING:
        (tmp_path / room).mkdir()
        (tmp_path / room / "some.py").write_text("changed")
    monkeypatch.setattr(fingerprint, "_PACKAGE", tmp_path)
    fingerprint.own_code.cache_clear()
    try:
        assert subject() != before
        (tmp_path / "probe" / "some.py").unlink()  # a room that is renamed must not go unnoticed
        fingerprint.own_code.cache_clear()
        with pytest.raises(AssertionError, match=r"there is no code in .*probe"):
            subject()
    finally:
        fingerprint.own_code.cache_clear()


def test_the_code_of_techniques_of_ones_own_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Added(Technique):
        def apply(self, setup: Setup, value: Any) -> None:
            setup.warnings.append("added")

    told = [subject()]
    monkeypatch.setattr(techniques, "added_techniques", lambda: [Added()])
    told += [subject(), subject()]
    monkeypatch.setattr(Added, "apply", lambda self, setup, value: None)
    told.append(subject())
    assert told[1] == told[2]
    assert len(set(told)) == 3


def test_a_workload_that_cannot_be_told_from_others_has_no_subject() -> None:
    plain = dataclasses.replace(WORKLOAD, traits=dataclasses.replace(TRAITS, fingerprint=None))
    for each in (plain, tiny.mlp_workload()):
        assert subject_of(each, tiny.CPU, VERSIONS) is None


# What is known


def test_what_one_search_measures_another_starts_from() -> None:
    told: list[str] = []
    first = knows(subject(), told=told)
    assert first.prior_measurements(resumed=False) == ()
    first.add(fits(1))
    first.add(fits(2, seconds=3.0))
    assert told == []
    second = knows(subject(), told=told)
    expected = (
        PriorMeasurement(Config(micro_batch_size=1), 1, 2.0, MIB),
        PriorMeasurement(Config(micro_batch_size=2), 1, 3.0, MIB),
    )
    assert second.prior_measurements(resumed=False) == expected
    assert told == [
        "earlier searches measured 2 configs: they tell where to start (--no-store leaves them out)"
    ]


def test_each_search_is_a_day_of_its_own() -> None:
    for size in (1, 2):
        one = knows(subject())
        one.add(fits(size))
        one.add(fits(4))
    assert [each.session for each in knows(subject()).prior_measurements(resumed=False)] == [
        1,
        1,
        2,
        2,
    ]


def test_a_search_that_is_resumed_has_its_own_in_its_journal(tmp_path: Path) -> None:
    knows(subject(), tmp_path / "a").add(fits(1))
    knows(subject(), tmp_path / "b").add(fits(2))
    known = knows(subject(), tmp_path / "a").prior_measurements(resumed=True)
    assert [each.config["micro_batch_size"] for each in known] == [2]
    # another run in the same place
    assert len(knows(subject(), tmp_path / "a").prior_measurements(resumed=False)) == 2


def test_other_budgets_are_answered_by_peaks() -> None:
    first = knows(subject(), cap=8 * MIB)
    first.add(fits(1, 2 * MIB))
    first.add(fits(2, 6 * MIB))
    first.add(
        Measurement(
            Config(micro_batch_size=4), Outcome.OUT_OF_MEMORY, peak_bytes=PeakBytes(12 * MIB)
        )
    )
    first.add(Measurement(Config(micro_batch_size=8), Outcome.FAILED))

    def outgrew(cap: int, exact: bool = True) -> dict[Any, tuple[bool, bool]]:
        known = knows(subject(), cap=cap * MIB, exact=exact).prior_measurements(resumed=False)
        return {
            each.config["micro_batch_size"]: (each.outgrew, each.proven)
            for each in known
            if each.works
        }

    assert outgrew(8) == {1: (False, False), 2: (False, False), 4: (True, True)}
    assert outgrew(4) == {1: (False, False), 2: (True, True), 4: (True, True)}
    assert outgrew(16) == {1: (False, False), 2: (False, False)}  # the 4 may fit, or not
    assert outgrew(4, exact=False) == {1: (False, False), 2: (True, False), 4: (True, False)}


def test_where_there_is_no_subject_nothing_is_known_and_nothing_kept() -> None:
    nobody = knows(None)
    nobody.add(fits(1))
    assert nobody.prior_measurements(resumed=False) == ()
    assert not Store().path.exists()


def test_a_run_directory_may_have_any_name(tmp_path: Path) -> None:
    odd = Path("/tmp/\udcff")  # a name that is no text
    knows(subject(), odd).add(fits(1))
    assert knows(subject(), odd).prior_measurements(resumed=True) == ()
    assert len(knows(subject()).prior_measurements(resumed=True)) == 1


# What may be wrong


def test_a_store_that_cannot_be_read_is_told_once_and_set_aside() -> None:
    path = Store().path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 100)
    told: list[str] = []
    search = knows(subject(), told=told)
    assert search.prior_measurements(resumed=False) == ()
    for size in (1, 2):
        search.add(fits(size))
    (only,) = told
    assert only.startswith(
        "the search goes on without earlier measurements: the store of measurements "
    )
    assert only.endswith(
        "It is set aside as measurements.sqlite.damaged; the next search begins a new one."
    )
    assert not path.exists()


def test_a_cache_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    search = knows(subject(), told=told)
    assert search.prior_measurements(resumed=False) == ()
    for size in (1, 2):
        search.add(fits(size))
    assert len(told) == 1
    assert "cannot be written" in told[0]


@pytest.mark.parametrize(
    "change",
    [
        {"cap_bytes": "much"},
        {"cap_bytes": -1},
        {"session": b"\xff"},
        {"run": b"\xff"},
        {"config": '{"warp_speed": 9}'},
        {"config": '{"micro_batch_size": "two"}'},
        {"config": '{"micro_batch_size": 1e999}'},
        {"config": '{"micro_batch_size": [2]}'},
        {"config": "[]"},
        {"config": "[" * 100_000},
        {"measurement": '{"outcome": "fits", "step_seconds": {"median": 0, "low": 0, "high": 0}}'},
        {
            "measurement": '{"outcome": "fits", "step_seconds": {"median": NaN, "low": 1, "high": 1}}'
        },
        {"measurement": '{"outcome": "out_of_memory", "peak_bytes": {"allocated": "all"}}'},
        {"measurement": "null"},
    ],
    ids=lambda change: "-".join(f"{key}-{str(value)[:40]}" for key, value in change.items()),
)
def test_one_bad_row_costs_that_row_alone(change: dict[str, Any]) -> None:
    """Whatever it says, also of a config that is proven not to fit, which every search asks the knobs about."""
    for size in (1, 2):
        knows(subject()).add(fits(size, peak=8 * GIB))
    path = Store().path
    with sqlite3.connect(path) as file:
        ((name, value),) = change.items()
        file.execute(f"UPDATE measurements SET {name} = ? WHERE id = 1", (value,))
    told: list[str] = []
    found = knows(subject(), Path("other"), told=told).prior_measurements(resumed=False)
    assert [each.config["micro_batch_size"] for each in found] == [2]
    assert len(told) == 1
    assert path.exists()  # nothing else of it is given up
