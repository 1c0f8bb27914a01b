"""What each knob buys at the best config: the best that is left when it alone is changed, measured or predicted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autofit.core.pareto import Alternative
from autofit.core.result import Result
from autofit.report.formatting import OUTCOMES, gib, listed, more_or_less, peak_bytes, source, speed, value
from autofit.report.rows import latest_by_config, relative_speed

_WORTH_A_WORD = 0.01  # by how much a guess must be faster than a fact, or than the best, to be told beside it
_NOTHING = 0.005


@dataclass(frozen=True)
class _Change:
    """A single change, and the speed it leaves; 0 where none is known."""

    alternative: Alternative
    speed: float


def knob_lines(result: Result) -> list[str]:
    """A line for each knob, what buys the most first; what buys nothing in one line. None without a best."""
    if result.best is None:
        return []
    changes = [_Change(each, speed_left(each, result)) for each in result.alternatives]
    by_knob = itertools.groupby(changes, key=lambda each: each.alternative.knob)
    told = [_told(list(of_one)) for _, of_one in by_knob]
    told.sort(key=lambda each: max(change.speed if change.alternative.fits else 0.0 for change in each))
    idle = [each[0].alternative.knob for each in told if all(_buys_nothing(change, result) for change in each)]
    lines = [_line(each, result) for each in told if each[0].alternative.knob not in idle]
    return [*lines, *([f"nothing, as far as is known: {listed(idle)}"] if idle else [])]


def speed_left(alternative: Alternative, result: Result) -> float:
    """The speed against the best's; 0 where it does not fit."""
    assert result.best, "there is a best to compare with"
    if alternative.fits and alternative.measured:  # as the table has it
        return relative_speed(latest_by_config(result)[alternative.config], result)
    return (alternative.samples_per_second or 0.0) / result.best.throughput


def _told(changes: list[_Change]) -> list[_Change]:
    """Of one knob: the best that was measured; the best that is predicted where that is better; else the least miss.
    And the least of what would be faster than the best but does not fit."""
    fitting = sorted((each for each in changes if each.alternative.fits), key=lambda each: -each.speed)
    misses = sorted((each for each in changes if not each.alternative.fits), key=_peak)
    if not fitting:
        return misses[:1]
    measured = next((each for each in fitting if each.alternative.measured), fitting[0])
    told = [measured] if fitting[0].speed <= measured.speed + _WORTH_A_WORD else [measured, fitting[0]]
    return told + [each for each in misses if each.speed > 1 + _WORTH_A_WORD][:1]


def _peak(change: _Change) -> int:
    return change.alternative.peak_bytes or 2**63


def _buys_nothing(change: _Change, result: Result) -> bool:
    return abs(change.speed - 1) < _NOTHING and _memory(change.alternative, result) in ("", "the same memory")


def _line(changes: list[_Change], result: Result) -> str:
    assert result.best, "there is a best to compare with"
    first = changes[0].alternative
    instead = f"{first.knob} {value(first.value)} instead of {value(result.best.config[first.knob])}"
    rest = (f"; {value(each.alternative.value)}: {_figures(each, result)}" for each in changes[1:])
    return f"{instead}: {_figures(changes[0], result)}{''.join(rest)}"


def _figures(change: _Change, result: Result) -> str:
    each = change.alternative
    if each.fits:
        told = ", ".join(filter(None, (speed(change.speed), _memory(each, result))))
    elif each.peak_bytes is None:
        told = OUTCOMES[each.outcome]
    elif each.measured:
        told = f"does not fit, took {gib(each.peak_bytes)} GiB"
    else:
        faster = f"{speed(change.speed)}, but " if change.speed > 1 + _NOTHING else ""
        told = f"{faster}would need {gib(result.budget.bytes_for(each.peak_bytes, result.hardware.device))} GiB"
    return f"{told} {source(each.measured)}"


def _memory(alternative: Alternative, result: Result) -> str:
    here = peak_bytes(result.best) if result.best else None
    return more_or_less(alternative.peak_bytes, here) if here and alternative.peak_bytes else ""
