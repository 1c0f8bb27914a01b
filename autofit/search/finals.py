"""The finals of a search, kept in its journal: what exploring ended with, and every verified measurement.

So a search that was killed in its finals goes on with them, and one that had ended gives the same answer again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from optuna.study import Study

from autofit.core.errors import InputError
from autofit.core.measurement import Measurement
from autofit.core.plain import from_plain, to_plain

_Kind = TypeVar("_Kind")
_EXPLORED, _VERIFIED = "explored", "verified-"  # names of attributes of the study


@dataclass(frozen=True)
class Explored:
    """What exploring ended with."""

    measurements: int
    stopped_by: str
    bound: float | None
    expected: Mapping[str, float]  # the number of every finalist's measurement, as JSON has it: its expected seconds

    def posterior(self, measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
        """Each finalist's measurement, at the step time that was expected of it."""
        by_number = {str(each.number): each for each in measurements}
        return tuple(by_number[number].taking(seconds) for number, seconds in self.expected.items())

    def is_of(self, measurements: Sequence[Measurement]) -> bool:
        """Whether it was with these; a damaged journal may have lost some."""
        timed = {str(each.number) for each in measurements if each.fits and each.step_seconds}
        possible = all(0 < seconds < math.inf for seconds in self.expected.values())
        return self.measurements == len(measurements) and possible and self.expected.keys() <= timed


@dataclass(frozen=True)
class _Before:
    """How far the search that was asked for this came."""

    asked: Mapping[str, Any]
    explored: Explored
    finished: bool = False


@dataclass(frozen=True)
class _Verified:
    """A verified measurement."""

    quick: int | None  # of the search: a quick one verifies by shorter runs
    measurement: Measurement


class Finals:
    """The finals of a study that was asked for something (plain data): other limits explore on, and end otherwise.

    Attributes:
        verified: the measurements that earlier processes made in such finals, in their order.
        explored: what exploring ended with; None while it goes on.
        finished: whether the finals had ended, too.
    """

    def __init__(self, study: Study, asked: Mapping[str, Any], measurements: Sequence[Measurement]) -> None:
        self._study = study
        self._asked = dict(asked)

        attributes = study.user_attrs
        kept = [attributes[name] for name in sorted(attributes) if name.startswith(_VERIFIED)]
        self._count = len(kept)
        found = [_read(_Verified, each) for each in kept]
        self.verified = [each.measurement for each in found if each and each.quick == self._asked["quick"]]

        before = _read(_Before, attributes.get(_EXPLORED))
        if before and (before.asked != self._asked or not before.explored.is_of(measurements)):
            before = None
        self.explored = before.explored if before else None
        self.finished = before is not None and before.finished

    def begin(self, explored: Explored) -> None:
        """Exploring has ended, and not by an interrupt."""
        self.explored = explored
        self._write(_Before(self._asked, explored))

    def add(self, measurement: Measurement) -> None:
        """Keep a verified measurement: it is on the disk when this returns."""
        kept = _Verified(self._asked["quick"], measurement)
        self._study.set_user_attr(f"{_VERIFIED}{self._count:06d}", to_plain(kept))
        self._count += 1

    def finish(self) -> None:
        """The finals have ended, and not by an interrupt."""
        if self.explored and not self.finished:
            self._write(_Before(self._asked, self.explored, finished=True))
            self.finished = True

    def _write(self, before: _Before) -> None:
        self._study.set_user_attr(_EXPLORED, to_plain(before))


def restore(study: Study, records: Iterable[Mapping[str, Any]]) -> None:
    """Give a study the finals that records of its damaged journal hold."""
    for record in records:
        attributes = record.get("user_attr")
        for name, value in attributes.items() if isinstance(attributes, Mapping) else ():
            if name == _EXPLORED or name.startswith(_VERIFIED):
                study.set_user_attr(name, value)


def _read(kind: type[_Kind], value: Any) -> _Kind | None:
    """None for what cannot be read: it is measured again."""
    try:
        read: _Kind = from_plain(kind, value)
        return read
    except (AttributeError, InputError, KeyError, TypeError, ValueError):
        return None
