"""Which changes of a file are worth it: of what a search chose, that without which it is slower or
does not fit."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import NamedTuple

from autofit.api.tool_workload import SIZES
from autofit.export.importers.importer import Importer, Keys
from autofit.export.source import ExportSource
from autofit.export.tool import write

_TOLERANCE = 1.005  # of the time of a step: less is no reason for a change

# A config -> the seconds of its step; None where it does not fit.
Seconds = Callable[[ExportSource], float | None]


@dataclass(frozen=True)
class Gain:
    """What some changes of a file bring.

    Attributes:
        keys: those of the file that change together.
        speed: how many times as fast the training is with them; None: without them it does not fit.
    """

    keys: tuple[str, ...]
    speed: float | None

    def among(self, changed: Container[str]) -> "Gain":
        """The same with those of its keys that the file really changes."""
        return replace(self, keys=tuple(key for key in self.keys if key in changed))


class Worth(NamedTuple):
    """A config without changes that bring nothing.

    Attributes:
        gains: what each of the others brings.
        unjudged: the keys of changes of which that is not known: time was over.
    """

    chosen: ExportSource
    gains: tuple[Gain, ...] = ()
    unjudged: tuple[str, ...] = ()


def worth_changing(
    importer: Importer,
    keys: Keys,
    before: ExportSource,
    after: ExportSource,
    seconds: Seconds,
    is_over: Callable[[], bool],
) -> Worth:
    """Judge each change by the config without it.

    Args:
        keys: of the file.
        before, after: of the file, and as a search chose it.
        is_over: whether there is no time for another.
    """
    fastest = seconds(after)
    if fastest is None:
        return Worth(after)

    gains = []
    unjudged: list[str] = []
    departures = _departures(importer, before) | _departures(importer, after)
    for knobs, written in _together(importer, before, after):
        values = {knob: before.config[knob] for knob in knobs}
        without = replace(after, config=after.config.replace(**values))
        if not _departures(importer, without) <= departures:
            continue

        names = tuple(importer.name_of(keys, key) for key in written)
        if is_over():
            unjudged += names
            continue

        slower = seconds(without)
        if slower is not None and slower <= fastest * _TOLERANCE:
            after = without
        else:
            gains.append(Gain(names, None if slower is None else slower / fastest))

    return Worth(after, tuple(gains), tuple(unjudged))


def _departures(importer: Importer, source: ExportSource) -> set[str]:
    """The knobs that the tool does otherwise."""
    return {departure.knob for departure in write(importer.tool, source).departures}


def _together(
    importer: Importer, before: ExportSource, after: ExportSource
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The knobs that changed, together where they have a key in common, and these keys."""
    old = write(importer.tool, before).keys
    groups: list[tuple[set[str], set[str]]] = []
    for knob, written in write(importer.tool, after).keys.items():
        if after.config[knob] == before.config[knob]:
            continue
        knobs = {knob}
        keys = {key for key, value in written.items() if old.get(knob, {}).get(key) != value}
        for group in [*groups]:
            if group[1] & keys or (knob in SIZES and group[0] & {*SIZES}):
                groups.remove(group)
                knobs |= group[0]
                keys |= group[1]
        groups.append((knobs, keys))
    return [(tuple(knobs), tuple(sorted(keys))) for knobs, keys in groups]
