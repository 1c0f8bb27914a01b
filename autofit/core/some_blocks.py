"""A knob's value for some of a model's blocks, as a word: `full:12`, for twelve of them."""

import re
from dataclasses import dataclass
from typing import Self

_OFF = "none"


@dataclass(frozen=True)
class SomeBlocks:
    """A value for some blocks of a model, and another for all others.

    Which ones is the knob's to say.

    Attributes:
        value: of these.
        number: how many they are.
        rest: the value of the others: of `full:12+selective` selective, of `full:12` none.
    """

    value: str
    number: int
    rest: str = _OFF

    @classmethod
    def of(cls, value: object) -> Self | None:
        """What a knob's value says; None where it is one value for all blocks."""
        found = re.fullmatch(r"([a-z]+):(\d+)(?:\+([a-z]+))?", str(value))
        if found is None:
            return None
        first, number, rest = found.groups()
        return cls(first, int(number), rest or _OFF)

    def canonical(self, blocks: int) -> str:
        """The same in one word where all of so many blocks are alike; 0: their number is unknown."""
        if self.number == 0:
            return self.rest
        if self.number >= blocks > 0:
            return self.value
        return str(self)

    def __str__(self) -> str:
        rest = "" if self.rest == _OFF else f"+{self.rest}"
        return f"{self.value}:{self.number}{rest}"


def offloads(value: object) -> bool:
    """Whether a value of an offload has blocks of which something rests on the host."""
    return value not in (None, _OFF)


def offloaded_of(value: object, blocks: int) -> int:
    """Of how many of so many blocks a value of an offload keeps something on the host."""
    if not offloads(value):
        return 0
    some = SomeBlocks.of(value)
    return blocks if some is None else min(some.number, blocks)
