"""All legal configs of a space: counted without making one, listed without looking at what is refused.

A state is what is left of all constraints' trees once some knobs have values; where the same is left, the same configs
follow, however it came about: 26 million combinations have a few hundred states. Configs are counted from the end, and
listed (or drawn) by passing all rows of a state on at once.
"""

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.search.decision_diagram import ALLOWED, FORBIDDEN, Asking, Trees

MAX_CONFIGS = 300_000  # as Configs, about 250 MB
_MAX_UNREAD = 50_000  # combinations tried one by one, where a rule reads too much to be known beforehand
_MOST_STATES = 20_000  # about 2 s; where rules are so entangled that there are more, combinations are tried likewise

_State = tuple[int, ...]  # the trees of which something is left to say
_Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Count:
    """A number of configs; where it is not exact, they are no more than that."""

    configs: int
    exact: bool


@dataclass(frozen=True)
class _Choice:
    """A listed value of a knob by its place, the values that are settled with it, and what is left to say then."""

    place: int
    given: tuple[int, ...]
    left: _State


class Enumeration:
    """The canonical configs that the listed values of some knobs lead to, at least one of each, by constraints of these
    knobs, and of others, which stay off."""

    def __init__(self, knobs: Mapping[str, tuple[Value, ...]], constraints: Constraints) -> None:
        self._knobs, self._rules, self._trees = knobs, constraints, Trees()
        self._steps: dict[_State, tuple[str, tuple[_Choice, ...]]] = {}
        self._counts: dict[_State, int] = {(): 1}
        self._doubled = False  # whether combinations that settle to the same config may be counted each
        asking = Asking(knobs, constraints, self._trees)
        self._names = asking.names
        settling = [asking.settling(name) for name in asking.names]
        refusing = [asking.refusing(name) for name in constraints.refuse]
        self._unread = None in settling or None in refusing
        settled = [tree for tree in settling if tree is not None]
        refused = [tree for tree in refusing if tree is not None]
        if self._unread:  # what such a rule reads is open: every value of every knob may make a difference
            settled += [self._every_value(knob) for knob in knobs]
        # What is read by many rules comes first, so that what is forbidden shows early; what is free comes last.
        self._order = sorted(knobs, key=lambda knob: -sum(knob in self._trees.reads[tree] for tree in refused))
        self._canonical = self._choice(0, settled)
        self._legal = self._choice(0, settled + refused)
        if self._entangled():
            self._unread = True
            self._steps.clear()
            self._canonical = self._legal = self._choice(0, map(self._every_value, knobs))
        self._most = _MAX_UNREAD if self._unread else MAX_CONFIGS

    def count(self, *, refused: bool = False) -> Count:
        """The number of legal configs, or with `refused` of all canonical ones."""
        start = self._canonical if refused else self._legal
        total = self._below(start)
        apart = not self._unread and not self._doubled
        if apart or total > self._most:
            return Count(total, exact=apart)
        return Count(len(self._found(start, range(total), refused=refused)), exact=True)

    def configs(self, seed: int = 0) -> tuple[Config, ...]:
        """The legal configs, in the order in which trying all combinations would come upon them.

        Of more than MAX_CONFIGS that many are drawn by the seed, without replacement and each as likely as any other;
        only the first one, which is expected to need the least memory, is always among them, and one that values of a
        knob settle to in a way that its own rule does not tell at once may come up more often. Where a rule reads so
        much that it cannot be known beforehand, _MAX_UNREAD combinations that the others allow are drawn, and tried.
        Raises InputError where every combination contradicts itself, for the first one's reason.
        """
        total = self._below(self._legal)
        ranks = range(total) if total <= self._most else self._drawn(total, seed)
        found = self._found(self._legal, ranks)
        if not found and not self.count(refused=True).configs:
            self._rules.canonical({knob: values[0] for knob, values in self._knobs.items()})
        return found

    def _entangled(self) -> bool:
        """Whether too many states come of the constraints to be counted."""
        waiting = [start.left for start in (self._canonical, self._legal) if start and start.left]
        while waiting and len(self._steps) < _MOST_STATES:
            state = waiting.pop()
            if state not in self._steps:
                waiting += [choice.left for choice in self._step(state)[1] if choice.left]
        return bool(waiting)

    def _every_value(self, knob: str) -> int:
        """A tree that says something else for each value; of a name that no config holds."""
        places = range(len(self._knobs[knob]))
        return self._trees.branch(knob, [self._trees.value(f"{knob} as listed", place) for place in places])

    def _choice(self, place: int, trees: Iterable[int]) -> _Choice | None:
        """What these trees say together; None where one of them forbids."""
        left = {tree for tree in trees if tree != ALLOWED}
        if FORBIDDEN in left:
            return None
        given = left & self._trees.values.keys()
        return _Choice(place, tuple(sorted(given)), tuple(sorted(left - given)))

    def _assume(self, state: _State, knob: str, place: int) -> _Choice | None:
        return self._choice(place, (self._trees.assume(tree, knob, place) for tree in state))

    def _step(self, state: _State) -> tuple[str, tuple[_Choice, ...]]:
        """The knob that is decided next, and its values that are not forbidden; of those that come to the same, one."""
        if state not in self._steps:
            read = frozenset().union(*(self._trees.reads[tree] for tree in state))
            knob = next(each for each in self._order if each in read)
            choices: dict[tuple[tuple[int, ...], _State], _Choice] = {}
            for place in range(len(self._knobs[knob])):
                if choice := self._assume(state, knob, place):
                    choices.setdefault((choice.given, choice.left), choice)
            self._doubled = self._doubled or self._may_meet(knob, choices.values())
            self._steps[state] = knob, tuple(choices.values())
        return self._steps[state]

    def _may_meet(self, knob: str, choices: Iterable[_Choice]) -> bool:
        """Whether several values of a knob may settle to the same one, as far as its own tree tells."""
        of_each = []
        for choice in choices:
            gives = frozenset().union(*(self._trees.gives[tree] for tree in (*choice.given, *choice.left)))
            of_each.append({tree for tree in gives if self._trees.values[tree][0] == knob})
        distinct = sum(map(len, of_each)) == len(set().union(*of_each))
        return len(of_each) > 1 and not (distinct and all(of_each))

    def _count(self, state: _State) -> int:
        if state not in self._counts:
            self._counts[state] = sum(self._count(choice.left) for choice in self._step(state)[1])
        return self._counts[state]

    def _below(self, start: _Choice | None) -> int:
        return self._count(start.left) if start else 0

    def _drawn(self, total: int, seed: int) -> Sequence[int]:
        """Ranks among all that is counted, rising; random.sample cannot count as far as some products go."""
        draw, ranks = random.Random(seed), {self._rank_of_first()}
        few = total <= sys.maxsize
        numbers = iter(draw.sample(range(total), self._most)) if few else iter(lambda: draw.randrange(total), -1)
        while len(ranks) < self._most:
            ranks.add(next(numbers))
        return sorted(ranks)

    def _rank_of_first(self) -> int:
        """The rank of the combination that comes first in the order of the space."""
        assert self._legal, "something is legal"
        places: dict[str, int] = {}
        state = self._legal.left
        for knob, values in self._knobs.items():
            choices = (self._assume(state, knob, place) for place in range(len(values)))
            chosen = next(choice for choice in choices if choice and self._count(choice.left))
            places[knob], state = chosen.place, chosen.left
        rank, state = 0, self._legal.left
        while state:
            knob, each = self._step(state)
            rank += sum(self._count(choice.left) for choice in each if choice.place < places[knob])
            state = next(choice.left for choice in each if choice.place == places[knob])
        return rank

    def _found(self, start: _Choice | None, ranks: Sequence[int], *, refused: bool = False) -> tuple[Config, ...]:
        """The distinct configs of those ranks, in the order of the space."""
        if start is None or not len(ranks):
            return ()
        places, trees = self._rows(start, ranks)
        order = np.lexsort([*(places[knob] for knob in reversed(list(self._knobs))), np.zeros(len(ranks))])
        if self._unread:
            listed = [_values(places[knob][order], values.__getitem__) for knob, values in self._knobs.items()]
            return tuple(dict.fromkeys(self._tried(zip(*listed, strict=True), refused=refused)))
        settled = [_values(trees[name][order], lambda tree: self._trees.values[tree][1]) for name in self._names]
        rows = zip(*settled, strict=True)
        return tuple(dict.fromkeys(Config(dict(zip(self._names, row, strict=True))) for row in rows))

    def _rows(self, start: _Choice, ranks: Sequence[int]) -> tuple[dict[str, _Numbers], dict[str, _Numbers]]:
        """Of each rank (rising) every listed value's place, 0 where it does not matter, and each settled one's tree."""
        places = {knob: np.zeros(len(ranks), np.intp) for knob in self._knobs}
        trees: dict[str, _Numbers] = defaultdict(lambda: np.zeros(len(ranks), np.intp))
        arriving: dict[str, dict[_State, list[tuple[_Numbers, Any]]]] = {knob: {} for knob in self._order}

        def arrive(choice: _Choice, rows: _Numbers, numbers: Any) -> None:
            for tree in choice.given:
                trees[self._trees.values[tree][0]][rows] = tree
            if choice.left:
                knob = self._step(choice.left)[0]
                arriving[knob].setdefault(choice.left, []).append((rows, numbers))

        # Ranks that are too large for the integers of NumPy are Python's own.
        arrive(start, np.arange(len(ranks)), np.array(ranks, np.int64 if self._below(start) <= sys.maxsize else object))
        for knob in self._order:  # a state decides the first knob that it reads, so what it leaves comes later
            for state, parts in arriving.pop(knob).items():
                rows, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
                low = 0
                for choice in self._step(state)[1]:
                    high = low + self._count(choice.left)
                    inside = (numbers >= low) & (numbers < high)
                    if inside.any():
                        places[knob][rows[inside]] = choice.place
                        arrive(choice, rows[inside], numbers[inside] - low)
                    low = high
        return places, trees

    def _tried(self, combinations: Iterable[tuple[Value, ...]], *, refused: bool) -> Iterator[Config]:
        """The configs of combinations, each settled and looked at by all constraints."""
        for values in combinations:
            with contextlib.suppress(InputError):
                config = self._rules.canonical(dict(zip(self._knobs, values, strict=True)))
                if refused or not any(refuse(config) for refuse in self._rules.refuse.values()):
                    yield config


def _values(numbers: _Numbers, value: Callable[[int], Value]) -> list[Value]:
    distinct, which = np.unique(numbers, return_inverse=True)
    values = [value(int(number)) for number in distinct]
    return [values[place] for place in which.tolist()]
