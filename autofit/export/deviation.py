"""Deviation: one knob that a tool runs differently from what was measured."""

from dataclasses import asdict, dataclass
from typing import Any

from autofit.core.config import Value


@dataclass(frozen=True)
class Deviation:
    """A knob, its measured value, and what the tool does instead, as half a sentence.

    `may_not_fit`: the tool may need more memory than was measured.
    """

    knob: str
    value: Value
    instead: str
    may_not_fit: bool = False

    def __str__(self) -> str:
        return f"{self.knob} {'null' if self.value is None else str(self.value).lower()}: {self.instead}."

    @property
    def message(self) -> str:
        """The sentence, and whether the config may no longer fit."""
        return f"{self} It may no longer fit." if self.may_not_fit else str(self)

    def to_dict(self) -> dict[str, Any]:
        """An element of `departures` in --json."""
        return asdict(self)
