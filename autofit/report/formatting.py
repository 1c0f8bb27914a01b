"""How figures and configs read: one wording for tables, the live display, the page and sentences.

ASCII only.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import pluralize
from autofit.core.estimate import Estimate, Remedy, Resting
from autofit.core.events import PhaseProgressed
from autofit.core.hardware import GIB, Hardware
from autofit.core.knobs import DERIVED, KNOBS, is_off, knob_named, yaml_word
from autofit.core.layout import implied
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Point
from autofit.core.quoting import lines_of, one_line
from autofit.core.some_blocks import SomeBlocks

OUTCOMES = {outcome: outcome.value.replace("_", " ") for outcome in Outcome}
OUTCOMES[Outcome.HOST_OUT_OF_MEMORY] = "out of host memory"
FITS = {"yes": "fits", "maybe": "may fit", "no": "does not fit"}
TIER_TITLES = {
    "full": "all weights",
    "lora": "LoRA",
    "qlora": "QLoRA",
    "head": "the head alone",
}
_BOTTLENECKS = {
    "compute": "bound by arithmetic",
    "memory": "bound by the device's memory",
    "transfer": "bound by copies to and from the host",
}
_BETWEEN_DEVICES = "bound by what devices exchange"
POINT = "  - "  # how the point of a list begins
value = yaml_word
_PART_OF_ANOTHER = tuple(knob.name for knob in KNOBS.values() if knob.part_of)


def describe(config: Mapping[str, Any], knobs: Collection[str] | None = None) -> str:
    """A config in a few words: its knobs that are on, of those named or of all.

    Where none is on, all of them.
    """
    left_out = {*_PART_OF_ANOTHER, *implied(config)}
    on = []
    off = []
    for name, given in config.items():
        if name in left_out or (knobs is not None and name not in knobs):
            continue
        if is_off(given):
            off.append(_knob(config, name))
        else:
            on.append(_knob(config, name))

    return ", ".join(on or off)


def changes(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The knobs of a config that differ from another one, in a few words each, off values
    included."""
    others_implied = implied(other)
    left_out = set(DERIVED)
    for name in implied(config):
        if config.get(name) is None or name in others_implied:
            left_out.add(name)

    names: dict[str, None] = {}
    for name, mine in config.items():
        its = other.get(name)
        are_off = is_off(mine) and is_off(its)
        if name in left_out or mine == its or are_off:
            continue

        whole = knob_named(name).part_of
        names[whole or name] = None

    return [_knob(config, name) for name in names]


def instead(config: Config, best: Measurement | None, most: int = 4) -> str:
    """What a config has in place of the best's knobs.

    All of it where more than `most` differ, or without a best.
    """
    if best is None:
        return describe(config)
    differing = changes(config, best.config)
    if len(differing) > most:
        return describe(config)

    return ", ".join(differing)


def _knob(config: Mapping[str, Any], name: str) -> str:
    """A knob and its value, in the knob's own words."""
    knob = knob_named(name)
    given = config[name]
    short = knob.short
    if is_off(given):
        if knob.short_off:
            return knob.short_off
        short = ""

    if not short:
        return f"{name} {value(given)}"

    parts = {part: value(config.get(part)) for part in _PART_OF_ANOTHER}
    words = short.format(value=value(given), **parts)
    some = SomeBlocks.of(given)
    if some is not None and "{value}" not in short:
        words += f" ({pluralize(some.number, 'block')})"

    return words


def values(given: Any) -> str:
    """The values that a knob was set to."""
    if isinstance(given, list | tuple):
        return ",".join(map(value, given))
    return value(given)


