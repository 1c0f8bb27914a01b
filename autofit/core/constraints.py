"""Constraints: what makes knobs a canonical config and what forbids one, as one function a knob.

Techniques make them, and a search takes them. The canonical form is worked out knob by knob, and only as far as it is
read, so that a search learns which knobs an answer depends on.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autofit.core.config import Config, Value


@dataclass(frozen=True)
class Constraints:
    """What all knobs together require, each knob for itself, as functions of the config alone."""

    off: Mapping[str, Value] = field(default_factory=dict)  # in the order of a config
    # A knob's canonical value beside the others; raises InputError where they contradict each other. Knobs without a
    # function stay as they are given.
    canonicalize: Mapping[str, Callable[[Config], Value]] = field(default_factory=dict)
    # Why a canonical config is impossible, or None.
    refuse: Mapping[str, Callable[[Config], str | None]] = field(default_factory=dict)

    def canonical(self, knobs: Mapping[str, Value]) -> Config:
        """The canonical config: every knob present, absent ones off. Raises InputError for knobs at odds."""
        values = {**self.off, **knobs}
        while True:
            config = Config(values)
            after = dict(values)
            for name, rule in self.canonicalize.items():
                if name in values:
                    after[name] = rule(config)

            # Python's 1, 1.0 and True are equal, values of a knob are not.
            if all(after[name] == value for name, value in values.items()) and all(
                type(after[name]) is type(value) for name, value in values.items()
            ):
                return config
            values = after

    def read_lazily(self, names: tuple[str, ...], given: Callable[[str], Value]) -> Config:
        """The canonical config, which works out a knob, reads what is given and may raise only when it is read."""
        return _LazyConfig(names, _FixedPoint(self.canonicalize, names, given).value)


@dataclass
class _FixedPoint:
    """Knobs canonicalized round after round until nothing changes, because a canonical value may depend on another."""

    canonicalize: Mapping[str, Callable[[Config], Value]]
    names: tuple[str, ...]
    given: Callable[[str], Value]
    values: dict[tuple[int, str], Value] = field(default_factory=dict)  # by round and knob
    # what each of these values was made from
    reads: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    fixed: dict[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The value that no further round changes."""
        for rounds in itertools.count():
            if name in self.fixed or self._is_fixed(rounds, name):
                break
        return self.fixed[name]

    def _is_fixed(self, rounds: int, name: str) -> bool:
        """Whether one more round changes neither this knob nor any that its value depends on, directly or not."""
        waiting, dependencies = [name], {name}
        while waiting:
            knob = waiting.pop()
            before, after = self._after(rounds, knob), self._after(rounds + 1, knob)
            if before != after or type(before) is not type(after):
                return False
            new = self.reads[rounds + 1, knob] - dependencies
            waiting += new
            dependencies |= new
        self.fixed |= {knob: self._after(rounds, knob) for knob in dependencies}
        return True

    def _after(self, rounds: int, name: str) -> Value:
        key = (rounds, name)
        if key not in self.values:
            if not rounds:
                self.values[key] = self.given(name)
            elif name not in self.canonicalize:
                self.reads[key] = {name}
                self.values[key] = self._after(rounds - 1, name)
            else:
                reads = self.reads[key] = set()

                def read(knob: str) -> Value:
                    reads.add(knob)
                    return self._after(rounds - 1, knob)

                self.values[key] = self.canonicalize[name](_LazyConfig(self.names, read))
        return self.values[key]


class _LazyConfig(Config):
    """A Config that asks for a knob's value when it is read; what needs all of them (hash, ==, names) asks for all."""

    __slots__ = ("_ask", "_names")

    def __init__(self, names: tuple[str, ...], ask: Callable[[str], Value]) -> None:
        self._names = names
        self._ask = ask

    def __getitem__(self, name: str) -> Value:
        if name not in self._names:
            raise KeyError(name)
        return self._ask(name)

    def get(self, name: str, default: Value = None) -> Value:  # type: ignore[override]
        """The value of a knob; the default where there is no such knob."""
        return self._ask(name) if name in self._names else default

    def replace(self, **knobs: Value) -> Config:
        """The same with some knobs changed; of the others none is asked for yet."""

        def ask(name: str) -> Value:
            return knobs[name] if name in knobs else self._ask(name)

        return _LazyConfig(tuple({**dict.fromkeys(self._names), **knobs}), ask)

    @property
    def _values(self) -> dict[str, Value]:  # type: ignore[override]  # all that Config itself holds on to
        return {name: self._ask(name) for name in self._names}

    def __hash__(self) -> int:
        return hash(Config(self._values))
