"""How many blocks to treat in one way, where that for all of them fits and that for none does not.

Such numbers are not listed and tried: bytes fall with each block, so the least number that fits is
found between two that are known.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.result import tier
from autofit.core.some_blocks import SomeBlocks
from autofit.tuning.narrowing import Row, Values

# By knob the value that saves memory, and those that the rest of the blocks may have.
LEVERS = {CHECKPOINTING.name: ("full", ("none", "selective"))}


@dataclass(frozen=True)
class _Question:
    """Of which blocks there is to be a number.

    Attributes:
        others: the config whose blocks are all treated in the same way.
        rest: how the others of a config's blocks are.
    """

    knob: str
    others: Config
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
    _known: dict[str, dict[_Question, dict[int, Row]]] = field(default_factory=dict)  # by tier

    def note(self, row: Row) -> None:
        """Keep what is known of a config."""
        if math.isnan(row.nbytes + row.seconds):
            return
        of_tier = self._known.setdefault(tier(row.config), {})
        for knob, (value, rests) in LEVERS.items():
            offered = self.knobs.get(knob, ())
            if value not in offered:
                continue
            others = row.config.replace(**{knob: value})
            for rest in rests:
                number = self._number(row.config[knob], value, rest)
                if number is not None and rest in offered:
                    question = _Question(knob, others, rest)
                    of_tier.setdefault(question, {})[number] = row

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
        questions = self._known.get(name, {}).items()
        found = [self._next(question, known, fits) for question, known in questions]
        refusals = self.constraints.refuse.values()
        return [row for row in found if row and not any(refuse(row.config) for refuse in refusals)]

    def _next(
        self, question: _Question, known: dict[int, Row], fits: Callable[[Row], bool]
    ) -> Row | None:
        """The least number that is expected to fit; None where it is known, or none fits."""
        too_large = [number for number, row in known.items() if not fits(row)]
        small_enough = [number for number, row in known.items() if fits(row)]
        if not too_large or not small_enough:
            return None

        below = max(too_large)
        above = min(small_enough)
        between = [
            self._between(question, known, below, above, number)
            for number in range(below + 1, above)
        ]
        if not between:
            return None
        at = bisect.bisect_left(between, True, key=fits)
        return between[min(at, len(between) - 1)]

    def _between(
        self, question: _Question, known: dict[int, Row], below: int, above: int, number: int
    ) -> Row:
        """What is expected of a number between two that are known."""
        value, _ = LEVERS[question.knob]
        some = SomeBlocks(value, number, question.rest)
        share = (number - below) / (above - below)
        before = known[below]
        after = known[above]
        return Row(
            question.others.replace(**{question.knob: str(some)}),
            before.nbytes + share * (after.nbytes - before.nbytes),
            before.seconds + share * (after.seconds - before.seconds),
        )


def is_partly_on(config: Config, knob: str) -> bool:
    """Whether a knob's value is for some of the blocks."""
    return knob in LEVERS and SomeBlocks.of(config[knob]) is not None
