from dataclasses import replace
from pathlib import Path

import pytest

from autofit.estimate.calibration import Calibration, Seen, calibration_for, learn
from tests.tiny import CPU


def test_what_was_measured_is_found_again_for_this_device_only() -> None:
    learn(CPU, [Seen(100, 110, 1.0, 2.0)])
    learn(CPU, [Seen(100, 110, 1.0, 4.0)])
    known = calibration_for(CPU)
    assert (known.memory, known.seconds, known.count) == (pytest.approx(1.1), 3.0, 2)
    assert calibration_for(replace(CPU, name="another")) == Calibration()


def test_the_spread_counts_from_a_few_measurements_on() -> None:
    few, enough = (Calibration.of([Seen(100, 100 + each) for each in range(count)]) for count in (4, 9))
    assert few.spread is None
    assert enough.spread == pytest.approx((100 / 104, 108 / 104))


def test_times_are_learnt_where_bytes_are_exact_as_they_are() -> None:
    assert Calibration.of([Seen(0, 5, 1.0, 1.5)]) == Calibration(seconds=1.5, count=1)


def test_a_broken_file_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(CPU, [Seen(1, 1)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learn(CPU, [Seen(1, 1)])
    (file,) = tmp_path.glob("autofit/calibration/*.json")
    file.write_text("[{", encoding="utf-8")
    assert calibration_for(CPU).count == 0


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    learn(CPU, [Seen(1, 1)])
    assert calibration_for(CPU).count == 0
