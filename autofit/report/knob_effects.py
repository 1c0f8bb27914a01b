"""What each knob buys at the best config: what changing it alone leaves, measured or predicted."""

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
from autofit.report.rows import relative_speed

# A prediction shows beside a measurement, or beside the best, where it is faster by more.
_WORTH_A_WORD = 0.01
_NOTHING = 0.005
_MOST_CHANGES = 4

# with the speed that it leaves, as a share of the best's; 0 where that is unknown
Change = tuple[Alternative, float]


def knob_lines(result: Result) -> list[str]:
    """A line for each knob, what buys the most first; what buys nothing in one line.

    None without a best.
    """
    if result.best is None:
        return []

    rows = []
    for knob, changes in changes_by_knob(result):
        shown = _worth_showing(changes)
        most = max(ratio if change.fits else 0.0 for change, ratio in shown)
        rows.append((most, knob, shown))

    rows.sort(key=lambda row: row[0])

    lines = []
    idle = []
    for _, knob, shown in rows:
        if all(_changes_nothing(change, ratio, result) for change, ratio in shown):
            idle.append(knob)
            continue

        own = value(result.best.config.get(knob))
        words: list[str] = []
        for change, ratio in shown:
            setting = value(change.value)
            if not words:
                setting = f"{knob} {setting} instead of {own}"
            words.append(f"{setting}: {_figures(change, ratio, result)}")

        lines.append("; ".join(words))

    if idle:
        lines.append(f"nothing, as far as is known: {listed(idle)}")
    return lines


def changes_by_knob(result: Result) -> list[tuple[str, list[Change]]]:
    """The changes of each single knob."""
    by_knob: dict[str, list[Change]] = {}
    for alternative in result.alternatives:
        change = (alternative, _speed_left(alternative, result))
        by_knob.setdefault(alternative.knob, []).append(change)

    return list(by_knob.items())


def single_changes(result: Result) -> tuple[str, ...]:
    """Measured configs that differ from the best in one knob, the fastest first, at most four.

    Each reads `knob value: speed and peak against the best`.
    """
    if result.best is None:
        return ()

    lines = []
    for other in result.latest_by_config.values():
        if other.outcome not in (Outcome.FITS, Outcome.OUT_OF_MEMORY):
            continue
        differences = other.config.differences(result.best.config)
        knobs = [name for name in differences if name not in DERIVED]
        if len(knobs) != 1:
            continue

        ratio = 0.0
        figures = "out of memory"
        if other.fits:
            ratio = relative_speed(other, result)
            figures = f"{ratio:.2f} x the speed"
            if peak_gib(other):
                figures += f", peak {peak_gib(other)} GiB"

        (knob,) = knobs
        lines.append((ratio, f"{knob} {value(other.config.get(knob))}: {figures}"))

    lines.sort(key=lambda line: -line[0])
    return tuple(line for _, line in lines[:_MOST_CHANGES])


def _speed_left(change: Alternative, result: Result) -> float:
    """The speed with a change, as a share of the best's."""
    assert result.best, "there is a best to compare with"
    if change.fits and change.measured:
        measurement = result.latest_by_config.get(change.config)
        if measurement:  # as the table has it
            return relative_speed(measurement, result)

    return (change.samples_per_second or 0.0) / result.best.throughput


def _worth_showing(changes: Sequence[Change]) -> list[Change]:
    """Of one knob: the best measured; the best predicted where that is better; else the least miss.

    And the least of what would be faster than the best but does not fit.
    """
    fitting = [pair for pair in changes if pair[0].fits]
    fitting.sort(key=lambda pair: -pair[1])
    misses = [pair for pair in changes if not pair[0].fits]
    misses.sort(key=lambda pair: pair[0].peak_bytes or 2**63)
    if not fitting:
        return misses[:1]

    fastest = fitting[0]
    measured = next((pair for pair in fitting if pair[0].measured), fastest)
    shown = [measured]
    if fastest[1] > measured[1] + _WORTH_A_WORD:
        shown.append(fastest)

    for pair in misses:
        if pair[1] > 1 + _WORTH_A_WORD:
            return [*shown, pair]

    return shown


def _changes_nothing(change: Alternative, ratio: float, result: Result) -> bool:
    """Whether the speed stays, and the memory, as far as it is known."""
    return abs(ratio - 1) < _NOTHING and _memory(change, result) in ("", "the same memory")


def _figures(change: Alternative, ratio: float, result: Result) -> str:
    """The speed and the memory that a change leaves, or why it does not fit."""
    if change.fits:
        words = speed(ratio)
        memory = _memory(change, result)
        if memory:
            words += f", {memory}"
    elif change.peak_bytes is None:
        words = OUTCOMES[change.outcome]
    elif change.measured:
        words = f"does not fit, took {gib(change.peak_bytes)} GiB"
    else:
        words = budget_words(change.peak_bytes, result)
        if ratio > 1 + _NOTHING:
            words = f"{speed(ratio)}, but {words}"

    return f"{words} {source(change.measured)}"


def budget_words(peak: int, result: Result) -> str:
    """The budget under which a peak would have fitted."""
    budget = result.budget.bytes_for(peak, result.hardware.device)
    return f"would need {gib(budget)} GiB"


def _memory(change: Alternative, result: Result) -> str:
    """The memory of a change against the best's; empty where either is unknown."""
    peak = peak_bytes(result.best) if result.best else None
    if not peak or not change.peak_bytes:
        return ""

    return more_or_less(change.peak_bytes, peak)
