"""What to tell someone whose budget is too small: how far off the nearest miss was, and what would help."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from autofit.core.errors import NothingFitsError, counted
from autofit.core.hardware import GIB
from autofit.core.result import Result
from autofit.report.formatting import OUTCOMES, POINT, budget_needed, describe, gib, hanging, source, where
from autofit.report.next_steps import written
from autofit.report.other_budgets import least_that_fits, other_budget_lines
from autofit.report.predicted import prediction_counts
from autofit.report.rows import nearest_misses


def nothing_fits(result: Result) -> NothingFitsError:
    """The error that says by how much the nearest config missed the budget."""
    budget = f"{result.budget.device_bytes / GIB:.2f} GiB"
    if result.stopped_by == "prediction":
        return NothingFitsError(f"no config of the space is predicted to fit {budget}.", "Allow more memory.")
    miss = result.nearest_miss
    if miss is None or miss.peak_bytes is None:
        return NothingFitsError(f"no config of the space could be run in {budget}.", "See the run directory's probes/.")
    needs = f"the nearest needs {miss.peak_bytes.allocated / GIB:.2f} GiB"
    return NothingFitsError(
        f"no config that was tried fits {budget}: {needs}.", "Allow more memory, a wider space, or more trials."
    )


def nothing_fits_view(result: Result) -> RenderableType:
    """What was tried, the nearest miss, what would help, and what was written, for a terminal."""
    lines, files = hanging(nothing_fits_lines(result)), written(result)
    return Group(lines, Text(), files) if files else lines


def nothing_fits_lines(result: Result) -> list[str]:
    """What was tried, the nearest miss, and what would help."""
    budget, predicted = result.budget.device_bytes, result.stopped_by == "prediction"
    how = "Nothing is predicted to fit" if predicted else "Nothing fits"
    lines = [f"{how}: {result.model} on {where(result.hardware, result.budget)}.", probe_counts(result)]
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    needed = budget_needed(miss, result.hardware, result.budget) if miss else None
    if miss is not None:
        # Far above the budget a probe is stopped before its peak.
        least_needed = (
            f"a budget of at least {gib(needed)}" if needed and needed > budget else f"more than {gib(budget)}"
        )
        lines.append(f"The nearest miss needs {least_needed} GiB: {describe(miss.config)}.")
    least = least_that_fits(result)
    if least is not None:
        size, point = least
        above = f"The smallest budget in which anything is expected to fit is {gib(size)} GiB"
        how = above if size > budget else "Not measured, but expected to fit"  # the search ended before it
        lines.append(f"{how}: {describe(point.config)} {source(point.measured)}.")
    enough = least[0] if least else needed
    helps = _remedies(result, enough if enough and enough > budget else None)
    if helps:
        lines += ["What would help:", *(POINT + remedy for remedy in helps)]
    others = other_budget_lines(result)
    if others:
        lines += ["With other budgets:", *(POINT + line for line in others)]
    return [*lines, *(result.notes if predicted else ())]


def probe_counts(result: Result) -> str:
    """How many configs there were, how many were measured with what outcome, and why the others were not."""
    if result.stopped_by == "prediction":
        return prediction_counts(result)
    measured = {(trial.config, trial.outcome) for trial in result.trials}  # a long search measures its leader again
    counts = {word: sum(each is outcome for _, each in measured) for outcome, word in OUTCOMES.items()}
    plural = {"fits": "fit"}
    outcomes = ", ".join(f"{count} {plural.get(word, word)}" for word, count in counts.items() if count)
    skipped = {
        "ruled out by what another one proved": result.skipped.get("dominated", 0),
        "ruled out by prediction": result.skipped.get("predicted", 0),
        "refused beforehand": result.skipped.get("refused", 0),
    }
    left = result.space_size - len(measured) - sum(skipped.values())
    skipped["not expected to be faster" if result.stopped_by == "bound" else "not reached"] = max(0, left)
    others = "".join(f"; {count:,} {word}" for word, count in skipped.items() if count)
    were = "was" if len(measured) == 1 else "were"
    total = f"Of {counted(result.space_size, 'config')} {len(measured)} {were} measured"
    return f"{total}{f': {outcomes}' if outcomes else ''}{others}."


def _remedies(result: Result, enough: int | None) -> list[str]:
    """What to type instead; `enough` is a budget that should do."""
    remedies = []
    if enough:
        # A tenth of a GiB more than the peak, up to the next one; finer below 1 GiB, where a tenth is a lot.
        grain = 10 if enough >= GIB else 100
        option = "--mem" if result.hardware.device == "cpu" else "--gpu-mem"
        remedies.append(f"{option} {math.ceil(enough / GIB * grain) / grain:g}")
    length = result.workload.get("sequence_length")
    if length and length > 128:
        remedies.append(f"--seq-len {length // 2}, if the data allows shorter samples")
    configs = [trial.config for trial in result.trials]
    if configs and not any(config.get("lora_rank") for config in configs):
        remedies.append("--space lora, which trains a few added weights only")
    if configs and not any(config.get("activation_checkpointing") == "full" for config in configs):
        remedies.append("--set activation_checkpointing=full, which recomputes activations")
    return remedies
