"""A result in a few plain sentences: what won, what it gained, what it was up against."""

from __future__ import annotations

from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.formatting import (
    budget_needed,
    describe,
    gib,
    listed,
    may_be_missed,
    peak_gib,
    rate,
    speed,
    value,
    where,
)
from autofit.report.knob_effects import knob_lines
from autofit.report.nothing_fits import nothing_fits_lines, probe_counts
from autofit.report.other_budgets import other_budget_lines
from autofit.report.predicted import explain_predicted, predicted_notes
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
    best = result.best
    if result.predicted_best is not None:
        return explain_predicted(result, result.predicted_best)
    if best is None:
        return "\n".join(nothing_fits_lines(result))
    memory = f" at a peak of {peak_gib(best)} GiB" if peak_gib(best) else ""
    proof = "; longer runs verified it" if best.verified else "; it was not verified"
    winner = (
        f"The best config for {result.model} on {where(result.hardware, result.budget)} is {describe(best.config)}. "
        f"It trains {rate(best)}{memory}{proof}."
    )
    paragraphs = [
        _joined(winner, _gain(result, best), _runner_up(result, best)),
        _list("What each knob buys, if it alone is changed:", knob_lines(result)),
        _joined(how_it_ended(result), _nearest_miss(result)),
        _list("With other budgets:", other_budget_lines(result)),
        _joined(*result.notes),
    ]
    return "\n\n".join(filter(None, paragraphs))


def summary(result: Result) -> list[str]:
    """What the best gained, what it was up against, what just did not fit, and how the search ended."""
    best = result.best
    if result.stopped_by == "prediction":
        return predicted_notes(result)
    if best is None:
        return [_ended(result), *result.notes]
    sentences = (_gain(result, best), _runner_up(result, best), _nearest_miss(result), how_it_ended(result))
    return [sentence for sentence in (*sentences, *result.notes) if sentence]


def how_it_ended(result: Result) -> str:
    """What was measured, why the search ended, and what it may have missed."""
    return _joined(probe_counts(result), _ended(result), may_be_missed(result.bound) if result.best else "")


def _ended(result: Result) -> str:
    minutes, seconds = divmod(round(result.search_seconds), 60)
    duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return f"{_STOPPED_BY.get(result.stopped_by, 'The search ended')}, after {duration}."


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _list(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)]) if lines else ""


def _gain(result: Result, best: Measurement) -> str:
    """Against the first that fitted, which is what one would have run without a search."""
    first = next((trial for trial in result.trials if trial.fits), None)
    if first is None or first.config == best.config or not first.throughput:
        return "It was the first that fitted, and stayed the best." if first else ""
    ratio = 1 / relative_speed(first, result)
    # Its own figure shows only where it agrees with the ratio, which compares measurements of one and the same moment.
    figure = f" ({rate(first)})" if abs(first.throughput * ratio / best.throughput - 1) <= _NOTICED else ""
    if ratio < 1.005:
        tied = "" if ratio > 0.995 else ", which counts as a tie"
        how = tied if first.verified or ratio > 1 - _NOTICED else " for a moment, before it was measured longer"
        return f"The first config that fitted was {speed(1 / ratio)}{figure}{how}."
    return f"It is {ratio:.2f} times as fast as the first config that fitted{figure}."


def _runner_up(result: Result, best: Measurement) -> str:
    second = result.runner_up
    if second is None:
        return ""
    differing = [
        f"{name} ({value(mine)} instead of {value(other)})"
        for name, (mine, other) in best.config.differences(second.config).items()
        if name != "gradient_accumulation_steps"
    ]
    ratio = relative_speed(second, result)
    how = speed(ratio) + (", which counts as a tie" if ratio > 1 else "")
    return f"The runner-up is {how}; against it the best differs in {listed(differing)}." if differing else ""


def _nearest_miss(result: Result) -> str:
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    needed = budget_needed(miss, result.hardware, result.budget) if miss else None
    if miss is None or needed is None or needed <= result.budget.device_bytes:
        return ""
    return f"The nearest miss needs a budget of at least {gib(needed)} GiB: {describe(miss.config)}."
