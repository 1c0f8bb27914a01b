"""All legal configs of a space: counted without making one, listed without trying what is refused.

A state is the nodes of all constraints' diagrams that are still undecided once some knobs have
values. Equal states lead to the same configs, however they came about: 26 million combinations have
a few hundred states. Configs are counted from the end, and listed (or sampled) by passing all rows
of a state on at once.
"""

import contextlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.search.decision_diagram import (
    ALLOWED,
    FORBIDDEN,
    ConstraintProber,
    DecisionDiagram,
)
from autofit.search.encoding import KnobValues

MAX_CONFIGS = 300_000  # as Configs, about 250 MB
_MAX_UNREAD = 50_000  # combinations tried one by one, where a rule reads too much to be probed
_MOST_STATES = 20_000  # about 2 s; where rules are so entangled that there are more, likewise

_State = tuple[int, ...]  # undecided nodes
_Numbers = npt.NDArray[np.intp]
_Columns = dict[str, _Numbers]
_Arrivals = dict[_State, list[tuple[_Numbers, Any]]]


@dataclass(frozen=True)
class Count:
    """A number of configs; where it is not exact, they are no more than that."""

    configs: int
    exact: bool


@dataclass(frozen=True)
class _Choice:
    """A listed value of a knob.

    Attributes:
        index: of the value.
        given: nodes of canonical values that are decided with it.
        left: what is undecided then.
    """

    index: int
    given: tuple[int, ...]
    left: _State


