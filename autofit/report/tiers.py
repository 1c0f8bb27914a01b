"""The best of each tier side by side: how fast, in how much memory, what it learns with, and what
speed it costs or gains against the most faithful."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from autofit.core.config import Config
from autofit.core.errors import pluralize
from autofit.core.estimate import Estimate
from autofit.core.faithfulness import cost_in_faithfulness
from autofit.core.knobs.precision import BF16_WEIGHTS, COMPUTES_IN_FP32
from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report import formatting as fmt
from autofit.report.rows import relative_speed

_FROZEN_BITS = {"int8": 8, "nf4": 4, "nf4-dq": 4}


@dataclass(frozen=True)
class TierRow:
    """The best of a tier in words."""

    title: str
    answer: Measurement | Estimate
    memory: str
    learns_with: str
    against: str


def tier_rows(result: Result) -> list[TierRow]:
    """A row for each tier that has a best, in the order of the tiers; none where only one has."""
    by_tier: Mapping[str, Measurement | Estimate | None] = result.predicted_tiers
    if result.best:
        by_tier = result.tiers
    bests = {name: answer for name, answer in by_tier.items() if answer}
    if len(bests) < 2:
        return []

    faithful = min(bests.values(), key=lambda answer: cost_in_faithfulness(answer.config))
    rows = []
    for name, answer in bests.items():
        if isinstance(answer, Estimate):
            memory = fmt.interval(answer.low, answer.high)
            trained = None
            if answer.resting:
                trained = answer.resting.trained
        else:
            memory = fmt.peak_gib(answer)
            trained = result.trained.get(name)

        words = learns_with(answer.config, trained)
        against = "the most faithful"
        if answer is not faithful:
            against = _against(answer, faithful, result)
        rows.append(TierRow(fmt.TIER_TITLES[name], answer, memory, words, against))

    return rows


def _against(
    answer: Measurement | Estimate,
    faithful: Measurement | Estimate,
    result: Result,
) -> str:
    if isinstance(answer, Measurement) and isinstance(faithful, Measurement):
        return fmt.speed(relative_speed(answer, result) / relative_speed(faithful, result))

    speed, _ = fmt.throughput(answer)
    reference, _ = fmt.throughput(faithful)
    if not speed or not reference:
        return ""

    return fmt.speed(speed / reference)


def learns_with(config: Config, trained: int | None) -> str:
    """The weights that a config trains, and those that it freezes, with their bits.

    Args:
        trained: how many parameters it trains; None where that is unknown.
    """
    bits = 32
    if config.precision in BF16_WEIGHTS and config.optimizer != "adamw-master":
        bits = 16
    if config.head_only:
        what = "the head"
    elif config.lora_rank:
        what = f"rank {config.lora_rank}"
    else:
        what = "all weights"

    if trained is not None:
        what = f"{what}, {pluralize(trained, 'parameter')}"
    if what.startswith("all") or config.head_only:
        return f"{what} in {bits} bits"

    frozen = 32 if config.precision in COMPUTES_IN_FP32 else 16
    frozen = _FROZEN_BITS.get(config.quantization, frozen)
    return f"{what} in {bits} bits, beside {frozen}-bit weights"


def tiers_table(result: Result) -> RenderableType | None:
    """The tiers for a terminal; None where there are no two to compare."""
    rows = tier_rows(result)
    if not rows:
        return None

    _, unit = fmt.throughput(rows[0].answer)
    table = fmt.table(
        Column("trained", overflow="fold"),
        Column(f"{unit}/s", justify="right", overflow="fold"),
        Column("GiB", justify="right", overflow="fold"),
        Column("learns with", overflow="fold"),
        Column("speed", overflow="fold"),
    )
    for row in rows:
        figure, _ = fmt.throughput(row.answer)
        is_best = row.answer.config == result.config
        cells = (row.title, fmt.number(figure), row.memory, row.learns_with, row.against)
        table.add_row(*map(Text, cells), style="bold" if is_best else "")

    return table
