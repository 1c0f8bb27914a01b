"""Constraints: what makes knobs a canonical config and what forbids one, as one function a knob.

The techniques make them, and a search takes them. It lies between both because of what they share: the canonical form
is worked out knob by knob and only as far as somebody reads it, so that a search learns which knobs an answer hangs on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autofit.core.config import Config, Value


@dataclass(frozen=True)
class Constraints:
    """What all knobs together say, each knob for itself; functions of nothing but the config they are given.

    off: every knob's value where none is given, in the order in which a config holds them.
    canonicalize: a knob's canonical value beside the others; raises InputError where they contradict each other. A knob
    that
        has none keeps what it is given.
    refuse: why a canonical config cannot be, or None.
    """

    off: Mapping[str, Value] = field(default_factory=dict)
    canonicalize: Mapping[str, Callable[[Config], Value]] = field(default_factory=dict)
    refuse: Mapping[str, Callable[[Config], str | None]] = field(default_factory=dict)

    def canonical(self, knobs: Mapping[str, Value]) -> Config:
        """The canonical config: every knob present, absent ones off.

        Raises:
            InputError: knobs that contradict each other.
        """
        given = {**self.off, **knobs}
        lazy = self.read_lazily(tuple(given), given.__getitem__)
        return Config({name: lazy[name] for name in given})

    def read_lazily(self, names: tuple[str, ...], given: Callable[[str], Value]) -> Config:
        """The canonical config, of which nothing is worked out, and nothing of what is given read, before it is asked.

        Raises, when a knob is asked:
            InputError: knobs that contradict each other.
        """
        return _Lazy(names, _Settling(self.canonicalize, names, given).last)


class _Settling:
    """Knobs settled again and again, because one's canonical value may hang on another's, until nothing changes."""

    def __init__(
        self,
        canonicalize: Mapping[str, Callable[[Config], Value]],
        names: tuple[str, ...],
        given: Callable[[str], Value],
    ) -> None:
        self._settle = canonicalize
        self._names = names
        self._given = given
        self._values: dict[tuple[int, str], Value] = {}
        self._reads: dict[tuple[int, str], set[str]] = {}
        self._last: dict[str, Value] = {}

    def last(self, name: str) -> Value:
        """The value that stays."""
        for times in itertools.count():
            if name in self._last or self._stays(times, name):
                return self._last[name]
        raise AssertionError("counting has no end")

    def _stays(self, times: int, name: str) -> bool:
        """Whether settling once more would change neither this knob nor any that its value hangs on, near or far."""
        waiting, seen = [name], {name}
        while waiting:
            knob = waiting.pop()
            before, after = self._after(times, knob), self._after(times + 1, knob)
            if before != after or type(before) is not type(after):
                return False
            new = self._reads[times + 1, knob] - seen
            waiting += new
            seen |= new
        self._last |= {knob: self._after(times, knob) for knob in seen}
        return True

    def _after(self, times: int, name: str) -> Value:
        """The value after settling so many times."""
        key = (times, name)
        if key not in self._values:
            if not times:
                self._values[key] = self._given(name)
            elif name not in self._settle:
                self._reads[key] = {name}
                self._values[key] = self._after(times - 1, name)
            else:
                reads = self._reads[key] = set()
                self._values[key] = self._settle[name](_Lazy(self._names, self._noting(times - 1, reads)))
        return self._values[key]

    def _noting(self, times: int, reads: set[str]) -> Callable[[str], Value]:
        def read(name: str) -> Value:
            reads.add(name)
            return self._after(times, name)

        return read


class _Lazy(Config):
    """A Config that asks for a knob's value when it is read; what needs all of them (hash, ==, names) asks for all."""

    __slots__ = ("_ask", "_names")

    def __init__(self, names: tuple[str, ...], ask: Callable[[str], Value]) -> None:
        self._names = names
        self._ask = ask

    def __getitem__(self, name: str) -> Value:
        if name not in self._names:
            raise KeyError(name)
        return self._ask(name)

    @property
    def _values(self) -> dict[str, Value]:  # type: ignore[override]  # all that Config itself holds on to
        return {name: self._ask(name) for name in self._names}

    @property
    def _hash(self) -> int:  # type: ignore[override]
        return hash(Config(self._values))
