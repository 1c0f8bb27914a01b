"""The first screen: how long training takes, and what to type."""

import dataclasses
from collections.abc import Callable

import pytest

from autofit.core.record import Record
from autofit.report.html.summary import hours, memory_bar

Records = Callable[..., Record]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(12, "12 seconds"), (90, "1.5 minutes"), (7200, "2 hours"), (172_800, "2 days"), (3.2e9, "37,037 days")],
)
def test_times_to_train(seconds: float, words: str) -> None:
    assert hours(seconds) == words


def test_the_bar_shows_what_may_be_used(record: Records) -> None:
    result = record().result
    assert result.best
    bar = memory_bar(result.best, result)
    assert bar
    assert (bar.used_percent, bar.usable_percent) == (75.0, 100.0)
    card = dataclasses.replace(result, hardware=dataclasses.replace(result.hardware, device="cuda"))
    bar = memory_bar(result.best, card)
    assert bar
    assert bar.usable_percent == pytest.approx(95.0)
    assert memory_bar(dataclasses.replace(result.best, peak_bytes=None), result) is None
