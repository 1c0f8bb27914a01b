from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.files import write_cache
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.estimate.calibration import (
    MOST_STORED,
    Calibration,
    Comparison,
    calibration_for,
    compare,
    learn,
)
from tests.tiny import CPU

DAY = 24 * 3600.0
NOW = 20_000 * DAY
shares = st.floats(0, 1)
ratios = st.floats(0.1, 10)


def seen(
    ratio: float, *, days_ago: float = 0.0, waiting: float = 0.0, noise: float = 0.0
) -> Comparison:
    return Comparison(100, 110, 1.0, ratio, NOW - days_ago * DAY, waiting, noise)


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)


def test_what_was_measured_is_found_again_for_this_device_only() -> None:
    learn(CPU, [seen(2.0)])
    learn(CPU, [seen(4.0)])
    known = calibration_for(CPU)
    assert (known.memory, known.seconds, known.count) == (pytest.approx(1.1), 2.0, 2)
    assert calibration_for(replace(CPU, name="another")) == Calibration()


def test_several_devices_are_told_apart_by_what_they_exchange() -> None:
    """By their number and the ways that divide a training, whatever the degrees of each."""
    replicas, shards = Config({"data_parallel_replicate": 2}), Config({"data_parallel_shard": 2})
    two, four = CPU.of_several(2), CPU.of_several(4)
    learn(two, [seen(2.0)], replicas)
    learn(two, [seen(4.0)], shards)
    learn(CPU, [seen(8.0)], Config({}))
    known = [
        calibration_for(hardware, config)
        for hardware in (two, four)
        for config in (replicas, shards)
    ]
    assert [(each.seconds, each.count) for each in known] == [
        (2.0, 1),
        (4.0, 1),
        (None, 0),
        (None, 0),
    ]
    assert calibration_for(CPU).seconds == 8.0
    assert calibration_for(four, replicas.replace(data_parallel_shard=2)) == Calibration()


def test_the_spread_counts_from_a_few_measurements_on() -> None:
    few, enough = (
        Calibration.of([Comparison(100, 100 + each) for each in range(count)]) for count in (4, 9)
    )
    assert few.spread is None
    assert enough.spread == pytest.approx((100 / 104, 108 / 104))


def test_times_are_learnt_where_bytes_are_exact_as_they_are() -> None:
    found = Calibration.of([replace(seen(1.5), predicted_bytes=0)], NOW)
    assert found == Calibration(seconds=1.5, count=1)


@given(st.floats(0, 400), st.floats(0, 400), shares, shares, shares, shares)
def test_older_busier_and_less_steady_never_counts_more(
    age: float, older: float, waiting: float, busier: float, noise: float, noisier: float
) -> None:
    best = seen(2.0, days_ago=age, waiting=waiting, noise=noise)
    worse = seen(2.0, days_ago=age + older, waiting=waiting + busier, noise=noise + noisier)
    assert 0 < worse.weight(NOW) <= best.weight(NOW) <= 1


@given(
    st.lists(
        st.tuples(ratios, st.floats(0, 40)),
        min_size=4,
        max_size=30,
        unique_by=lambda each: int(each[1]),
    ),
    st.lists(ratios, max_size=150),
    st.floats(0.6, 1),
)
def test_no_busy_day_moves_what_quiet_ones_have_shown(
    quiet: list[tuple[float, float]], busy: list[float], waiting: float
) -> None:
    """However many are measured in it, the median stays among those of the quiet days, and predictions."""
    before = [seen(ratio, days_ago=2 + age) for ratio, age in quiet]
    found = Calibration.of(
        [*before, *(seen(ratio, waiting=waiting) for ratio in busy)], NOW
    ).seconds
    assert found is not None
    known = [1.0, *(ratio for ratio, _ in quiet)]
    assert min(known) <= found <= max(known)


def test_what_a_busy_day_alone_shows_is_not_believed() -> None:
    found = Calibration.of([seen(3.18, waiting=0.9) for _ in range(50)], NOW)
    assert (found.seconds, found.discounted) == (1.0, 50)
    steady = [seen(1.2, days_ago=each) for each in range(3)]
    assert (
        Calibration.of([*steady, *(seen(3.18, waiting=0.9) for _ in range(50))], NOW).seconds == 1.2
    )


def test_what_is_long_ago_is_believed_less() -> None:
    assert Calibration.of([seen(2.0)], NOW).seconds == 2.0
    assert Calibration.of([seen(2.0, days_ago=90)], NOW).seconds == 1.0
    assert Calibration.of([seen(2.0, days_ago=90), seen(1.5)], NOW).seconds == 1.5


def test_two_halves_of_all_weight_meet_in_the_middle() -> None:
    assert Calibration.of([seen(2.0), seen(3.0), seen(4.0, waiting=0.2)], NOW).seconds == 2.5


def test_of_more_than_there_is_room_for_those_that_count_most_are_kept() -> None:
    learn(CPU, [seen(1.1, days_ago=1)])
    learn(CPU, [seen(3.0, waiting=0.9) for _ in range(2 * MOST_STORED)])
    known = calibration_for(CPU)
    assert (known.count, known.discounted) == (MOST_STORED, MOST_STORED - 1)
    assert known.seconds == 1.1


def file_in(cache: Path) -> Path:
    (file,) = cache.glob("autofit/calibration/*.json")
    return file


@pytest.mark.parametrize(
    "told",
    [{}, {"when": NOW, "waiting": 0.0, "noise": 0.0, "temperature": 300}],
    ids=["earlier", "later"],
)
def test_files_of_other_versions_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learn(CPU, [seen(1.0)])
    data = {
        "predicted_bytes": 100,
        "measured_bytes": 120,
        "predicted_seconds": 1.0,
        "measured_seconds": 3.18,
    }
    write_cache(file_in(tmp_path), [data | told] * 4)
    known = calibration_for(CPU)
    assert (known.memory, known.count, known.discounted) == (1.2, 4, 0 if told else 4)
    assert known.seconds == (3.18 if told else 1.0)  # nobody noted how busy the machine was
    learn(CPU, [seen(1.0)])
    assert calibration_for(CPU).count == 5


def test_a_broken_file_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learn(CPU, [Comparison(1, 1)])
    for text in ("[{", '[{"predicted_bytes": "x", "measured_bytes": 1}]'):
        file_in(tmp_path).write_text(text, encoding="utf-8")
        assert calibration_for(CPU).count == 0


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    learn(CPU, [Comparison(1, 1)])
    assert calibration_for(CPU).count == 0


def test_measurements_are_compared_with_what_was_predicted_of_their_configs() -> None:
    timed = Measurement(
        Config(a=1),
        Outcome.FITS,
        step_seconds=StepSeconds(2.0, 1.9, 2.2),
        peak_bytes=PeakBytes(110),
    )
    unknown = replace(timed, config=Config(a=2))
    failed = Measurement(Config(a=1), Outcome.FAILED)
    nbytes, seconds = {Config(a=1): 100.0, Config(a=2): float("nan")}, {Config(a=1): 1.0}
    (found,) = compare([timed, unknown, failed], nbytes, seconds, exact=False, waiting=0.3)
    assert found == Comparison(100, 110, 1.0, 2.0, NOW, 0.3, pytest.approx(0.15))
    (exact,) = compare([timed], nbytes, seconds, exact=True, waiting=0.3)
    assert exact.predicted_bytes == 0
