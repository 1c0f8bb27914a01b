"""Deviation: where a tool will not run a config as it was measured. What every exporter has to own up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofit.core.config import Value


@dataclass(frozen=True)
class Deviation:
    """One knob that a tool cannot be told as it was measured, and what the tool does instead, as half a sentence.

    `may_not_fit` is whether that may take more memory than was measured.
    """

    knob: str
    value: Value
    instead: str
    may_not_fit: bool = False

    def __str__(self) -> str:
        return f"{self.knob} {_told(self.value)}: {self.instead}."

    @property
    def told(self) -> str:
        """The same, and whether it may no longer fit."""
        return f"{self} It may no longer fit." if self.may_not_fit else str(self)

    def to_dict(self) -> dict[str, Any]:
        """An element of `departures` in --json."""
        return {"knob": self.knob, "value": self.value, "instead": self.instead, "may_not_fit": self.may_not_fit}


def _told(value: Value) -> str:
    return "null" if value is None else str(value).lower()
