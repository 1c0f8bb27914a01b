"""A result in a few plain sentences: what won, what it gained, what it was up against."""

from __future__ import annotations

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.foretold import explained, foretold_of
from autofit.report.formatting import (
    budget_needed,
    describe,
    gib,
    listed,
    may_be_missed,
    peak_bytes,
    rate,
    speed,
    value,
    where,
)
from autofit.report.knob_effects import knob_lines
from autofit.report.nothing_fits import nothing_fits_lines, tried
from autofit.report.other_budgets import other_budget_lines
from autofit.report.rows import nearest_misses, relative_speed

_NOTICED = 0.05  # of a change of the machine between exploring and verifying
_STOPPED_BY = {
    "trials": "The search stopped at its number of trials",
    "time": "The search stopped at its time limit",
    "bound": "The search stopped because nothing left is expected to be faster by more than the tolerance",
    "space": "The search went through the whole space",
    "interrupt": "The search was interrupted",
}


def explain(result: Result) -> str:
    """Why the best config is the best, what each knob buys, what ruled out the rest, and what other budgets would run;
    what would help where nothing fits."""
    if result.predicted_best is not None:
        return explained(result, result.predicted_best)
    if result.best is None:
        return "\n".join(nothing_fits_lines(result))
    paragraphs = [
        _sentences(_winner(result, result.best), _gain(result, result.best), _runner_up(result, result.best)),
        _list("What each knob buys, if it alone is changed:", knob_lines(result)),
        _sentences(tried(result), ended(result), may_be_missed(result.bound), _nearest_miss(result)),
        _list("With other budgets:", other_budget_lines(result)),
        _sentences(*result.notes),
    ]
    return "\n\n".join(each for each in paragraphs if each)


def summary(result: Result) -> list[str]:
    """What the best gained, what it was up against, what just did not fit, and how the search ended."""
    if result.stopped_by == "prediction":
        return foretold_of(result)
    if result.best is None:
        return [ended(result), *result.notes]
    best = (_gain(result, result.best), _runner_up(result, result.best), _nearest_miss(result))
    rest = (tried(result), ended(result), may_be_missed(result.bound), *result.notes)
    return [sentence for sentence in (*best, *rest) if sentence]


def _sentences(*each: str) -> str:
    return " ".join(filter(None, each))


def _list(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)]) if lines else ""


def ended(result: Result) -> str:
    """Why the search ended, and after how long."""
    return f"{_STOPPED_BY.get(result.stopped_by, 'The search ended')}, after {_duration(result.search_seconds)}."


def _winner(result: Result, best: Measurement) -> str:
    peak = peak_bytes(best)
    memory = f" at a peak of {gib(peak)} GiB" if peak else ""
    proof = "; longer runs verified it" if best.verified else "; it was not verified"
    config = describe(best.config)
    return f"The best config for {result.model} on {where(result.hardware, result.budget)} is {config}. " + (
        f"It trains {rate(best)}{memory}{proof}."
    )


def _gain(result: Result, best: Measurement) -> str:
    """Against the first that fitted, which is what one would have run without a search."""
    first = next((each for each in result.trials if each.fits), None)
    if first is None or first.config == best.config or not first.throughput:
        return "It was the first that fitted, and stayed the best." if first else ""
    ratio = 1 / relative_speed(first, result)
    # Of another moment than the best's, its figure would contradict the ratio, which is of one and the same moment.
    told = f" ({rate(first)})" if abs(first.throughput * ratio / best.throughput - 1) <= _NOTICED else ""
    if ratio < 1.005:
        tied = "" if ratio > 0.995 else ", which counts as a tie"
        how = tied if first.verified or ratio > 1 - _NOTICED else " for a moment, before it was measured longer"
        return f"The first config that fitted was {speed(1 / ratio)}{told}{how}."
    return f"It is {ratio:.2f} times as fast as the first config that fitted{told}."


def _runner_up(result: Result, best: Measurement) -> str:
    second = result.runner_up
    if second is None:
        return ""
    changes = [
        f"{name} ({value(mine)} instead of {value(theirs)})"
        for name, (mine, theirs) in best.config.differences(second.config).items()
        if name != "gradient_accumulation_steps"
    ]
    ratio = relative_speed(second, result)
    how = speed(ratio) + (", which counts as a tie" if ratio > 1 else "")
    return f"The runner-up is {how}; against it the best differs in {listed(changes)}." if changes else ""


def _nearest_miss(result: Result) -> str:
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    needed = budget_needed(miss, result.hardware, result.budget) if miss else None
    if miss is None or needed is None or needed <= result.budget.device_bytes:
        return ""
    return f"The nearest miss needs a budget of at least {gib(needed)} GiB: {describe(miss.config)}."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
