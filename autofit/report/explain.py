"""A result in a few plain sentences: what won and what it gained, or by how much nothing fits and what would help."""

import math
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from autofit.core.errors import NothingFitsError, pluralize, require
from autofit.core.hardware import GIB
from autofit.core.knobs import DERIVED
from autofit.core.measurement import Measurement, Outcome
from autofit.core.quoting import lines_of, printed
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report import formatting as fmt
from autofit.report.knob_effects import knob_lines
from autofit.report.next_steps import written
from autofit.report.other_budgets import least_that_fits, on_other_devices, other_budget_lines
from autofit.report.predicted import explain_predicted, predicted_notes, prediction_counts
from autofit.report.remedies import remedy_lines
from autofit.report.rows import nearest_misses, relative_speed

_NOTICED = 0.05  # of a change of the machine between exploring and verifying
_STOPPED_BY = {
    "trials": "The search stopped at its number of trials",
    "time": "The search stopped at its time limit",
    "bound": "The search stopped because nothing left is expected to be faster by more than the tolerance",
    "space": "The search went through the whole space",
    "interrupt": "The search was interrupted",
}


def explain(result: Result | str | Path) -> str:
    """Why the best config is the best, what each knob buys, what ruled out the rest, and what other
    budgets would run; what would help where nothing fits.

    Args:
        result: of a search, or the directory of one that has ended.

    Raises:
        InputError: no search has ended in that directory.
    """
    if isinstance(result, str | Path):
        result = Record.of_run(result).result

    rule = "explain takes the result of a search, or its directory"
    require(isinstance(result, Result), rule, result, "Give what autofit.search gave.")
    return "\n".join(map(printed, lines_of(_explained(result))))


