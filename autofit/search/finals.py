"""The finals of a search, kept in its journal: what exploring ended with, and every verified
measurement.

So a search that was killed in its finals goes on with them, and one that had ended gives the same
answer again.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from optuna.study import Study

from autofit.core.measurement import Measurement
from autofit.core.plain import UNREADABLE, from_plain, to_plain
from autofit.search.ranking import Measurements

_Kind = TypeVar("_Kind")
# Names of attributes of the study.
_EXPLORED = "explored"
_VERIFIED = "verified-"


@dataclass(frozen=True)
class Explored:
    """What exploring ended with.

    Attributes:
        measurements: how many there were.
        stopped_by: as of `SearchOutcome`.
        bound: likewise.
        expected: seconds of a step of every finalist, by the number of its measurement, which JSON
            has as text.
    """

    measurements: int
    stopped_by: str
    bound: float | None
    expected: Mapping[str, float]

    def posterior(self, measurements: Measurements) -> tuple[Measurement, ...]:
        """Each finalist's measurement, at the step time that was expected of it."""
        by_number = {str(measurement.number): measurement for measurement in measurements}
        finalists = map(by_number.__getitem__, self.expected)
        return tuple(map(Measurement.taking, finalists, self.expected.values()))

    def is_of(self, measurements: Measurements) -> bool:
        """Whether it was with these; a damaged journal may have lost some."""
        if self.measurements != len(measurements):
            return False
        if not all(0 < seconds < math.inf for seconds in self.expected.values()):
            return False

        timed = {str(seen.number) for seen in measurements if seen.fits and seen.step_seconds}
        return self.expected.keys() <= timed


@dataclass(frozen=True)
class _Before:
    """How far an earlier search came.

    Attributes:
        asked: what that search was asked for.
        finished: whether its finals ended, too.
    """

    asked: Mapping[str, Any]
    explored: Explored
    finished: bool = False


@dataclass(frozen=True)
class _Verified:
    """A verified measurement.

    Attributes:
        quick: of the search (`Limits.quick`): a quick one verifies by shorter runs.
    """

    quick: int | None
    measurement: Measurement


class Finals:
    """The finals of a study that was asked for something (plain data): other limits explore on, and
    end otherwise.

    Attributes:
        verified: the measurements that earlier processes made in such finals, in their order.
        explored: what exploring ended with; None while it goes on.
        finished: whether the finals had ended, too.
    """

    def __init__(
        self,
        study: Study,
        asked: Mapping[str, Any],
        measurements: Measurements,
    ) -> None:
        self._study = study
        self._asked = dict(asked)

        attributes = study.user_attrs
        kept = sorted(name for name in attributes if name.startswith(_VERIFIED))
        self._count = len(kept)
        self.verified: list[Measurement] = []
        for name in kept:
            verified = _read(_Verified, attributes[name])
            if verified and verified.quick == self._asked["quick"]:
                self.verified.append(verified.measurement)

        self.explored: Explored | None = None
        self.finished = False
        before = _read(_Before, attributes.get(_EXPLORED))
        if before and before.asked == self._asked and before.explored.is_of(measurements):
            self.explored = before.explored
            self.finished = before.finished

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
        if isinstance(attributes, Mapping):
            for name, value in attributes.items():
                if name == _EXPLORED or name.startswith(_VERIFIED):
                    study.set_user_attr(name, value)


def _read(kind: type[_Kind], value: Any) -> _Kind | None:
    """None for what cannot be read: it is measured again."""
    try:
        read: _Kind = from_plain(kind, value)
        return read
    except UNREADABLE:
        return None
