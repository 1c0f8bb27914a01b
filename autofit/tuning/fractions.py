"""How many blocks to treat in one way, where that for all of them fits and that for none does not.

Such numbers are not listed and tried: bytes fall with each block, so the least number that fits is
found between two that are known.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.hardware import Hardware
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.knobs.activation_offload import KNOB as ACTIVATIONS
from autofit.core.knobs.optimizer_offload import KNOB as OPTIMIZER
from autofit.core.knobs.parameter_offload import KNOB as PARAMETERS
from autofit.core.result import of_tier, tier
from autofit.core.some_blocks import SomeBlocks
from autofit.core.workload import Workload
from autofit.estimate.figures import SpacePredictor
from autofit.estimate.processes import Workers
from autofit.setup.streamed_blocks import LEAST_BLOCKS
from autofit.tuning.narrowing import BytesAndSeconds, Row, Values


@dataclass(frozen=True)
class _Lever:
    """What a knob can do to some of the blocks.

    Attributes:
        value: the one that saves memory.
        rests: those that the rest of the blocks may have.
        least: how many blocks there must be.
    """

    value: str
    rests: tuple[str, ...]
    least: int = 1


# By knob.
LEVERS = {
    CHECKPOINTING.name: _Lever("full", ("none", "selective")),
    PARAMETERS.name: _Lever("cpu", ("none",), LEAST_BLOCKS),
    ACTIVATIONS.name: _Lever("cpu", ("none",)),
    OPTIMIZER.name: _Lever("cpu", ("none",)),
}

# Of each tier so many configs are looked at that fit with some number of blocks alone, so many
# of them at the same time, and so many are kept.
_MOST = 200
_AT_ONCE = 6
_KEPT = 3
# Shares of the memory for which a number is found: what a config takes may be more than predicted.
_SHARES = (1.0, 0.93)


@dataclass(frozen=True)
class _Series:
    """Configs that differ in a number of blocks alone.

    Attributes:
        knob: the one whose value says the number.
        full: the config that has the saving value for all blocks.
        rest: the value that the other blocks have.
    """

    knob: str
    full: Config
    rest: str


@dataclass
class Fractions:
    """What is known of configs that differ in a number of blocks alone.

    Attributes:
        blocks: how many the model has.
        knobs: the values that each knob may take; there is something between those alone.
    """

    blocks: int
    knobs: Values
    constraints: Constraints
    _known: dict[str, dict[_Series, dict[int, Row]]] = field(default_factory=dict)  # by tier

    def note(self, row: Row) -> None:
        """Keep what is known of a config."""
        if math.isnan(row.nbytes + row.seconds):
            return

        known = self._known.setdefault(tier(row.config), {})
        for knob, lever in LEVERS.items():
            offered = self.knobs.get(knob, ())
            if lever.value not in offered:
                continue

            full = row.config.replace(**{knob: lever.value})
            for rest in lever.rests:
                number = self._number(row.config[knob], lever.value, rest)
                if number is not None and rest in offered:
                    series = _Series(knob, full, rest)
                    known.setdefault(series, {})[number] = row

    def _number(self, given: Value, value: str, rest: str) -> int | None:
        """How many blocks a knob's value has as `value`, if all others are as `rest`."""
        if given in (value, rest):
            return self.blocks if given == value else 0

        some = SomeBlocks.of(given)
        if some and (some.value, some.rest) == (value, rest):
            return some.number

        return None

    def expected(self, name: str, fits: Callable[[Row], bool]) -> list[Row]:
        """The least number of blocks with which each config of a tier is expected to fit, where it
        is not known yet: the configs that have it, and figures between those that are known."""
        all_series = self._known.get(name, {}).items()
        found = [self._next(series, known, fits) for series, known in all_series]
        refusals = self.constraints.refuse.values()

        return [row for row in found if row and not any(refuse(row.config) for refuse in refusals)]

    def solve(
        self,
        rows: Sequence[Row],
        predict: Callable[[Sequence[Config]], BytesAndSeconds],
        cap: float,
    ) -> list[Row]:
        """Of each tier the fastest configs that fit with a number of blocks, and are faster than
        all that are known.

        Args:
            rows: what is known.
            predict: bytes and seconds of some configs, NaN where unknown.
            cap: bytes that a config may take.
        """

        def fits(row: Row) -> bool:
            return row.nbytes <= cap

        best = _fastest(row for row in rows if fits(row))
        solved: dict[Config, Row] = {}
        asked = set[Config]()
        for row in rows:
            self.note(row)

        while True:
            better = [
                row
                for name, leader in best.items()
                for row in sorted(self.expected(name, fits), key=attrgetter("seconds"))[:_AT_ONCE]
                if row.seconds < leader.seconds and row.config not in asked
            ]
            if not better:
                break

            configs = [row.config for row in better]
            asked.update(configs)
            for row in map(Row, configs, *predict(configs)):
                self.note(row)
                if fits(row):
                    solved[row.config] = row

            best |= _fastest([*best.values(), *solved.values()])

        kept: list[Row] = []
        for name in best:
            fastest_first = sorted(of_tier(name, solved.values()), key=attrgetter("seconds"))
            kept += fastest_first[:_KEPT]

        return kept

    def _next(
        self,
        series: _Series,
        known: dict[int, Row],
        fits: Callable[[Row], bool],
    ) -> Row | None:
        """The least number that is expected to fit; None where it is known, or none fits."""
        too_large = [number for number, row in known.items() if not fits(row)]
        small_enough = [number for number, row in known.items() if fits(row)]
        if not too_large or not small_enough:
            return None

        below = max(too_large)
        above = min(small_enough)
        least = max(below + 1, LEVERS[series.knob].least)
        numbers = range(least, above)
        if not numbers:
            return None

        row_of = partial(self._between, series, known, below, above)
        at = bisect.bisect_left(numbers, True, key=lambda number: fits(row_of(number)))

        return row_of(numbers[min(at, len(numbers) - 1)])

    def _between(
        self,
        series: _Series,
        known: dict[int, Row],
        below: int,
        above: int,
        number: int,
    ) -> Row:
        """What is expected of a number between two that are known."""
        some = SomeBlocks(LEVERS[series.knob].value, number, series.rest)
        share = (number - below) / (above - below)
        before = known[below]
        after = known[above]

        return Row(
            series.full.replace(**{series.knob: str(some)}),
            before.nbytes + share * (after.nbytes - before.nbytes),
            before.seconds + share * (after.seconds - before.seconds),
        )


