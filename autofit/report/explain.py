"""A result in a few plain sentences: what won and what it gained, or by how much nothing fits and
what would help."""

import math
from collections import Counter
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
    "bound": (
        "The search stopped because nothing left is expected to be faster by more than the tolerance"
    ),
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

    place = fmt.where(result.hardware, result.budget)
    winner = f"The best config for {result.model} on {place} is {fmt.describe(best.config)}."

    trains = f"It trains {fmt.rate(best)}"
    if fmt.peak_gib(best):
        trains += f" at a peak of {fmt.peak_gib(best)} GiB"

    proof = "it was not verified"
    if best.is_of_one_rank:
        proof = fmt.proof(best)
    elif best.verified:
        proof = "longer runs verified it"

    knobs = fmt.points("What each knob buys, if it alone is changed:", knob_lines(result))
    paragraphs = [
        _joined(winner, f"{trains}; {proof}.", _gain(result, best), _runner_up(result, best)),
        "\n".join(knobs),
        _joined(how_it_ended(result), _nearest_miss(result)),
        "\n".join(fmt.points("With other budgets:", other_budget_lines(result))),
        on_other_devices(result),
        _joined(*result.notes),
    ]

    return "\n\n".join(filter(None, paragraphs))


def summary(result: Result) -> list[str]:
    """What the best gained, what it was up against, what just did not fit, and how the search
    ended."""
    best = result.best
    if result.stopped_by == "prediction":
        return predicted_notes(result)
    if best is None:
        return [_ended(result), *result.notes]

    sentences = [
        _gain(result, best),
        _runner_up(result, best),
        _nearest_miss(result),
        how_it_ended(result),
        *result.notes,
    ]

    return list(filter(None, sentences))


def how_it_ended(result: Result) -> str:
    """What was measured, why the search ended, and what it may have missed."""
    missed = ""
    if result.best and result.bound is not None:
        faster = "faster"
        if result.bound > 0:
            faster = f"more than {fmt.percent(result.bound)} faster"
        missed = f"Nothing that was left is expected to be {faster} (at 95 %, by discounted speed)."

    return _joined(probe_counts(result), _ended(result), missed)


def _ended(result: Result) -> str:
    """Why the search ended, and after how long."""
    minutes, seconds = divmod(round(result.search_seconds), 60)
    duration = f"{seconds} s"
    if minutes:
        duration = f"{minutes} min {seconds} s"

    why = _STOPPED_BY.get(result.stopped_by, "The search ended")
    return f"{why}, after {duration}."


def _joined(*sentences: str) -> str:
    """The sentences that are not empty, as one text."""
    return " ".join(filter(None, sentences))


def _gain(result: Result, best: Measurement) -> str:
    """Against the first that fitted, which is what one would have run without a search."""
    first = next((trial for trial in result.trials if trial.fits), None)
    if first is None:
        return ""
    if first.config == best.config or not first.throughput:
        return "It was the first that fitted, and stayed the best."

    ratio = 1 / relative_speed(first, result)
    # Its own figure shows only where it agrees with the ratio, which compares measurements of one
    # and the same moment.
    figure = ""
    if abs(first.throughput * ratio / best.throughput - 1) <= _NOTICED:
        figure = f" ({fmt.rate(first)})"

    if ratio >= 1.005:
        return f"It is {ratio:.2f} times as fast as the first config that fitted{figure}."

    how = ""
    if not first.verified and ratio <= 1 - _NOTICED:
        how = " for a moment, before it was measured longer"
    elif ratio <= 0.995:
        how = ", which counts as a tie"

    return f"The first config that fitted was {fmt.speed(1 / ratio)}{figure}{how}."


def _runner_up(result: Result, best: Measurement) -> str:
    """How fast the second was, and in what it differs."""
    second = result.runner_up
    if second is None:
        return ""

    differing = []
    for name, (mine, its) in best.config.differences(second.config).items():
        if name not in DERIVED:
            differing.append(f"{name} ({fmt.value(mine)} instead of {fmt.value(its)})")

    if not differing:
        return ""

    ratio = relative_speed(second, result)
    how = fmt.speed(ratio)
    if ratio > 1:
        how += ", which counts as a tie"

    return f"The runner-up is {how}; against it the best differs in {fmt.listed(differing)}."


def _miss_of(result: Result) -> Measurement | None:
    """The config that came nearest to fitting, of those that did not."""
    return result.nearest_miss or next(iter(nearest_misses(result.trials)), None)


def _budget_for(miss: Measurement | None, result: Result) -> int | None:
    """The least budget that a config needs, where it is above the one that was given.

    Far above the budget a probe is stopped before its peak: then None.
    """
    if miss is None:
        return None
    needed = fmt.budget_needed(miss, result.hardware, result.budget)
    if needed is None or needed <= result.budget.device_bytes:
        return None

    return needed


def _nearest_miss(result: Result) -> str:
    """What budget the config that came nearest to fitting needs."""
    miss = _miss_of(result)
    needed = _budget_for(miss, result)
    if miss is None or needed is None:
        return ""

    budget = f"a budget of at least {fmt.gib(needed)} GiB"
    sentence = f"The nearest miss needs {budget}: {fmt.describe(miss.config)}."
    if miss.shortage:
        sentence += f" {miss.shortage.words}"

    return sentence


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
    where = fmt.describe(first.config)
    if first.reason:
        where += f" ({first.reason.rstrip('.')})"
    count = pluralize(len(diverged), "config")

    precision = "Precision: fp32 diverges, too, so it is not to blame."
    precisions = sorted({str(trial.config.precision) for trial in diverged})
    if "fp32" not in precisions:
        tried = " and ".join(precisions)
        precision = f"Precision: {tried} may overflow; see whether --set precision=fp32 does."

    return [
        f"The loss was not finite in {count}: first in {where}.",
        precision,
        "Learning rate: where the first step is finite and a later one is not, lower it.",
        "Data and loss: where the first step is not finite, look for divisions by zero, logarithms "
        "of zero, batches without a valid label, and numbers in the data that are not finite.",
    ]


