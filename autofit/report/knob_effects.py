"""What each knob buys at the best config: what changing it alone leaves, measured or predicted."""

import itertools
from collections.abc import Sequence

from autofit.core.knobs import DERIVED
from autofit.core.measurement import Outcome
from autofit.core.pareto import Alternative
from autofit.core.result import Result
from autofit.report.formatting import (
    OUTCOMES,
    gib,
    listed,
    more_or_less,
    peak_bytes,
    peak_gib,
    source,
    speed,
    value,
)
from autofit.report.rows import latest_by_config, relative_speed

_WORTH_A_WORD = (
    0.01  # a prediction shows beside a measurement, or beside the best, where it is faster by more
)
_NOTHING = 0.005
_MOST_CHANGES = 4

# and the speed it leaves against the best's, 0 where that is unknown
Change = tuple[Alternative, float]


def knob_lines(result: Result) -> list[str]:
    """A line for each knob, what buys the most first; what buys nothing in one line. None without a best."""
    if result.best is None:
        return []
    shown = [_worth_showing(changes) for _, changes in changes_by_knob(result)]
    shown.sort(key=lambda changes: max(speed if change.fits else 0.0 for change, speed in changes))
    lines, idle = [], []
    for changes in shown:
        first = changes[0][0]
        same = (_memory(change, result) in ("", "the same memory") for change, _ in changes)
        if all(same) and all(abs(speed - 1) < _NOTHING for _, speed in changes):
            idle.append(first.knob)
        else:
            figures = [
                f"{value(change.value)}: {_figures(change, speed, result)}"
                for change, speed in changes[1:]
            ]
            mine = f"{first.knob} {value(first.value)} instead of {value(result.best.config.get(first.knob))}"
            lines.append("; ".join([f"{mine}: {_figures(*changes[0], result)}", *figures]))
    return [*lines, *([f"nothing, as far as is known: {listed(idle)}"] if idle else [])]


def changes_by_knob(result: Result) -> list[tuple[str, list[Change]]]:
    """The changes of each single knob."""
    by_knob = itertools.groupby(result.alternatives, key=lambda change: change.knob)
    return [
        (knob, [(change, _speed_left(change, result)) for change in changes])
        for knob, changes in by_knob
    ]


def single_changes(result: Result) -> tuple[str, ...]:
    """Measured configs that differ from the best in one knob, the fastest first, at most four. Each reads `knob value:
    speed and peak against the best`."""
    if result.best is None:
        return ()
    lines: list[tuple[float, str]] = []
    for other in latest_by_config(result).values():
        knobs = [
            name for name in other.config.differences(result.best.config) if name not in DERIVED
        ]
        if len(knobs) == 1 and other.outcome in (Outcome.FITS, Outcome.OUT_OF_MEMORY):
            ratio = relative_speed(other, result) if other.fits else 0.0
            peak = f", peak {peak_gib(other)} GiB" if peak_gib(other) else ""
            figures = f"{ratio:.2f} x the speed{peak}" if other.fits else "out of memory"
            lines.append((ratio, f"{knobs[0]} {value(other.config.get(knobs[0]))}: {figures}"))
    return tuple(line for _, line in sorted(lines, key=lambda pair: -pair[0])[:_MOST_CHANGES])


def _speed_left(change: Alternative, result: Result) -> float:
    assert result.best, "there is a best to compare with"
    seen = latest_by_config(result).get(change.config) if change.fits and change.measured else None
    if seen:  # as the table has it
        return relative_speed(seen, result)
    return (change.samples_per_second or 0.0) / result.best.throughput


def _worth_showing(changes: Sequence[Change]) -> list[Change]:
    """Of one knob: the best measured; the best predicted where that is better; else the least miss. And the least of
    what would be faster than the best but does not fit."""
    fitting = sorted((pair for pair in changes if pair[0].fits), key=lambda pair: -pair[1])
    misses = sorted(
        (pair for pair in changes if not pair[0].fits), key=lambda pair: pair[0].peak_bytes or 2**63
    )
    if not fitting:
        return misses[:1]
    measured = next((pair for pair in fitting if pair[0].measured), fitting[0])
    shown = [measured] if fitting[0][1] <= measured[1] + _WORTH_A_WORD else [measured, fitting[0]]
    return shown + [pair for pair in misses if pair[1] > 1 + _WORTH_A_WORD][:1]


def _figures(change: Alternative, ratio: float, result: Result) -> str:
    if change.fits:
        words = ", ".join(filter(None, (speed(ratio), _memory(change, result))))
    elif change.peak_bytes is None:
        words = OUTCOMES[change.outcome]
    elif change.measured:
        words = f"does not fit, took {gib(change.peak_bytes)} GiB"
    else:
        faster = f"{speed(ratio)}, but " if ratio > 1 + _NOTHING else ""
        words = f"{faster}would need {gib(result.budget.bytes_for(change.peak_bytes, result.hardware.device))} GiB"
    return f"{words} {source(change.measured)}"


def _memory(change: Alternative, result: Result) -> str:
    peak = peak_bytes(result.best) if result.best else None
    return more_or_less(change.peak_bytes, peak) if peak and change.peak_bytes else ""