def is_partly_on(config: Config, knob: str) -> bool:
    """Whether a knob's value is for some of the blocks."""
    return knob in LEVERS and SomeBlocks.of(config[knob]) is not None


def values_between(knobs: Values, blocks: int) -> dict[str, tuple[Value, ...]]:
    """By knob every value for some of a model's blocks, between two of its values."""
    found: dict[str, tuple[Value, ...]] = {}
    for knob, lever in LEVERS.items():
        offered = knobs.get(knob, ())
        values = tuple(
            str(SomeBlocks(lever.value, number, rest))
            for rest in lever.rests
            if rest in offered and lever.value in offered
            for number in range(lever.least, blocks)
        )
        if values:
            found[knob] = values

    return found


def may_fit_between(rows: Sequence[Row], cap: float) -> list[Row]:
    """The rows that tell of which configs a number of blocks fits: the fastest of each tier that
    fits, and the two between which such a number is that may be faster."""
    best = _fastest(row for row in rows if row.nbytes <= cap)
    together: dict[tuple[str, Config], list[Row]] = {}
    for row in rows:
        leader = best.get(tier(row.config))
        if leader is None or math.isnan(row.nbytes + row.seconds):
            continue

        for knob, lever in LEVERS.items():
            given = row.config[knob]
            if given == lever.value and row.nbytes <= cap:
                together.setdefault((knob, row.config), []).append(row)
            elif given in lever.rests and row.nbytes > cap and row.seconds < leader.seconds:
                others = row.config.replace(**{knob: lever.value})
                together.setdefault((knob, others), []).append(row)

    by_tier: dict[str, list[list[Row]]] = {}
    for (knob, _), some in together.items():
        values = {row.config[knob] for row in some}
        if len(values) > 1 and LEVERS[knob].value in values:
            by_tier.setdefault(tier(some[0].config), []).append(some)

    found: dict[Row, None] = dict.fromkeys(best[name] for name in by_tier)
    for groups in by_tier.values():
        groups.sort(key=lambda some: min(row.seconds for row in some))
        found |= dict.fromkeys(row for some in groups[:_MOST] for row in some)

    return list(found)


def predict_between(
    workload: Workload,
    hardware: Hardware,
    knobs: Values,
    rows: Sequence[Row],
    cap: float,
    known: Sequence[Config],
    *,
    processes: int | None,
    **options: Any,
) -> list[Row]:
    """The rows of configs in which a number of blocks is treated in one way, of each tier a few.

    Args:
        knobs: the values of the space.
        rows: of `may_fit_between`.
        cap: bytes that a config may take.
        known: such configs that are wanted in any case.
        processes: as of Workers.
        options: as of SpacePredictor.
    """
    traits = workload.traits
    assert traits is not None, "the model was looked at"
    fractions = Fractions(
        traits.blocks,
        knobs,
        techniques.constraints(workload, hardware),
    )
    workers = Workers(processes)
    configs = [*(row.config for row in rows), *known]

    predict = SpacePredictor(
        workload,
        hardware,
        configs,
        workers=workers,
        **options,
    )
    try:
        found: dict[Config, Row] = {}
        if known:
            found = dict(
                zip(
                    known,
                    map(
                        Row,
                        known,
                        *predict(known),
                    ),
                    strict=True,
                )
            )

        for share in _SHARES:
            for row in fractions.solve(rows, predict, share * cap):
                found.setdefault(row.config, row)

        return list(found.values())
    finally:
        workers.close()


def _fastest(rows: Iterable[Row]) -> dict[str, Row]:
    """By tier the fastest of some rows."""
    found: dict[str, Row] = {}
    for row in rows:
        name = tier(row.config)
        if not math.isnan(row.seconds) and (name not in found or row.seconds < found[name].seconds):
            found[name] = row

    return found