def knobs_that_differ(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The knobs on which not all configs agree, in the order of the first that names them."""
    every = list(configs)
    names: dict[str, None] = {}
    for config in every:
        names |= dict.fromkeys(config)

    differing = []
    for name in names:
        found = {repr(config.get(name)) for config in every}
        if len(found) > 1:
            differing.append(name)

    return differing


def progress_line(event: PhaseProgressed) -> str:
    """How far a phase has come, when it will end, and the best so far."""
    line = f"{percent(event.share)} done"
    if event.seconds_left is not None:
        line += f", about {about(event.seconds_left)} left"
    if event.config is not None:
        line += f"; the best so far is predicted to train {rate(event)}: {describe(event.config)}"

    return line


def throughput(
    timed: Measurement | Estimate | Point | Remedy | PhaseProgressed,
) -> tuple[float, str]:
    """Units per second and the unit: tokens where they are counted, else samples.

    0 where nothing was timed.
    """
    if timed.tokens_per_second:
        return timed.tokens_per_second, "tokens"
    return timed.samples_per_second or 0.0, "samples"


def rate(timed: Measurement | Estimate | Point | Remedy | PhaseProgressed) -> str:
    """Throughput with its unit; empty where it is unknown."""
    figure, unit = throughput(timed)
    if not figure:
        return ""

    return f"{number(figure)} {unit}/s"


def interval(low: int, high: int) -> str:
    """Predicted GiB, from the low end to the high one."""
    if gib(low) == gib(high):
        return gib(low)
    return f"{gib(low)}-{gib(high)}"


def number(figure: float) -> str:
    """Three or more significant figures, thousands apart."""
    if figure >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def gib(size: int) -> str:
    """Bytes as GiB, without the unit; small sizes with enough figures to tell them apart."""
    figure = size / GIB
    if figure >= 0.1:
        return f"{figure:.2f}"
    if figure >= 0.001:
        return f"{figure:.3f}"

    rounded = float(f"{figure:.2g}")
    written = f"{rounded:.10f}"  # never 2e-05
    return written.rstrip("0").rstrip(".")


def peak_bytes(measurement: Measurement) -> int | None:
    """The peak that is held against the budget, where it was watched."""
    if measurement.peak_bytes is None:
        return None
    return measurement.peak_bytes.held_bytes


def peak_gib(measurement: Measurement) -> str:
    """That peak in GiB; empty where it was not watched."""
    peak = peak_bytes(measurement)
    if not peak:
        return ""

    return gib(peak)


def budget_needed(measurement: Measurement, hardware: Hardware, budget: Budget) -> int | None:
    """The budget in bytes under which the peak of a measurement would have fitted.

    None: the peak is unknown.
    """
    peak = peak_bytes(measurement)
    if peak is None:
        return None

    return budget.bytes_for(peak, hardware.device)


def why_not(measurement: Measurement, budget: Budget) -> str:
    """Why a config that did not fit did not, in a few words."""
    word = OUTCOMES[measurement.outcome]
    peak = peak_bytes(measurement) or 0
    is_out_of_memory = measurement.outcome is Outcome.OUT_OF_MEMORY
    if is_out_of_memory and peak > budget.device_bytes:
        return f"{word}: needs {gib(peak)} GiB of {gib(budget.device_bytes)}"

    reason = measurement.reason or ""
    lines = lines_of(reason.strip())
    if not lines:
        return word

    return f"{word}: {one_line(lines[-1])}"


def drift_note(share: float) -> str:
    """By how much the machine's own speed changed during a search."""
    changed = f"The machine's speed changed by {percent(share)} during the search"
    return f"{changed}; what is compared is corrected for it."


def misled_note(factor: float) -> str:
    """How far off the predicted speeds were."""
    off = f"{1 / factor:.1f} times shorter than"
    if factor > 1:
        off = f"{factor:.1f} times as long as"

    return (
        f"Steps take {off} predicted: predictions may mislead, so nothing is said of what was not "
        "measured."
    )


def close_call_note(count: int, tolerance: float) -> str | None:
    """That other configs are as good as the best; None where there are none."""
    if not count:
        return None

    others = pluralize(count, "other config")
    share = f"{tolerance * 100:.3g} %"
    return (
        f"Too close to call: {others} came within {share} of the best. Of all these it learns most "
        "faithfully, else needs the fewest packages, else the least memory."
    )


def little_seen_note(tiers: Mapping[str, int]) -> str | None:
    """Of which tiers too few configs were measured to name their best; None where of none.

    Args:
        tiers: how many were measured that fit, of each of those tiers.
    """
    if not tiers:
        return None

    counts = []
    for name, count in tiers.items():
        counts.append(f"{TIER_TITLES[name]} ({pluralize(count, 'good probe')})")
    return f"Little was seen of {listed(counts)}: the best of it may be much faster."


def packing_note(workload: Mapping[str, Any], answer: Measurement | Estimate | None) -> str | None:
    """How many tokens of the user's data count in a second, packed or padded.

    None where no data is known.
    """
    is_packed = workload.get("packing")
    if is_packed is None or answer is None:
        return None

    tokens = answer.tokens_per_second
    if not tokens:
        return None

    every = number(tokens)
    padded = number(tokens * (1 - workload["padding"]))
    if not is_packed:
        return f"Samples are padded: of {every} tokens a second {padded} count."

    if padded == every:
        padded = "as many"
    return f"Samples are packed: all {every} tokens a second count; padded, {padded} would."


def percent(fraction: float) -> str:
    """A fraction as whole percent, never rounded down to 0."""
    if fraction < 0.005:
        return "less than 1 %"

    whole = round(fraction * 100)
    return f"{max(1, whole)} %"


def speed(ratio: float) -> str:
    """A ratio of speeds in words."""
    if abs(ratio - 1) < 0.005:
        return "as fast"
    if ratio < 1:
        return f"{percent(1 - ratio)} slower"

    return f"{percent(ratio - 1)} faster"


def more_or_less(size: int, than: int) -> str:
    """One size of memory against another, in words."""
    if abs(size - than) < 0.005 * than:
        return "the same memory"
    how = "less" if size < than else "more"

    return f"{gib(abs(size - than))} GiB {how}"


def proof(best: Measurement | Estimate) -> str:
    """How the figures of the best came about."""
    if isinstance(best, Estimate):
        return "predicted, not measured"
    if best.is_of_one_rank and best.verified:
        return "rank 0 measured in longer runs, communication predicted"
    if best.is_of_one_rank:
        return "rank 0 alone measured"
    if best.verified:
        return "verified in longer runs"

    return "not verified"


def verified(measurement: Measurement) -> str:
    """Whether it was measured again, in a word or two; empty where it was not."""
    if not measurement.verified:
        return ""
    if measurement.is_of_one_rank:
        return "rank 0 measured again"

    return "verified"


def step(measurement: Measurement) -> str:
    """A sentence on how long a step takes; empty where none was timed."""
    took = measurement.step_seconds
    if not took:
        return ""

    sentence = f"A step takes {took.median:.3g} s ({took.low:.3g} to {took.high:.3g})"
    waited = measurement.communication_seconds
    if waited is not None:
        sentence += f"; {waited:.2g} s of it are predicted communication"

    return f"{sentence}."


def source(measured: bool) -> str:
    """Where a figure comes from."""
    if measured:
        return "(measured)"
    return "(predicted)"


def where(hardware: Hardware, budget: Budget) -> str:
    """The device and the budget."""
    place = f"{hardware.title} within {gib(budget.device_bytes)} GiB"
    if hardware.world > 1:
        place += " each"

    return place


def bound_by(bottleneck: str, config: Mapping[str, Any]) -> str:
    """What limits the speed of a config, in words."""
    if bottleneck == "transfer" and config.get("data_parallel") is not None:
        return _BETWEEN_DEVICES
    return _BOTTLENECKS[bottleneck]


def resting_words(resting: Resting) -> str:
    """What a device holds between steps, in a sentence or two."""
    sizes = {"weights": resting.weights}
    if resting.adapters:
        sizes["adapters"] = resting.adapters
    sizes["gradients"] = resting.gradients
    sizes["optimizer state"] = resting.optimizer

    held = [f"{name} {gib(size)}" for name, size in sizes.items()]
    sentences = [f"GiB between steps: {', '.join(held)}."]

    if resting.activations is not None:
        blocks = pluralize(resting.blocks, "block")
        size = gib(resting.activations)
        sentences.append(f"{blocks} of a micro-batch keep {size} each.")

    trained = pluralize(resting.trained, "parameter")
    if resting.parameters:
        every = pluralize(resting.parameters, "parameter")
        share = 100 * resting.trained / resting.parameters
        trained = f"{resting.trained:,} of {every} ({share:.3g} %)"
    sentences.append(f"Trained: {trained}.")

    return " ".join(sentences)


def clock(seconds: float) -> str:
    """A running time, as a clock shows it."""
    whole = int(seconds)
    minutes = whole // 60
    hours = minutes // 60

    shown = f"{whole % 60:02d}"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{shown}"
    return f"{minutes}:{shown}"


def about(seconds: float) -> str:
    """A guessed time: one or two figures."""
    if seconds >= 5400:
        return f"{_two_figures(seconds / 3600)} h"
    if seconds >= 90:
        return f"{_two_figures(seconds / 60)} min"

    rounded = round(seconds)
    if seconds > 20:
        rounded = round(seconds / 10) * 10
    return f"{max(1, rounded)} s"


def _two_figures(time: float) -> str:
    """A time without a fraction, but for a small one."""
    if time >= 10:
        return f"{time:.0f}"
    return f"{time:.2g}"


def listed(words: list[str]) -> str:
    """Words with commas and a last `and`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def points(title: str, lines: Iterable[str]) -> list[str]:
    """A title with the points of a list below it; nothing without any."""
    items = [POINT + line for line in lines]
    if not items:
        return []

    return [title, *items]


def table(*columns: Column | str) -> Table:
    """A table with a line below its head and no others."""
    return Table(*columns, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def hanging(lines: Iterable[str]) -> RenderableType:
    """Lines for a terminal, in which brackets are no markup.

    Lines that begin as points of a list hang from their dashes.
    """
    shown: list[RenderableType] = []
    for line in lines:
        text = Text(one_line(line.removeprefix(POINT)))
        if not line.startswith(POINT):
            shown.append(text)
            continue

        point = Table.grid(padding=(0, 1, 0, 0))
        point.add_row(Text(POINT.rstrip()), text)
        shown.append(point)

    return Group(*shown)