def _explained(result: Result) -> str:
    best = result.best
    if result.predicted_best is not None:
        return explain_predicted(result, result.predicted_best)
    if best is None:
        return "\n".join(nothing_fits_lines(result))
    memory = f" at a peak of {fmt.peak_gib(best)} GiB" if fmt.peak_gib(best) else ""
    proof = "longer runs verified it" if best.verified else "it was not verified"
    proof = fmt.proof(best) if best.is_of_one_rank else proof
    place = fmt.where(result.hardware, result.budget)
    winner = f"The best config for {result.model} on {place} is {fmt.describe(best.config)}."
    figures = f"It trains {fmt.rate(best)}{memory}; {proof}."
    paragraphs = [
        _joined(winner, figures, _gain(result, best), _runner_up(result, best)),
        _list("What each knob buys, if it alone is changed:", knob_lines(result)),
        _joined(how_it_ended(result), _nearest_miss(result)),
        _list("With other budgets:", other_budget_lines(result)),
        on_other_devices(result),
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
    sentences = (
        _gain(result, best),
        _runner_up(result, best),
        _nearest_miss(result),
        how_it_ended(result),
    )
    return [sentence for sentence in (*sentences, *result.notes) if sentence]


def how_it_ended(result: Result) -> str:
    """What was measured, why the search ended, and what it may have missed."""
    missed = ""
    if result.best and result.bound is not None:
        faster = f"more than {fmt.percent(result.bound)} faster" if result.bound > 0 else "faster"
        missed = f"Nothing that was left is expected to be {faster} (at 95 %, by discounted speed)."
    return _joined(probe_counts(result), _ended(result), missed)


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
    figure = (
        f" ({fmt.rate(first)})"
        if abs(first.throughput * ratio / best.throughput - 1) <= _NOTICED
        else ""
    )
    if ratio < 1.005:
        tied = "" if ratio > 0.995 else ", which counts as a tie"
        how = (
            tied
            if first.verified or ratio > 1 - _NOTICED
            else " for a moment, before it was measured longer"
        )
        return f"The first config that fitted was {fmt.speed(1 / ratio)}{figure}{how}."
    return f"It is {ratio:.2f} times as fast as the first config that fitted{figure}."


def _runner_up(result: Result, best: Measurement) -> str:
    second = result.runner_up
    if second is None:
        return ""
    changed = best.config.differences(second.config)
    differing = [
        f"{name} ({fmt.value(mine)} instead of {fmt.value(its)})"
        for name, (mine, its) in changed.items()
        if name not in DERIVED
    ]
    ratio = relative_speed(second, result)
    how = fmt.speed(ratio) + (", which counts as a tie" if ratio > 1 else "")
    return (
        f"The runner-up is {how}; against it the best differs in {fmt.listed(differing)}."
        if differing
        else ""
    )


def _nearest_miss(result: Result) -> str:
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    needed = fmt.budget_needed(miss, result.hardware, result.budget) if miss else None
    if miss is None or needed is None or needed <= result.budget.device_bytes:
        return ""
    held = f" {miss.shortage.words}" if miss.shortage else ""
    return f"The nearest miss needs a budget of at least {fmt.gib(needed)} GiB: {fmt.describe(miss.config)}.{held}"


def nothing_fits(result: Result) -> NothingFitsError:
    """The error that says by how much the nearest config missed the budget."""
    budget = f"{result.budget.device_bytes / GIB:.2f} GiB"
    if result.stopped_by == "prediction":
        return NothingFitsError(
            f"no config of the space is predicted to fit {budget}.", "Allow more memory."
        )
    miss = result.nearest_miss
    if miss is None and _diverged(result):
        first, *looks = _divergence(result)
        return NothingFitsError(first, " ".join(looks))
    if miss is None or miss.peak_bytes is None:
        return NothingFitsError(
            f"no config of the space could be run in {budget}.", "See the run directory's probes/."
        )
    needs = f"the nearest needs {miss.peak_bytes.allocated / GIB:.2f} GiB"
    remedy = "Allow more memory, a wider space, or more trials."
    return NothingFitsError(f"no config that was tried fits {budget}: {needs}.", remedy)


def _diverged(result: Result) -> list[Measurement]:
    """The trials whose loss was not finite."""
    return [trial for trial in result.trials if trial.outcome is Outcome.DIVERGED]


def _divergence(result: Result) -> list[str]:
    """That the loss was not finite, in which config, and what to look at: a sentence each."""
    diverged = _diverged(result)
    first = diverged[0]
    reason = f" ({first.reason.rstrip('.')})" if first.reason else ""
    count = pluralize(len(diverged), "config")
    precisions = sorted({str(trial.config.precision) for trial in diverged})

    precision = "Precision: fp32 diverges, too, so it is not to blame."
    if "fp32" not in precisions:
        tried = " and ".join(precisions)
        precision = f"Precision: {tried} may overflow; see whether --set precision=fp32 does."
    return [
        f"The loss was not finite in {count}: first in {fmt.describe(first.config)}{reason}.",
        precision,
        "Learning rate: where the first step is finite and a later one is not, lower it.",
        "Data and loss: where the first step is not finite, look for divisions by zero, logarithms "
        "of zero, batches without a valid label, and numbers in the data that are not finite.",
    ]


def nothing_fits_view(result: Result) -> RenderableType:
    """What was tried, the nearest miss, what would help, and what was written, for a terminal."""
    lines, files = fmt.hanging(nothing_fits_lines(result)), written(result)
    return Group(lines, Text(), files) if files else lines


def nothing_fits_lines(result: Result) -> list[str]:
    """What was tried, the nearest miss, and what would help."""
    budget, predicted = result.budget.device_bytes, result.stopped_by == "prediction"
    how = "Nothing is predicted to fit" if predicted else "Nothing fits"
    lines = [
        f"{how}: {result.model} on {fmt.where(result.hardware, result.budget)}.",
        probe_counts(result),
    ]
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    if _diverged(result):
        first, *looks = _divergence(result)
        if miss is None:  # more memory helps nothing
            where = fmt.where(result.hardware, result.budget)
            head = f"Nothing trains: {result.model} on {where}."
            points = [fmt.POINT + look for look in looks]
            return [head, probe_counts(result), first, "What to look at:", *points]
        lines.append(first)

    needed = fmt.budget_needed(miss, result.hardware, result.budget) if miss else None
    if miss is not None:
        # Far above the budget a probe is stopped before its peak.
        above = needed if needed and needed > budget else None
        least_needed = (
            f"a budget of at least {fmt.gib(above)}" if above else f"more than {fmt.gib(budget)}"
        )
        lines.append(f"The nearest miss needs {least_needed} GiB: {fmt.describe(miss.config)}.")
        lines += [miss.shortage.words] if miss.shortage else []
    least = least_that_fits(result)
    if least is not None:
        size, point = least
        smallest = (
            f"The smallest budget in which anything is expected to fit is {fmt.gib(size)} GiB"
        )
        # the search ended before it
        how = smallest if size > budget else "Not measured, but expected to fit"
        lines.append(f"{how}: {fmt.describe(point.config)} {fmt.source(point.measured)}.")
    enough = least[0] if least else needed
    helps = _remedies(result, enough if enough and enough > budget else None)
    lines += ["What would help:", *(fmt.POINT + remedy for remedy in helps)] if helps else []
    others = other_budget_lines(result)
    lines += ["With other budgets:", *(fmt.POINT + line for line in others)] if others else []
    return [*lines, *(result.notes if predicted else ())]


def probe_counts(result: Result) -> str:
    """How many configs there were, how many were measured with what outcome, and why the others were not."""
    if result.stopped_by == "prediction":
        return prediction_counts(result)
    # a long search measures its leader again
    measured = {(trial.config, trial.outcome) for trial in result.trials}
    counts = {
        word: sum(each is outcome for _, each in measured) for outcome, word in fmt.OUTCOMES.items()
    }
    plural = {"fits": "fit"}
    outcomes = ", ".join(
        f"{count} {plural.get(word, word)}" for word, count in counts.items() if count
    )
    skipped = {
        "ruled out by what another one proved": result.skipped.get("dominated", 0),
        "ruled out by prediction": result.skipped.get("predicted", 0),
        "refused beforehand": result.skipped.get("refused", 0),
    }
    left = result.space_size - len(measured) - sum(skipped.values())
    hopeless = "not expected to be faster" if result.best else "not expected to fit"
    skipped[hopeless if result.stopped_by == "bound" else "not reached"] = max(0, left)
    others = "".join(f"; {count:,} {word}" for word, count in skipped.items() if count)
    were = "was" if len(measured) == 1 else "were"
    total = f"Of {pluralize(result.space_size, 'config')} {len(measured)} {were} measured"
    return f"{total}{f': {outcomes}' if outcomes else ''}{others}."


def _remedies(result: Result, enough: int | None) -> list[str]:
    """What to type instead; `enough` is a budget that should do. Hints where nothing could be predicted."""
    if result.remedies:
        return remedy_lines(result.remedies)
    remedies, on_cpu = [], result.hardware.device == "cpu"
    if enough:
        # A tenth of a GiB more than the peak, up to the next one; finer below 1 GiB, where a tenth is a lot.
        grain = 10 if enough >= GIB else 100
        remedies.append(
            f"{'--mem' if on_cpu else '--gpu-mem'} {math.ceil(enough / GIB * grain) / grain:g}"
        )
    length = result.workload.get("sequence_length")
    if length and length > 128:
        remedies.append(f"--seq-len {length // 2}, if the data allows shorter samples")

    def untried(knob: str, *values: object) -> bool:
        return bool(result.trials) and not any(
            trial.config.get(knob) in values for trial in result.trials
        )

    if untried("lora_rank", *range(1, 1025)):
        remedies.append("--space lora, which trains a few added weights only")
    if untried("activation_checkpointing", "full"):
        remedies.append("--set activation_checkpointing=full, which recomputes activations")
    if not on_cpu and untried("quantization", "int8", "nf4", "nf4-dq"):
        remedies.append("--space qlora, which holds the frozen weights in 4 bits, too")
    if not on_cpu and untried("optimizer_offload", "cpu") and untried("parameter_offload", "cpu"):
        remedies.append("--set optimizer_offload=cpu, which uses host memory")
        remedies.append(
            "--set parameter_offload=cpu, which does, too, with LoRA, optimizer_offload or optimizer_in_backward"
        )
    if not on_cpu and result.hardware.world == 1:
        remedies.append("--devices 2 or more, each of which holds a part of the weights")
    return remedies
