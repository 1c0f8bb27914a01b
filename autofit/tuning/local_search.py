"""From a few configs to one of each tier that no change of one or two knobs is expected to improve.

A space has too many configs to predict them all, and among those drawn at random the best is seldom
one. What a prediction costs is tracing, and most changes of a knob are known to be slow once they
were seen anywhere. So only what may be better is predicted, by what its changes did elsewhere.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.knobs import Trace, knob_named
from autofit.core.result import tier
from autofit.estimate.trace_keys import traced_part
from autofit.tuning.fractions import Fractions, is_partly_on
from autofit.tuning.narrowing import BytesAndSeconds, Row, Values

Merit = tuple[float, ...]
Change = tuple[str, Value]  # of a knob, to a value

# Changes do not do quite the same everywhere, so that a config may be faster that is expected to be
# slower by this share: by what they did to another config, in another tier, or to the same config
# where two of them come together.
_SLACK = 0.03
_OF_ANOTHER_TIER = 0.1
_OF_PAIRS = 0.01

# Configs for which a number of blocks is looked for at the same time; and traces that are made for
# pairs of changes before it is seen where they lead.
_AT_ONCE = 6


@dataclass(frozen=True)
class Neighbours:
    """The legal configs around a config, of the same tier.

    Attributes:
        knobs: the values that each may take.
    """

    knobs: Values
    constraints: Constraints
    _known: dict[tuple[Config, tuple[Change, ...]], Config | None] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def changes(self, config: Config) -> list[Change]:
        """Every other value that a knob of the config may have."""
        found: list[Change] = []
        for knob, values in self.knobs.items():
            found += [(knob, value) for value in values if value != config[knob]]

        return found

    def nearer(self, config: Config, change: Change) -> Change | None:
        """Of a degree by which devices are divided, the change to the one before it; None where
        that is the config's own, and of other knobs."""
        knob, value = change
        if not knob_named(knob).degree or value is None:
            return None

        degrees = sorted({int(other or 1) for other in self.knobs[knob]})
        own = int(config[knob] or 1)
        between = [degree for degree in degrees if own < degree < int(value)]

        return (knob, between[-1]) if between else None

    def changed(self, config: Config, changes: Iterable[Change]) -> Config | None:
        """The config with some changes; None where that is refused, the same, or of another
        tier."""
        key = (config, tuple(changes))
        if key not in self._known:
            self._known[key] = self._changed(*key)

        return self._known[key]

    def _changed(self, config: Config, changes: Iterable[Change]) -> Config | None:
        given: dict[str, Value] = {}
        for knob, values in self.knobs.items():
            # A value that is not listed was settled by other knobs, and may settle otherwise now.
            keeps = config[knob] in values or is_partly_on(config, knob)
            given[knob] = config[knob] if keeps else None

        given.update(changes)

        try:
            found = self.constraints.canonical(given)
        except InputError:
            return None

        if found == config or tier(found) != tier(config):
            return None
        if any(refuse(found) for refuse in self.constraints.refuse.values()):
            return None

        return found


def pairs_of(changes: Sequence[Change]) -> Iterator[tuple[Change, Change]]:
    """Every two changes of different knobs."""
    for first, second in itertools.combinations(changes, 2):
        if first[0] != second[0]:
            yield first, second


