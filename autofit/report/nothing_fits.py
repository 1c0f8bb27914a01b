"""What to tell someone whose budget is too small: how far off the nearest miss was, and what would help."""

from __future__ import annotations

import math

from rich.text import Text

from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.standing import nearest_misses
from autofit.report.words import OUTCOMES, budget_needed, describe, gib, where


def nothing_fits_text(result: Result) -> Text:
    """What was tried, the nearest miss, and what would help. A Text, so that no bracket in it is taken for markup."""
    lines = [f"Nothing fits: {result.model} on {where(result.hardware, result.budget)}.", tried(result)]
    miss = result.nearest_miss or next(iter(nearest_misses(result.trials)), None)
    if miss is not None:
        lines.append(f"The nearest miss {_need(miss, result)}: {describe(miss.config)}.")
    helps = _what_helps(result, miss)
    if helps:
        lines += ["What would help:", *(f"  - {each}" for each in helps)]
    return Text("\n".join(lines))


def tried(result: Result) -> str:
    """How many configs there were, how many were measured with what outcome, and why the others were not."""
    counts = {word: sum(each.outcome is outcome for each in result.trials) for outcome, word in OUTCOMES.items()}
    words = {"fits": "fit"}  # of several
    measured = ", ".join(f"{count} {words.get(word, word)}" for word, count in counts.items() if count)
    skipped = {
        "ruled out by what another one proved": result.skipped.get("dominated", 0),
        "ruled out by prediction": result.skipped.get("predicted", 0),
        "refused beforehand": result.skipped.get("refused", 0),
    }
    others = "".join(f"; {count:,} {word}" for word, count in skipped.items() if count)
    outcomes = f": {measured}" if measured else ""
    return f"Of {result.space_size:,} configs {len(result.trials)} were measured{outcomes}{others}."


def _need(miss: Measurement, result: Result) -> str:
    needed = budget_needed(miss, result.hardware, result.budget)
    if needed is None or needed <= result.budget.device_bytes:
        return f"needs more than {gib(result.budget.device_bytes)} GiB"
    return f"needs a budget of {gib(needed)} GiB"


def _what_helps(result: Result, miss: Measurement | None) -> list[str]:
    helps = []
    cpu = result.hardware.device == "cpu"
    needed = budget_needed(miss, result.hardware, result.budget) if miss else None
    if needed and needed > result.budget.device_bytes:
        # A tenth of a GiB more than the peak, up to the next one; finer below 1 GiB, where a tenth is a lot.
        grain = 10 if needed >= GIB else 100
        helps.append(f"{'--mem' if cpu else '--gpu-mem'} {math.ceil(needed / GIB * grain) / grain:g}")
    length = result.workload.get("sequence_length")
    if length and length > 128:
        helps.append(f"--seq-len {length // 2}, if the data allows shorter samples")
    configs = [each.config for each in result.trials]
    if configs and not any(config.get("lora_rank") for config in configs):
        helps.append("--space lora, which trains a few added weights only")
    if configs and not any(config.get("activation_checkpointing") == "full" for config in configs):
        helps.append("--set activation_checkpointing=full, which recomputes activations")
    return helps
