"""How fast bytes go to a card and back: measured, and then known."""

import itertools
from pathlib import Path

import pytest

from autofit.hardware import host_link


def test_it_is_the_shortest_copy_of_each_direction() -> None:
    now = itertools.accumulate(
        [0.0, 0.5, 0.0, 0.2, *[0.0, 0.9] * 6, 0.0, 0.8, 0.0, 0.3, *[0.0, 0.9] * 6]
    )
    rate = host_link.measured("cpu", lambda: None, lambda: next(now))
    assert rate == pytest.approx(2 * 2**26 / (0.2 + 0.3))


def test_it_is_measured_once_for_each_card_and_not_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = RuntimeError("CUDA out of memory")
    answers = iter([full, 1e9, 2e9])

    def measured(*_: object) -> float:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(host_link, "measured", measured)
    assert [host_link.host_link(name) for name in ("one", "one", "another", "one")] == [
        None,
        1e9,
        2e9,
        1e9,
    ]
