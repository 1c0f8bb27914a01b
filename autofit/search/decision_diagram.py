"""Decision diagrams of constraints over a whole space: each rule as a tree of the knobs that it reads.

A rule is a function of the config alone, so its answer for one holds for all that agree on the knobs it read. A few
calls (a dozen for 26 million combinations) reveal it for all: call it, note what it read, change the last knob, call it
again. The trees of all constraints share their parts: equal parts have the same number.
"""

from collections.abc import Callable, Mapping, Sequence

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError

ALLOWED, FORBIDDEN = 0, 1  # the first two trees: what a rule says that is no value
_MOST_ANSWERS = 4_000  # of a rule that reads so much that more would be needed, nothing is said beforehand


class Trees:
    """All trees by their numbers. Equal ones have the same number, and none branches where nothing hangs on it."""

    def __init__(self) -> None:
        # Of ALLOWED, FORBIDDEN and all other trees: the knobs that one hangs on, and the values it may come to say.
        self.reads: list[frozenset[str]] = [frozenset(), frozenset()]
        self.gives: list[frozenset[int]] = [frozenset(), frozenset()]
        self.values: dict[int, tuple[str, Value]] = {}  # a knob's canonical value, of trees that say it at once
        self._branches: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._numbers: dict[object, int] = {}
        self._assumed: dict[tuple[int, str, int], int] = {}

    def value(self, knob: str, value: Value) -> int:
        """The tree that says a value at once."""
        number = self._numbers.setdefault((knob, type(value), value), len(self.reads))
        if number == len(self.reads):
            self.values[number] = knob, value
            self.reads.append(frozenset())
            self.gives.append(frozenset({number}))
        return number

    def branch(self, knob: str, trees: Sequence[int]) -> int:
        """The tree that reads a knob first, and goes on with one tree for each of its listed values."""
        if len(set(trees)) == 1:
            return trees[0]
        branch = knob, tuple(trees)
        number = self._numbers.setdefault(branch, len(self.reads))
        if number == len(self.reads):
            self._branches[number] = branch
            self.reads.append(frozenset({knob}).union(*(self.reads[each] for each in trees)))
            self.gives.append(frozenset[int]().union(*(self.gives[each] for each in trees)))
        return number

    def assume(self, tree: int, knob: str, place: int) -> int:
        """What is left of a tree when a knob has its listed value of that place."""
        if knob not in self.reads[tree]:
            return tree
        key = (tree, knob, place)
        if key not in self._assumed:
            read, trees = self._branches[tree]
            if read == knob:
                self._assumed[key] = trees[place]
            else:
                self._assumed[key] = self.branch(read, [self.assume(each, knob, place) for each in trees])
        return self._assumed[key]


class Asking:
    """Asks constraints about combinations of a space's listed values."""

    def __init__(self, knobs: Mapping[str, tuple[Value, ...]], constraints: Constraints, trees: Trees) -> None:
        self.names = tuple({**constraints.off, **knobs})
        self._rules, self._trees = constraints, trees
        self._listed = {name: knobs.get(name) or (constraints.off[name],) for name in self.names}

    def settling(self, name: str) -> int | None:
        """The value that a knob settles to."""
        return self._tree(lambda config: self._trees.value(name, config[name]))

    def refusing(self, name: str) -> int | None:
        """Whether a rule lets the canonical config be."""
        return self._tree(lambda config: FORBIDDEN if self._rules.refuse[name](config) else ALLOWED)

    def _tree(self, rule: Callable[[Config], int]) -> int | None:
        """All that a rule says; None where it would have to be asked too often."""
        answers = 0

        def asked(places: dict[str, int]) -> int:
            """What it says of all combinations with these places; of what else it reads, the first is tried first."""
            nonlocal answers
            answers += 1
            if answers > _MOST_ANSWERS:
                raise OverflowError
            reads: dict[str, int] = {}

            def given(name: str) -> Value:
                if name not in places and len(self._listed[name]) > 1:
                    reads[name] = 0
                return self._listed[name][places.get(name, 0)]

            try:
                tree = rule(self._rules.read_lazily(self.names, given))
            except InputError:  # knobs that contradict each other
                tree = FORBIDDEN
            while reads:
                last, _ = reads.popitem()
                others = range(1, len(self._listed[last]))
                tree = self._trees.branch(last, [tree, *(asked({**places, **reads, last: place}) for place in others)])
            return tree

        try:
            return asked({})
        except OverflowError:
            return None
