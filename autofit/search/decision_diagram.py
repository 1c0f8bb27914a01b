"""Decision diagrams of constraints over a whole space: each rule as a tree of the knobs that it reads.

A rule is a function of the config alone, so its answer for one holds for all that agree on the knobs it read. A few
calls (a dozen for 26 million combinations) reveal it for all: call it, note what it read, change the last knob, call it
again. The trees of all constraints share their parts: equal parts have the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError

ALLOWED, FORBIDDEN = 0, 1  # the first two trees: what a rule says that is no value
_MOST_ANSWERS = 4_000  # of a rule that reads so much that more would be needed, nothing is said beforehand


@dataclass(frozen=True)
class Given:
    """The end of a branch of a rule that settles a knob: its canonical value."""

    knob: str
    value: Value


@dataclass(frozen=True)
class Branch:
    """The rule reads a knob: one tree for each of its listed values, by number."""

    knob: str
    trees: tuple[int, ...]


class Trees:
    """All trees by their numbers. Equal ones have the same number, and none branches where nothing hangs on it."""

    def __init__(self) -> None:
        self._trees: list[Given | Branch | None] = [None, None]  # ALLOWED, FORBIDDEN
        self._reads: list[frozenset[str]] = [frozenset(), frozenset()]
        self._gives: list[frozenset[int]] = [frozenset(), frozenset()]
        self._numbers: dict[object, int] = {}
        self._assumed: dict[tuple[int, str, int], int] = {}

    def given(self, knob: str, value: Value) -> int:
        """The tree that says a value at once."""
        return self._number((knob, type(value), value), Given(knob, value))

    def branch(self, knob: str, trees: Sequence[int]) -> int:
        """The tree that reads a knob first."""
        if all(tree == trees[0] for tree in trees):
            return trees[0]
        return self._number((knob, tuple(trees)), Branch(knob, tuple(trees)))

    def value(self, tree: int) -> Given | None:
        """What the tree says, if that is a value, and hangs on nothing."""
        held = self._trees[tree]
        return held if isinstance(held, Given) else None

    def reads(self, tree: int) -> frozenset[str]:
        """The knobs it hangs on."""
        return self._reads[tree]

    def gives(self, tree: int) -> frozenset[int]:
        """The trees of all values that it may come to say."""
        return self._gives[tree]

    def assume(self, tree: int, knob: str, place: int) -> int:
        """What is left of a tree when a knob has its listed value of that place."""
        if knob not in self._reads[tree]:
            return tree
        key = (tree, knob, place)
        if key not in self._assumed:
            held = self._trees[tree]
            assert isinstance(held, Branch), "only branches read"
            self._assumed[key] = (
                held.trees[place]
                if held.knob == knob
                else self.branch(held.knob, [self.assume(each, knob, place) for each in held.trees])
            )
        return self._assumed[key]

    def _number(self, key: object, tree: Given | Branch) -> int:
        number = self._numbers.setdefault(key, len(self._trees))
        if number == len(self._trees):
            self._trees.append(tree)
            below = tree.trees if isinstance(tree, Branch) else ()
            itself = (frozenset({tree.knob}), frozenset[int]()) if below else (frozenset[str](), frozenset({number}))
            self._reads.append(itself[0].union(*(self._reads[each] for each in below)))
            self._gives.append(itself[1].union(*(self._gives[each] for each in below)))
        return number


class Asking:
    """Asks constraints about combinations of a space's listed values."""

    def __init__(self, knobs: Mapping[str, tuple[Value, ...]], constraints: Constraints, trees: Trees) -> None:
        self.names = tuple({**constraints.off, **knobs})
        self._rules = constraints
        self._trees = trees
        self._listed = {name: knobs.get(name) or (constraints.off[name],) for name in self.names}
        self._choices = {name: len(values) for name, values in self._listed.items() if len(values) > 1}

    def settling(self, name: str, places: Mapping[str, int], reads: list[str]) -> int:
        """The value that a knob settles to, as a tree."""
        try:
            return self._trees.given(name, self._config(places, reads)[name])
        except InputError:  # knobs that contradict each other
            return FORBIDDEN

    def refusing(self, name: str, places: Mapping[str, int], reads: list[str]) -> int:
        """Whether a rule lets the canonical config be, as a tree."""
        try:
            return FORBIDDEN if self._rules.refuse[name](self._config(places, reads)) else ALLOWED
        except InputError:
            return FORBIDDEN

    def tree(self, ask: Callable[[Mapping[str, int], list[str]], int]) -> int | None:
        """All that a rule says; None where it would have to be asked too often.

        Args:
            ask: what it says of the combination with its values at these places (the first ones where a knob has no
                place); notes the knobs read.
        """
        answers = 0

        def asked(places: dict[str, int]) -> int:
            nonlocal answers
            answers += 1
            if answers > _MOST_ANSWERS:
                raise _TooManyError
            reads: list[str] = []
            said = ask(places, reads)
            return grown(places, [name for name in dict.fromkeys(reads) if name not in places], said)

        def grown(places: dict[str, int], reads: list[str], said: int) -> int:
            """The tree below those places, of which one answer is known: what it read, and said."""
            if not reads:
                return said
            first, *others = reads
            trees = [grown({**places, first: 0}, others, said)]
            trees += [asked({**places, first: place}) for place in range(1, self._choices[first])]
            return self._trees.branch(first, trees)

        try:
            return asked({})
        except _TooManyError:
            return None

    def _config(self, places: Mapping[str, int], reads: list[str]) -> Config:
        def given(name: str) -> Value:
            if name in self._choices:
                reads.append(name)
            return self._listed[name][places.get(name, 0)]

        return self._rules.read_lazily(self.names, given)


class _TooManyError(Exception):
    """A rule was asked too often."""