def nothing_fits_view(result: Result) -> RenderableType:
    """What was tried, the nearest miss, what would help, and what was written, for a terminal."""
    lines = fmt.hanging(nothing_fits_lines(result))
    files = written(result)
    if not files:
        return lines

    return Group(lines, Text(), files)


def nothing_fits_lines(result: Result) -> list[str]:
    """What was tried, the nearest miss, and what would help."""
    place = fmt.where(result.hardware, result.budget)
    miss = _miss_of(result)
    counts = probe_counts(result)
    divergence = []
    if _diverged(result):
        first, *looks = _divergence(result)
        divergence.append(first)
        if miss is None:  # more memory helps nothing
            head = f"Nothing trains: {result.model} on {place}."
            return [head, counts, first, *fmt.points("What to look at:", looks)]

    how = "Nothing fits"
    if result.stopped_by == "prediction":
        how = "Nothing is predicted to fit"
    lines = [
        f"{how}: {result.model} on {place}.",
        counts,
        *divergence,
    ]

    budget = result.budget.device_bytes
    enough = _budget_for(miss, result)
    if miss is not None:
        needs = f"more than {fmt.gib(budget)}"
        if enough:
            needs = f"a budget of at least {fmt.gib(enough)}"
        lines.append(f"The nearest miss needs {needs} GiB: {fmt.describe(miss.config)}.")
        if miss.shortage:
            lines.append(miss.shortage.words)

    least = least_that_fits(result)
    if least is not None:
        size, point = least
        what = "Not measured, but expected to fit"  # the search ended before it
        enough = None
        if size > budget:
            needed = f"{fmt.gib(size)} GiB"
            what = f"The smallest budget in which anything is expected to fit is {needed}"
            enough = size

        lines.append(f"{what}: {fmt.describe(point.config)} {fmt.source(point.measured)}.")

    lines += fmt.points("What would help:", _remedies(result, enough))
    lines += fmt.points("With other budgets:", other_budget_lines(result))
    if result.stopped_by == "prediction":
        lines += result.notes

    return lines


def probe_counts(result: Result) -> str:
    """How many configs there were, how many were measured with what outcome, and why the others
    were not."""
    if result.stopped_by == "prediction":
        return prediction_counts(result)

    # a long search measures its leader again
    measured = {(trial.config, trial.outcome) for trial in result.trials}
    counts = Counter(outcome for _, outcome in measured)
    outcomes = []
    for outcome, word in fmt.OUTCOMES.items():
        if outcome is Outcome.FITS:
            word = "fit"
        if counts[outcome]:
            outcomes.append(f"{counts[outcome]} {word}")

    skipped = {
        "ruled out by what another one proved": result.skipped.get("dominated", 0),
        "ruled out by prediction": result.skipped.get("predicted", 0),
        "refused beforehand": result.skipped.get("refused", 0),
    }
    left = result.space_size - len(measured) - sum(skipped.values())
    why_left = "not reached"
    if result.stopped_by == "bound":
        why_left = "not expected to fit"
        if result.best:
            why_left = "not expected to be faster"

    skipped[why_left] = max(0, left)

    were = "was" if len(measured) == 1 else "were"
    sentence = f"Of {pluralize(result.space_size, 'config')} {len(measured)} {were} measured"
    if outcomes:
        sentence += f": {', '.join(outcomes)}"
    for reason, count in skipped.items():
        if count:
            sentence += f"; {count:,} {reason}"

    return f"{sentence}."


def _remedies(result: Result, enough: int | None) -> list[str]:
    """What to type instead; hints where nothing could be predicted.

    Args:
        enough: a budget that should do, in bytes.
    """
    if result.remedies:
        return remedy_lines(result.remedies)

    is_on_cpu = result.hardware.device == "cpu"
    remedies = []
    if enough:
        # a tenth of a GiB more than the peak, up to the next one; finer below 1 GiB, where a tenth
        # is a lot
        grain = 10 if enough >= GIB else 100
        option = "--mem" if is_on_cpu else "--gpu-mem"
        remedies.append(f"{option} {math.ceil(enough / GIB * grain) / grain:g}")

    length = result.workload.get("sequence_length")
    if length and length > 128:
        remedies.append(f"--seq-len {length // 2}, if the data allows shorter samples")

    def untried(knob: str, *values: object) -> bool:
        tried = {trial.config.get(knob) for trial in result.trials}
        return bool(tried) and tried.isdisjoint(values)

    if untried("lora_rank", *range(1, 1025)):
        remedies.append("--space lora, which trains a few added weights only")
    if untried("activation_checkpointing", "full"):
        remedies.append("--set activation_checkpointing=full, which recomputes activations")
    if is_on_cpu:
        return remedies

    if untried("quantization", "int8", "nf4", "nf4-dq"):
        remedies.append("--space qlora, which holds the frozen weights in 4 bits, too")
    if untried("optimizer_offload", "cpu") and untried("parameter_offload", "cpu"):
        remedies.append("--set optimizer_offload=cpu, which uses host memory")
        remedies.append(
            "--set parameter_offload=cpu, which does, too, with LoRA, optimizer_offload or "
            "optimizer_in_backward"
        )

    if result.hardware.world == 1:
        remedies.append("--devices 2 or more, each of which holds a part of the weights")

    return remedies
