"""What to tell someone whose budget is too small: how far off the nearest miss was, and what would help."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.text import Text

from autofit.core.errors import NothingFitsError, counted
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.pareto import Point
from autofit.core.result import Result
from autofit.report.foretold import predicted_of
from autofit.report.formatting import OUTCOMES, budget_needed, describe, gib, source, where
from autofit.report.hanging import POINT, hanging
from autofit.report.next_steps import written
from autofit.report.other_budgets import least_that_fits, other_budget_lines
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
    told, files = hanging(nothing_fits_lines(result)), written(result)
    return Group(told, Text(), files) if files else told


def nothing_fits_lines(result: Result) -> list[str]:
    """What was tried, the nearest miss, and what would help."""
    how = "Nothing is predicted to fit" if result.stopped_by == "prediction" else "Nothing fits"
    lines = [f"{how}: {result.model} on {where(result.hardware, result.budget)}.", tried(result)]
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    least = least_that_fits(result)
    if miss is not None:
        lines.append(f"The nearest miss {_need(miss, result)}: {describe(miss.config)}.")
    if least is not None:
        lines.append(_smallest(least, result))
    helps = _what_helps(result, _enough(result, miss, least))
    if helps:
        lines += ["What would help:", *(POINT + each for each in helps)]
    others = other_budget_lines(result)
    if others:
        lines += ["With other budgets:", *(POINT + each for each in others)]
    return [*lines, *(result.notes if result.stopped_by == "prediction" else ())]


def _smallest(least: tuple[int, Point], result: Result) -> str:
    size, point = least
    config = f"{describe(point.config)} {source(point.measured)}"
    if size <= result.budget.device_bytes:  # the search ended before it came to that
        return f"Not measured, but expected to fit: {config}."
    return f"The smallest budget in which anything is expected to fit is {gib(size)} GiB: {config}."


def tried(result: Result) -> str:
    """How many configs there were, how many were measured with what outcome, and why the others were not."""
    if result.stopped_by == "prediction":
        return predicted_of(result)
    seen = {(each.config, each.outcome) for each in result.trials}  # a long search measures its leader again
    counts = {word: sum(each is outcome for _, each in seen) for outcome, word in OUTCOMES.items()}
    words = {"fits": "fit"}  # of several
    measured = ", ".join(f"{count} {words.get(word, word)}" for word, count in counts.items() if count)
    skipped = {
        "ruled out by what another one proved": result.skipped.get("dominated", 0),
        "ruled out by prediction": result.skipped.get("predicted", 0),
        "refused beforehand": result.skipped.get("refused", 0),
    }
    left = result.space_size - len(seen) - sum(skipped.values())
    skipped["not expected to be faster" if result.stopped_by == "bound" else "not reached"] = max(0, left)
    others = "".join(f"; {count:,} {word}" for word, count in skipped.items() if count)
    outcomes = f": {measured}" if measured else ""
    were = "was" if len(seen) == 1 else "were"
    return f"Of {counted(result.space_size, 'config')} {len(seen)} {were} measured{outcomes}{others}."


def _need(miss: Measurement, result: Result) -> str:
    needed = budget_needed(miss, result.hardware, result.budget)
    if needed is None or needed <= result.budget.device_bytes:
        return f"needs more than {gib(result.budget.device_bytes)} GiB"
    return f"needs a budget of at least {gib(needed)} GiB"  # far above the budget a probe is stopped before its peak


def _enough(result: Result, miss: Measurement | None, least: tuple[int, Point] | None) -> int | None:
    """The budget that should be enough: what is expected to be, or that of the nearest miss."""
    needed = budget_needed(miss, result.hardware, result.budget) if miss else None
    enough = least[0] if least else needed
    return enough if enough and enough > result.budget.device_bytes else None


def _what_helps(result: Result, enough: int | None) -> list[str]:
    helps = []
    cpu = result.hardware.device == "cpu"
    if enough:
        # A tenth of a GiB more than the peak, up to the next one; finer below 1 GiB, where a tenth is a lot.
        grain = 10 if enough >= GIB else 100
        helps.append(f"{'--mem' if cpu else '--gpu-mem'} {math.ceil(enough / GIB * grain) / grain:g}")
    length = result.workload.get("sequence_length")
    if length and length > 128:
        helps.append(f"--seq-len {length // 2}, if the data allows shorter samples")
    configs = [each.config for each in result.trials]
    if configs and not any(config.get("lora_rank") for config in configs):
        helps.append("--space lora, which trains a few added weights only")
    if configs and not any(config.get("activation_checkpointing") == "full" for config in configs):
        helps.append("--set activation_checkpointing=full, which recomputes activations")
    return helps