class Enumeration:
    """The canonical configs that the listed values of some knobs lead to.

    Args:
        knobs: the listed values of each knob, at least one.
        constraints: of these knobs, and of others, which stay off.
    """

    def __init__(self, knobs: KnobValues, constraints: Constraints) -> None:
        self._knobs = knobs
        self._constraints = constraints
        self._diagram = DecisionDiagram()
        self._steps: dict[_State, tuple[str, tuple[_Choice, ...]]] = {}
        self._counts: dict[_State, int] = {(): 1}
        # Whether combinations that lead to the same config may be counted each.
        self._may_repeat = False

        # Whether a rule reads so much that it is not known beforehand.
        self._unread = False

        def known(nodes: Iterable[int | None]) -> Iterator[int]:
            for node in nodes:
                if node is None:
                    self._unread = True
                else:
                    yield node

        prober = ConstraintProber(knobs, constraints, self._diagram)
        self._names = prober.names
        canonical = list(known(map(prober.canonical, prober.names)))
        refused = list(known(map(prober.refusal, constraints.refuse)))
        if self._unread:  # any value of any knob may make a difference to a rule that is not known
            canonical.extend(map(self._every_value, knobs))

        # The knobs in the order in which they are decided. What is read by many rules comes first,
        # so that what is forbidden shows early; what no rule reads comes last.
        def readers(knob: str) -> int:
            return sum(knob in self._diagram.reads[node] for node in refused)

        self._order = sorted(knobs, key=readers, reverse=True)
        self._canonical = self._choice(0, canonical)
        self._legal = self._choice(0, canonical + refused)

        if self._is_entangled():
            self._unread = True
            self._steps.clear()
            self._canonical = self._choice(0, map(self._every_value, knobs))
            self._legal = self._canonical

        self._most = _MAX_UNREAD if self._unread else MAX_CONFIGS

    def count(self, *, refused: bool = False) -> Count:
        """The number of configs.

        Args:
            refused: whether canonical configs count that a constraint refuses.
        """
        start = self._canonical if refused else self._legal
        total = self._count_from(start)
        distinct = not self._unread and not self._may_repeat
        if distinct or total > self._most:
            return Count(total, exact=distinct)
        return Count(len(self._listed(start, range(total), refused=refused)), exact=True)

    def configs(self, seed: int = 0, most: int = MAX_CONFIGS) -> tuple[Config, ...]:
        """The legal configs, in the order in which trying all combinations would come upon them.

        Of more than `most` that many are sampled by the seed, without replacement and each as
        likely as any other; configs reached from several raw values may be over-sampled. The first
        one, which is expected to need the least memory, is always among them. Where a rule reads so
        much that it cannot be probed, _MAX_UNREAD combinations that the others allow are sampled,
        and tried.

        Raises InputError where every combination contradicts itself, for the first one's reason.
        """
        most = min(most, self._most)
        total = self._count_from(self._legal)
        ranks: Sequence[int] = range(total)
        if total > most:
            ranks = self._sampled_ranks(total, most, seed)

        found = self._listed(self._legal, ranks)
        if not found and not self.count(refused=True).configs:
            self._constraints.canonical({knob: values[0] for knob, values in self._knobs.items()})
        return found

    def _is_entangled(self) -> bool:
        """Whether too many states come of the constraints to be counted."""
        waiting = [start.left for start in (self._canonical, self._legal) if start]
        while waiting and len(self._steps) < _MOST_STATES:
            state = waiting.pop()
            if state and state not in self._steps:
                _, choices = self._step(state)
                waiting.extend(choice.left for choice in choices if choice.left)

        return any(waiting)

    def _every_value(self, knob: str) -> int:
        """A node that gives something else for each value; of a name that no config holds."""
        name = f"{knob} as listed"
        nodes = []
        for index, _ in enumerate(self._knobs[knob]):
            nodes.append(self._diagram.value(name, index))
        return self._diagram.branch(knob, nodes)

    def _choice(self, index: int, nodes: Iterable[int]) -> _Choice | None:
        """What these nodes say together; None where one of them forbids."""
        left = set(nodes) - {ALLOWED}
        if FORBIDDEN in left:
            return None

        given = left & self._diagram.values.keys()
        return _Choice(index, tuple(sorted(given)), tuple(sorted(left - given)))

    def _assume(self, state: _State, knob: str, index: int) -> _Choice | None:
        """What a state says of one of a knob's values; None where it forbids it."""
        return self._choice(index, (self._diagram.assume(node, knob, index) for node in state))

    def _step(self, state: _State) -> tuple[str, tuple[_Choice, ...]]:
        """The knob that is decided next, and its values that are not forbidden; one of those that
        come to the same."""
        if state not in self._steps:
            reads = self._diagram.reads_of(state)
            knob = next(knob for knob in self._order if knob in reads)
            distinct: dict[object, _Choice] = {}
            for index in range(len(self._knobs[knob])):
                choice = self._assume(state, knob, index)
                if choice:
                    distinct.setdefault((choice.given, choice.left), choice)
            choices = tuple(distinct.values())
            self._steps[state] = knob, choices
            self._may_repeat = self._may_repeat or self._may_meet(knob, choices)

        return self._steps[state]

    def _may_meet(self, knob: str, choices: Sequence[_Choice]) -> bool:
        """Whether several values of a knob may have the same canonical one."""
        if len(choices) < 2:
            return False

        seen: set[int] = set()
        for choice in choices:
            gives = self._diagram.gives_of(choice.given + choice.left)
            values = {node for node in gives if self._diagram.values[node][0] == knob}
            if not values or values & seen:
                return True
            seen |= values

        return False

    def _count(self, state: _State) -> int:
        """How many configs come of a state."""
        if state not in self._counts:
            _, choices = self._step(state)
            self._counts[state] = sum(self._count(choice.left) for choice in choices)

        return self._counts[state]

    def _count_from(self, start: _Choice | None) -> int:
        """How many configs come of a start; 0 where everything is forbidden."""
        return self._count(start.left) if start else 0

    def _sampled_ranks(self, total: int, most: int, seed: int) -> list[int]:
        """Ranks among all that is counted, rising, always with the first config's."""
        draw = random.Random(seed)
        ranks = {self._rank_of_first()}
        numbers = iter(lambda: draw.randrange(total), -1)
        if total <= sys.maxsize:  # random.sample cannot count as far as some products go
            numbers = iter(draw.sample(range(total), most))

        while len(ranks) < most:
            ranks.add(next(numbers))

        return sorted(ranks)

    def _rank_of_first(self) -> int:
        """The rank of the combination that comes first in the order of the space."""
        assert self._legal, "something is legal"

        # The first value of each knob with which there are legal configs, in the space's order.
        indices = {}
        state = self._legal.left
        for knob, values in self._knobs.items():
            for index, _ in enumerate(values):
                choice = self._assume(state, knob, index)
                if choice and self._count(choice.left):
                    indices[knob] = index
                    state = choice.left
                    break

        # How many are counted before it, in the order of the states.
        rank = 0
        state = self._legal.left
        while state:
            knob, steps = self._step(state)
            for choice in steps:
                if choice.index == indices[knob]:
                    state = choice.left
                    break
                rank += self._count(choice.left)

        return rank

    def _listed(
        self,
        start: _Choice | None,
        ranks: Sequence[int],
        *,
        refused: bool = False,
    ) -> tuple[Config, ...]:
        """The distinct configs of some ranks, in the order of the space.

        Args:
            start: before any knob is decided.
            ranks: rising numbers among all that is counted.
            refused: as of `count`.
        """
        if start is None or not len(ranks):
            return ()

        indices, nodes = self._rows(start, ranks)
        order = np.lexsort((*reversed(indices.values()), np.zeros(len(ranks))))
        columns = []
        if self._unread:
            for knob, values in self._knobs.items():
                column = indices[knob][order]
                columns.append(_values(column, values.__getitem__))
            combinations = zip(*columns, strict=True)
            configs = self._tried(combinations, refused=refused)
            return tuple(dict.fromkeys(configs))

        def value(node: int) -> Value:
            _, value = self._diagram.values[node]
            return value

        for name in self._names:
            column = nodes[name][order]
            columns.append(_values(column, value))
        found: dict[Config, None] = {}
        for row in zip(*columns, strict=True):
            config = Config(dict(zip(self._names, row, strict=True)))
            found[config] = None
        return tuple(found)

    def _rows(
        self,
        start: _Choice,
        ranks: Sequence[int],
    ) -> tuple[_Columns, _Columns]:
        """For each of the rising ranks: the index of every listed value, 0 where it does not
        matter, and the node of every canonical value."""
        indices = {knob: np.zeros(len(ranks), np.intp) for knob in self._knobs}
        nodes: _Columns = defaultdict(lambda: np.zeros(len(ranks), np.intp))
        # By the knob that is decided next and the state: rows, and their numbers in the state.
        arriving: dict[str, _Arrivals] = defaultdict(dict)

        def arrive(choice: _Choice, rows: _Numbers, numbers: Any) -> None:
            for node in choice.given:
                name, _ = self._diagram.values[node]
                nodes[name][rows] = node

            if choice.left:
                knob, _ = self._step(choice.left)
                arriving[knob].setdefault(choice.left, []).append((rows, numbers))

        # Ranks that are too large for the integers of NumPy are Python's own.
        kind = np.int64 if self._count(start.left) <= sys.maxsize else object
        arrive(start, np.arange(len(ranks)), np.array(ranks, kind))
        for knob in self._order:  # a state decides its first knob, so what it leaves comes later
            for state, parts in arriving.pop(knob, {}).items():
                # Numbers below the count of the first value's configs have that value, and so on.
                rows, numbers = map(np.concatenate, zip(*parts, strict=True))
                _, choices = self._step(state)
                low = 0
                for choice in choices:
                    high = low + self._count(choice.left)
                    inside = (numbers >= low) & (numbers < high)
                    if inside.any():
                        taken = rows[inside]
                        indices[knob][taken] = choice.index
                        arrive(choice, taken, numbers[inside] - low)
                    low = high

        return indices, nodes

    def _tried(
        self,
        combinations: Iterable[tuple[Value, ...]],
        *,
        refused: bool,
    ) -> Iterator[Config]:
        """The canonical configs of combinations, checked by all constraints."""
        for values in combinations:
            with contextlib.suppress(InputError):
                knobs = dict(zip(self._knobs, values, strict=True))
                config = self._constraints.canonical(knobs)
                refusals = (refuse(config) for refuse in self._constraints.refuse.values())
                if refused or not any(refusals):
                    yield config


def _values(numbers: _Numbers, value: Callable[[int], Value]) -> list[Value]:
    """The values of numbers, each of which is looked up once."""
    distinct, which = np.unique(numbers, return_inverse=True)
    values = list(map(value, distinct.tolist()))
    return [values[index] for index in which.tolist()]
