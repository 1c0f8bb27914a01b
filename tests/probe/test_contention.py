"""How much of the time something waited for a processor, by a file and a clock in the place of Linux's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.probe.contention import Contention


def told(file: Path, seconds: float) -> None:
    """As the kernel tells it; `full` is of cgroups alone."""
    line = f"avg10=0.00 avg60=0.00 avg300=0.00 total={int(seconds * 1e6)}\n"
    file.write_text(
        f"some {line}full {line.replace(str(int(seconds * 1e6)), '0')}", encoding="ascii"
    )


def clock(*times: float) -> Callable[[], float]:
    return iter(times).__next__


@pytest.mark.parametrize(("waited", "share"), [(0.0, 0.0), (1.0, 0.25), (9.0, 1.0)])
def test_it_is_what_was_waited_since_then(tmp_path: Path, waited: float, share: float) -> None:
    file = tmp_path / "cpu"
    told(file, 100.0)
    contention = Contention(file, clock(10.0, 14.0))
    told(file, 100.0 + waited)
    assert contention.share() == pytest.approx(share)


@pytest.mark.parametrize(("load", "share"), [(1.0, 0.0), (8.0, 0.75), (0.0, 0.0)])
def test_where_linux_does_not_say_the_load_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, share: float
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert Contention(tmp_path / "none", clock(0.0, 1.0)).share() == share
    (tmp_path / "empty").write_text("", encoding="ascii")
    assert Contention(tmp_path / "empty", clock(0.0, 1.0)).share() == share


def test_on_this_machine_it_is_a_share() -> None:
    assert 0.0 <= Contention().share() <= 1.0
