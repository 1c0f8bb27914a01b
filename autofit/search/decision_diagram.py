"""Decision diagrams of constraints: what each rule says of every combination of a space's values.

A rule is a function of the config alone, so its answer for one config holds for all that agree on
the knobs it read. A few calls (a dozen for 26 million combinations) reveal it for all: call it,
note what it read, change the last knob, call it again. The diagrams of all rules share their nodes.
"""

from collections.abc import Callable, Mapping, Sequence

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.search.encoding import KnobValues

ALLOWED = 0  # the first two nodes: a rule's answer that is no value
FORBIDDEN = 1
_MOST_ANSWERS = 4_000  # a rule that reads so much that more are needed is not probed any further


class DecisionDiagram:
    """All nodes by their numbers. Equal ones have the same number, and none branches where nothing
    depends on it.

    Attributes:
        reads: of each node, the knobs that its answer depends on.
        gives: of each node, the nodes of the values that it may end with.
        values: of nodes that give one value, that value and the knob that takes it.
    """

    def __init__(self) -> None:
        self.reads: list[frozenset[str]] = [frozenset(), frozenset()]
        self.gives: list[frozenset[int]] = [frozenset(), frozenset()]
        self.values: dict[int, tuple[str, Value]] = {}
        self._branches: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._numbers: dict[object, int] = {}
        self._assumed: dict[tuple[int, str, int], int] = {}

    def value(self, knob: str, value: Value) -> int:
        """The node that gives a value of a knob at once."""
        node = self._numbers.setdefault((knob, type(value), value), len(self.reads))
        if node == len(self.reads):
            self.values[node] = knob, value
            self.reads.append(frozenset())
            self.gives.append(frozenset({node}))

        return node

    def branch(self, knob: str, nodes: Sequence[int]) -> int:
        """The node that reads a knob first.

        Args:
            nodes: what follows, one for each of the knob's listed values.
        """
        if len(set(nodes)) == 1:
            return nodes[0]

        branch = knob, tuple(nodes)
        node = self._numbers.setdefault(branch, len(self.reads))
        if node == len(self.reads):
            self._branches[node] = branch
            self.reads.append(frozenset({knob}) | self.reads_of(nodes))
            self.gives.append(self.gives_of(nodes))

        return node

    def reads_of(self, nodes: Sequence[int]) -> frozenset[str]:
        """The knobs that any of these nodes depends on."""
        return frozenset[str]().union(*map(self.reads.__getitem__, nodes))

    def gives_of(self, nodes: Sequence[int]) -> frozenset[int]:
        """The nodes of the values that any of these may end with."""
        return frozenset[int]().union(*map(self.gives.__getitem__, nodes))

    def assume(self, node: int, knob: str, index: int) -> int:
        """What is left of a node when a knob has a value.

        Args:
            index: of the value among those that are listed.
        """
        if knob not in self.reads[node]:
            return node

        key = (node, knob, index)
        if key not in self._assumed:
            read, nodes = self._branches[node]
            if read == knob:
                self._assumed[key] = nodes[index]
            else:
                left = [self.assume(following, knob, index) for following in nodes]
                self._assumed[key] = self.branch(read, left)

        return self._assumed[key]


class ConstraintProber:
    """Calls constraints with combinations of a space's listed values, and puts their answers into a
    diagram.

    Attributes:
        names: of all knobs, those that stay off included.
    """

    def __init__(
        self,
        knobs: KnobValues,
        constraints: Constraints,
        diagram: DecisionDiagram,
    ) -> None:
        self.names = tuple({**constraints.off, **knobs})
        self._constraints = constraints
        self._diagram = diagram
        self._answers = 0
        self._listed: dict[str, tuple[Value, ...]] = {}
        for name in self.names:
            self._listed[name] = knobs.get(name) or (constraints.off[name],)

    def canonical(self, name: str) -> int | None:
        """The node of a knob's canonical value; None where its rule would be called too often."""
        return self._probe(lambda config: self._diagram.value(name, config[name]))

    def refusal(self, name: str) -> int | None:
        """The node of whether a rule refuses the canonical config; None as of `canonical`."""
        refuse = self._constraints.refuse[name]
        return self._probe(lambda config: FORBIDDEN if refuse(config) else ALLOWED)

    def _probe(self, rule: Callable[[Config], int]) -> int | None:
        """The node of all that a rule says; None where it would be called too often."""
        self._answers = 0
        try:
            return self._node(rule, {})
        except OverflowError:
            return None

    def _node(self, rule: Callable[[Config], int], indices: Mapping[str, int]) -> int:
        """What a rule says where some knobs have values already.

        Calls the rule with the first value of every other knob that it reads, then again with the
        other values of each, the last one read first.

        Args:
            indices: of these values among those that are listed.
        """
        self._answers += 1
        if self._answers > _MOST_ANSWERS:
            raise OverflowError

        reads = {}

        def given(name: str) -> Value:
            listed = self._listed[name]
            if name not in indices and len(listed) > 1:
                reads[name] = 0
            return listed[indices.get(name, 0)]

        try:
            node = rule(self._constraints.read_lazily(self.names, given))
        except InputError:  # knobs that contradict each other
            node = FORBIDDEN

        while reads:
            last, _ = reads.popitem()
            others = range(1, len(self._listed[last]))
            nodes = [self._node(rule, {**indices, **reads, last: index}) for index in others]
            node = self._diagram.branch(last, [node, *nodes])

        return node
