"""The state of a search, built from its events."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from autofit.core.events import Event, PhaseStarted, ProbeFinished, ProbeStarted
from autofit.core.measurement import Measurement, Outcome
from autofit.report.progress import Progress

Measured = Callable[..., Measurement]


def after(events: Sequence[Event]) -> Progress:
    """A second passes before each."""
    progress = Progress(0.0)
    for second, event in enumerate(events, 1):
        progress.update(event, float(second))
    return progress


def test_a_whole_search(events: list[Event]) -> None:
    progress = after(events)
    assert progress.best and progress.best.throughput == 100
    assert progress.first and progress.first.throughput == 50
    assert progress.bests == [50, 50, 100]
    assert progress.counts == {Outcome.FITS: 2, Outcome.OUT_OF_MEMORY: 1}
    assert (progress.done, progress.verified) == (3, 1)
    numbers = [(one.measurement.number, one.again) for one in progress.latest]
    assert numbers == [
        (2, True),
        (2, False),
        (1, False),
        (0, 0),
    ]
    assert not progress.running
    assert progress.phase == ("writing the result", 13.0)


def test_a_probe_ends_the_phase_before_it(events: list[Event]) -> None:
    assert after([]).phase == ("loading PyTorch", 0.0)
    assert after(events[:4]).phase == ("predicting 23 configs", 4.0)
    progress = after(events[:5])
    assert progress.phase is None
    assert [since for _, since in progress.running.values()] == [5.0]


def test_a_probe_that_an_interrupt_cut_off_is_forgotten(events: list[Event]) -> None:
    assert not after([*events[:5], PhaseStarted("writing")]).running


def test_a_better_one_is_told_once(events: list[Event]) -> None:
    finished = [place for place, event in enumerate(events) if isinstance(event, ProbeFinished)]
    better = [after(events[:place]).is_new_best(events[place]) for place in finished]  # type: ignore[arg-type]
    assert better == [True, False, True, False]


@pytest.mark.parametrize(
    ("started", "ended", "done"),
    [([0, 1, 2], [2], 1), ([0, 1, 2], [2, 0], 2), ([0, 1, 2], [2, 0, 1], 3), ([5, 6], [6], 6), ([5], [5], 6)],
    ids=["the last first", "two", "all", "resumed", "resumed alone"],
)
def test_probes_side_by_side_and_those_of_before_a_resume_are_counted(
    measured: Measured, started: list[int], ended: list[int], done: int
) -> None:
    one = measured(50)
    starts = [ProbeStarted(number, one.config) for number in started]
    ends = [ProbeFinished(dataclasses.replace(one, number=number), one) for number in ended]
    progress = after([*starts, *ends])
    assert progress.done == done
    assert progress.side_by_side == len(started)


def test_the_curve_of_the_best_never_falls(events: list[Event], measured: Measured) -> None:
    slower = dataclasses.replace(measured(90, precision="bf16"), number=3)  # the leader, where the machine has drifted
    progress = after([*events[:10], ProbeStarted(3, slower.config), ProbeFinished(slower, slower)])
    assert progress.bests == [50, 50, 100, 100]
    assert progress.best == slower


def test_the_pace_is_known_after_two_probes(events: list[Event]) -> None:
    assert after(events[:6]).seconds_per_probe(10.0) is None
    assert after(events[:8]).seconds_per_probe(10.0) == 2.5  # since second 5, when the first began