class LocalSearch:
    """Finds configs that no neighbour is better than, tier by tier.

    Args:
        predict: bytes and seconds of some configs, NaN where unknown.
        merit: the better a row, the larger; its first number is 1 where the config fits, else 0.
        is_over: whether there is no time for more.
        fractions: finds numbers of blocks; None: the model has no blocks.

    Attributes:
        looks_between: whether numbers of blocks are looked for.
        rows: what was predicted, by config.
        tiers: the same by tier, and there by config.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        predict: Callable[[Sequence[Config]], BytesAndSeconds],
        merit: Callable[[Row], Merit],
        is_over: Callable[[], bool] = lambda: False,
        fractions: Fractions | None = None,
    ) -> None:
        self.rows: dict[Config, Row] = {}
        self.tiers: dict[str, dict[Config, Row]] = {}
        self.looks_between = True
        self.neighbours = neighbours
        self._predict = predict
        self.merit = merit
        self._is_over = is_over
        self._fractions = fractions
        self._traced: set[tuple[Value, ...]] = set()

        # By tier and by a config whose neighbours were looked at those neighbours, the newest last:
        # by each value of a knob the config that has it instead.
        self._around: dict[str, dict[Config, dict[Change, Config]]] = {}

    def add(self, configs: Iterable[Config]) -> None:
        """Predict those configs that are not known yet."""
        unknown = [config for config in dict.fromkeys(configs) if config not in self.rows]
        if unknown:
            for row in map(Row, unknown, *self._predict(unknown)):
                self.rows[row.config] = row
                self.tiers.setdefault(tier(row.config), {})[row.config] = row
                self._traced.add(traced_part(row.config))
                if self._fractions:
                    self._fractions.note(row)

    def leader(self, name: str) -> Row | None:
        """The best row of a tier; None where none is known."""
        of_tier = self.tiers.get(name, {}).values()
        known = (row for row in of_tier if not math.isnan(row.nbytes + row.seconds))

        return max(known, key=self.merit, default=None)

    def refine(self, name: str, *, tracing: bool = True) -> Row | None:
        """The best row of a tier, once no change of one or two knobs is expected to be better, or
        there is no time for more.

        Args:
            tracing: also predict configs whose forward and backward were not traced yet.
        """

        def may_ask(configs: list[Config]) -> list[Config]:
            return [config for config in configs if tracing or traced_part(config) in self._traced]

        while leader := self.leader(name):
            # Pairs are looked at where no single change is better: there they are few. Between two
            # values all is traced that a number of blocks needs.
            asked = (
                may_ask(self.singles(leader))
                or may_ask(self._pairs(leader))
                or self._between(name, leader)
            )
            if not asked or self._is_over():
                return leader

            self.add(asked)

        return None

    def singles(self, row: Row, slack: float = _SLACK) -> list[Config]:
        """What one change makes of a config: what is not known yet, and may be better.

        Args:
            slack: how much slower, as a share, it may be expected to be.
        """
        around: dict[Change, Config] = {}
        of_tier = self._around.setdefault(tier(row.config), {})
        of_tier.pop(row.config, None)
        of_tier[row.config] = around
        for knob in self.neighbours.knobs:
            around[knob, row.config[knob]] = row.config

        asked: dict[Change, Config] = {}
        waiting: set[Change] = set()
        for change in self.neighbours.changes(row.config):
            config = self.neighbours.changed(row.config, [change])
            if config is None:
                continue
            if config in self.rows:
                around[change] = config
                continue

            # A higher degree does more of what the one before it does, which is looked at first.
            nearer = self.neighbours.nearer(row.config, change)
            if nearer in around:
                around[change] = around[nearer]
            if nearer in asked or nearer in waiting:
                waiting.add(change)
                continue

            changed = knob_named(change[0])
            costs_little = changed.trace is not Trace.OWN or changed.of_head
            if costs_little or self._may_be_better(row, [change], config, slack):
                asked[change] = around[change] = config

        return list(asked.values())

    def _pairs(self, row: Row) -> list[Config]:
        """What two changes make of a config: what is not known yet, and may be better.

        Of what needs traces that were not made yet come the most promising first: they often lead
        to another config, around which the rest is not worth it.
        """
        around = self._around[tier(row.config)][row.config]
        asked = []
        promising: list[Row] = []
        unseen: list[Config] = []
        for pair in pairs_of(self.neighbours.changes(row.config)):
            alone = [self._row(around, change) for change in pair]
            if self._fits(row) and not any(other is None or self._fits(other) for other in alone):
                continue  # where neither fits alone, both together do not

            config = self.neighbours.changed(row.config, pair)
            if config is None or config in self.rows:
                continue
            if any(config == self.neighbours.changed(row.config, [change]) for change in pair):
                continue  # the other one does nothing here, and this one was looked at alone

            # Effects of two changes on each other were seen to make 7 % (streamed weights, and the
            # micro-batch that then fits), so they are predicted where that takes no trace.
            traced = [change for change in pair if knob_named(change[0]).trace is Trace.OWN]
            costs_no_trace = len(traced) < 2 and all(self._row(around, change) for change in traced)
            expected = self._expected(row, pair, config, _OF_PAIRS)
            if expected is None:
                unseen.append(config)
            elif costs_no_trace:
                asked.append(config)
            elif self.merit(expected) > self.merit(row):
                promising.append(expected)

        promising.sort(key=self.merit, reverse=True)
        waiting = [*(expected.config for expected in promising), *unseen]
        return [*asked, *self._first_traced(waiting)]

    def _first_traced(self, configs: Sequence[Config]) -> list[Config]:
        """Of some configs those that were traced, and those of the first few traces that were not
        made yet."""
        traces = dict.fromkeys(map(traced_part, configs))
        new = [trace for trace in traces if trace not in self._traced]
        later = set(new[_AT_ONCE:])

        return [config for config in configs if traced_part(config) not in later]

    def _between(self, name: str, leader: Row) -> list[Config]:
        """Of a tier the configs in which a number of blocks is treated in one way, and which are
        expected to be better than its leader."""
        if self._fractions is None or not self.looks_between:
            return []

        expected = self._fractions.expected(name, self._fits)
        better = [
            row
            for row in expected
            if row.config not in self.rows and self.merit(row) > self.merit(leader)
        ]
        better.sort(key=self.merit, reverse=True)

        return [row.config for row in better[:_AT_ONCE]]

    def _may_be_better(
        self,
        row: Row,
        changes: Sequence[Change],
        config: Config,
        slack: float,
    ) -> bool:
        """Whether what some changes make of a config may be better than it.

        What was never seen may do anything.
        """
        expected = self._expected(row, changes, config, slack)

        return expected is None or self.merit(expected) > self.merit(row)

    def _expected(
        self,
        row: Row,
        changes: Sequence[Change],
        config: Config,
        slack: float,
    ) -> Row | None:
        """The best that some changes of a config may make of it, if they do what they did
        elsewhere; None where one of them was never seen."""
        effects = []
        for change in changes:
            effect = self._effect(row.config, change)
            if effect is None:
                return None

            effects.append(effect)
            if tier(effect[0].config) != tier(config):
                slack = max(slack, _OF_ANOTHER_TIER)

        seconds = [(before.seconds, after.seconds) for before, after in effects]
        nbytes = 0.0
        if not self._fits(row):
            sizes = [(before.nbytes, after.nbytes) for before, after in effects]
            nbytes = _least(row.nbytes, sizes) * (1 - slack)

        return Row(
            config,
            nbytes,
            _least(row.seconds, seconds) * (1 - slack),
        )

    def _effect(self, config: Config, change: Change) -> tuple[Row, Row] | None:
        """A row before and one after such a change of a config, around the one looked at last: of
        the same tier, else of any.

        None where it was never seen.
        """
        knob, _ = change
        own = self._around[tier(config)]
        others = [of_tier for of_tier in self._around.values() if of_tier is not own]
        for around in itertools.chain(
            reversed(own.values()), *(reversed(of_tier.values()) for of_tier in others)
        ):
            before = self._row(around, (knob, config[knob]))
            after = self._row(around, change)
            if before and after and not math.isnan(before.seconds + after.seconds):
                return before, after

        return None

    def _row(self, around: Mapping[Change, Config], change: Change) -> Row | None:
        """What is known of the config with a change."""
        config = around.get(change)
        return None if config is None else self.rows.get(config)

    def _fits(self, row: Row) -> bool:
        return self.merit(row)[0] > 0


def _least(figure: float, changes: Sequence[tuple[float, float]]) -> float:
    """A figure after changes that took others from one value to another: as if their effects were
    added, or multiplied, whichever is less."""
    added = multiplied = figure
    for before, after in changes:
        added += after - before
        multiplied *= after / before

    return max(0.0, min(added, multiplied))
