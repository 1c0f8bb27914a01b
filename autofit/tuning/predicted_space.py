"""What a child process predicts of a space: the best config of each tier, and those around it.

Rough figures rank configs. Only a config's own estimate, which follows a whole step, tells whether
it surely fits: so the best of each tier is followed, and the search goes on with what that tells of
the others until one does.
"""

import dataclasses
import functools
import itertools
import json
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError, ProbeError
from autofit.core.estimate import Estimate, Timeline
from autofit.core.files import write_cache_text
from autofit.core.hardware import Hardware
from autofit.core.knobs import Trace, knob_named
from autofit.core.layout import Layout
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.estimate.figures import SpacePredictor
from autofit.estimate.processes import Workers
from autofit.estimate.rates import rates_for
from autofit.estimate.resting import resting_of
from autofit.estimate.timeline import timeline_of
from autofit.estimate.trace import trace
from autofit.search.enumeration import Enumeration
from autofit.search.objectives import Objective
from autofit.search.ranking import Figures, Ranking
from autofit.tuning.fractions import Fractions
from autofit.tuning.local_search import LocalSearch, Merit, Neighbours
from autofit.tuning.narrowing import BytesAndSeconds, Row, Values, usual_values
from autofit.tuning.target import estimate_on

_FEW = 200  # configs: of so few all are predicted
_ROUNDS = 12  # configs of a tier to follow before none counts as surely fitting
_BETWEEN = (1, 2)  # rounds in which a number of blocks may still be better than what surely fits
_CLEAR = 0.005  # of what surely fits: a smaller gain is none
_SURELY_TOO_LARGE = 1.3  # times the usable memory: a rough figure beyond needs no closer look
# Shares of the time that there is, before any config is followed: when no more are looked at, and
# when those that are must be traced.
_LOOK_SHARE = 0.5
_TRACE_SHARE = 0.6
# Later: as many rounds of following before all must be there. A round is begun if there is time
# for most of what the longest one took, which followed more configs.
_LOOK_ROUNDS = 1.5
_TRACE_ROUNDS = 1.2
_FOLLOW_ROUNDS = 0.9
_LITTLE_MORE = 1.15  # times what is done
_FOLLOWED = 5  # traces of shallow models that take as long as following a step

Followed = tuple[Estimate, Timeline]
_Kind = tuple[str, bool, bool]


@dataclass(frozen=True)
class Question:
    """The space to predict, and the rule by which its configs are ranked.

    Attributes:
        knobs: the values of each.
        host_known: whether the user said what memory the host has.
        other_caps: what tensors may take in other budgets that are of interest.
        progress: a file to tell the progress in.
        until: when the answer is to be there, by `time.monotonic`.
    """

    knobs: Values
    hardware: Hardware
    budget: Budget
    ranking: Ranking
    host_known: bool
    other_caps: tuple[int, ...]
    progress: Path
    until: float = math.inf


@dataclass(frozen=True)
class Answer:
    """What was predicted.

    Attributes:
        rows: of all configs that were.
        followed: by tier the best config that surely fits, else one that may.
        close: by tier how many configs were too close to it to call; without those of which only
            the smallest was followed, as no other may fit.
        cut_short: whether there was no time to look at all that may be better.
    """

    rows: list[Row]
    followed: dict[str, Followed] = field(default_factory=dict)
    close: dict[str, int] = field(default_factory=dict)
    cut_short: bool = False


def search_space(workload: Workload, question: Question) -> Answer:
    """Find the best config of each tier."""
    return SpaceSearch(workload, question).answer()


class SpaceSearch:
    """Searches a space for the best config of each tier.

    Attributes:
        local: all that was predicted, and what lies around it.
    """

    def __init__(self, workload: Workload, question: Question) -> None:
        self.workload = workload
        self.question = question
        hardware = question.hardware
        self._cap = question.budget.cap_bytes(hardware.device, hardware.context_bytes)
        # The upper end of the estimates of configs that were followed, and by kind of config what
        # these are, with the ratio of such an end to the rough figure.
        self._upper_ends: dict[Config, float] = {}
        self._growths: dict[_Kind, dict[Config, float]] = {}
        self._expected_growths: dict[Config, float] = {}
        self._answers: dict[Config, Followed | None] = {}  # None: it cannot be traced
        self._followed: dict[str, Followed] = {}
        self._close: dict[str, int] = {}
        self._begin = time.monotonic()
        self._look_until = math.inf  # of the tier that is looked at
        self._following = 0.0  # seconds of the longest round of it
        self._workers = Workers(None, self.follow)

        constraints = techniques.constraints(workload, hardware)
        enumeration = Enumeration(question.knobs, constraints)
        self._starts = list(enumeration.configs(most=_FEW))

        if enumeration.count().configs > _FEW:
            usual = Enumeration(_usual(question.knobs), constraints).configs()
            # Of tiers that have no usual config the first one drawn, which needs little memory.
            known = {tier(config) for config in usual}
            first: dict[str, Config] = {}
            for config in self._starts:
                if tier(config) not in known:
                    first.setdefault(tier(config), config)

            self._starts = [*usual, *first.values()]

        self._tiers = list(dict.fromkeys(map(tier, self._starts)))
        self._progress = _Progress(question, len(self._tiers))
        sizes = [
            size
            for config in self._starts[:1]
            for size in _of_every_size(workload, hardware, question.knobs, config)
        ]

        self._predictor = SpacePredictor(
            workload,
            hardware,
            [*self._starts, *sizes],
            workers=self._workers,
            within=self._end(_TRACE_SHARE, _TRACE_ROUNDS) - self._begin,
            host_bytes=question.budget.host_bytes,
            notify=self._progress.traces_left,
        )

        neighbours = Neighbours(question.knobs, constraints)
        fractions = None
        if workload.traits and workload.traits.blocks:
            fractions = Fractions(
                workload.traits.blocks,
                question.knobs,
                constraints,
            )

        self.local = LocalSearch(
            neighbours,
            self._predictor,
            self.merit,
            self._is_over,
            fractions,
        )

    def answer(self) -> Answer:
        """Follow the best config of each tier until one surely fits, and say what was seen.

        Raises:
            ProbeError: nothing was predicted in time; RefusedError: every config is impossible for
            this model.
        """
        self.local.add(self._starts)
        self._show_best()

        cut_short = False
        for number in range(_ROUNDS):
            # How many blocks fit is asked once it is known by how much rough figures are exceeded:
            # of such a config every block is followed.
            self.local.looks_between = number > 0
            begin = time.monotonic()
            end = self._end(_LOOK_SHARE, _LOOK_ROUNDS)
            self._predictor.trace_until(self._end(_TRACE_SHARE, _TRACE_ROUNDS))
            asked = {}
            for place, name in enumerate(self._tiers):
                is_sure = self._is_sure(name)
                if is_sure and number not in _BETWEEN and not self._is_outdone(name):
                    continue

                # Each tier is looked at for as long as any other.
                share = (place + 1) / len(self._tiers)
                self._look_until = begin + share * (end - begin)
                preferred = self._preferred(name)
                if preferred and not (is_sure and preferred in self._upper_ends):
                    asked[name] = preferred

                cut_short |= self._is_over()

            if cut_short and self._nothing_known():
                raise ProbeError(
                    "no config could be predicted in the time that there was.",
                    "Give a longer --time-limit.",
                )

            if not asked or (number and self._is_late()):
                break

            self._follow_all(asked)

        asked = {}
        for name in self._tiers:
            smallest = None if name in self._followed else self._smallest(name)
            if smallest and not self._is_late():
                asked[name] = smallest

        self._follow_all(asked)

        # What would be best in other budgets is looked for among what was traced for this one.
        for cap in self.question.other_caps:
            self._cap = cap
            for name in self._tiers:
                self.local.refine(name, tracing=False)

        if self._nothing_known():
            # Following one says why: the model, say, has layers that take no such weights.
            trace(
                self.workload,
                self._starts[0],
                self.question.hardware,
            )

        rows = list(self.local.rows.values())
        return Answer(
            rows,
            self._followed,
            self._close,
            cut_short,
        )

    def _nothing_known(self) -> bool:
        return all(math.isnan(row.seconds) for row in self.local.rows.values())

    def _end(self, share: float, rounds: float) -> float:
        """When a share of the time is over; once configs were followed, when there is only time for
        so many more rounds of that."""
        until = self.question.until
        if not self._following:
            return self._begin + share * (until - self._begin)

        return until - rounds * self._following

    def _is_late(self) -> bool:
        """Whether there is no time to follow more configs."""
        return time.monotonic() > self.question.until - _FOLLOW_ROUNDS * self._following

    def _is_over(self) -> bool:
        """Whether the time for the tier that is looked at is over."""
        return time.monotonic() > self._look_until

    def _is_sure(self, name: str) -> bool:
        """Whether a config of a tier was followed that surely fits."""
        return name in self._followed and self._followed[name][0].verdict == "yes"

    def _is_outdone(self, name: str) -> bool:
        """Whether something known of a tier is expected to be clearly better than what surely fits,
        since it was learnt how much more than its rough figure such a config needs."""
        *place, value = self.merit(self.local.rows[self._followed[name][0].config])
        clearly = (*place, value * (1 + max(self.question.ranking.tolerance, _CLEAR)))
        return any(self.merit(row) > clearly for row in self.local.tiers[name].values())

    def _preferred(self, name: str) -> Config | None:
        """The config to recommend of a tier: of those too close to its best to call, and of what
        one more change makes of them.

        None where none may fit.
        """
        ranking = self.question.ranking
        while best := self.local.refine(name):
            self._show_best()
            if not self._fits(best):
                return None

            figures = []
            for config, row in self.local.tiers[name].items():
                if self.merit(row)[:2] == self.merit(best)[:2]:
                    figures.append(
                        Figures(
                            config,
                            self._value(row),
                            row.nbytes,
                        )
                    )

            index = ranking.preferred(figures)
            assert index is not None, "the best is among them"
            preferred = figures[index].config
            around = self.local.singles(
                self.local.rows[preferred],
                ranking.tolerance,
            )
            if not around or self._is_over():
                self._close[name] = len(ranking.tied(figures)) - 1
                return preferred

            self.local.add(around)

        return None

    def merit(self, row: Row) -> Merit:
        """What fits by its value, the rest by its bytes.

        On an unknown host, configs that keep part of the training there come last.
        """
        if not self._fits(row):
            return (0.0, 0.0, -row.nbytes)

        on_device = self.question.host_known or not _keeps_on_host(row.config)

        return (1.0, float(on_device), self._value(row))

    def _fits(self, row: Row) -> bool:
        if row.config in self._answers and self._answers[row.config] is None:
            return False
        if row.config in self._upper_ends:
            return self._upper_ends[row.config] <= self._cap

        return row.nbytes * self._expected_growth(row.config) <= self._cap

    def _expected_growth(self, config: Config) -> float:
        """By how much the upper end of a config's estimate is expected to exceed its rough figure:
        as that of the config of its kind that was followed and has most in common with it."""
        if config not in self._expected_growths:
            nearest = (math.inf, 1.0)
            values = list(config.values())
            for other, growth in self._growths.get(_kind_of(config), {}).items():
                differing = sum(
                    map(
                        operator.ne,
                        values,
                        other.values(),
                    )
                )
                nearest = min(nearest, (differing, growth))

            self._expected_growths[config] = nearest[1]

        return self._expected_growths[config]

    def _value(self, row: Row) -> float:
        """What the objective says of a row."""
        rate = self.workload.effective_batch_size / row.seconds if row.seconds else 0.0
        return rate / self.question.ranking.objective.discount(row.config)

    def _smallest(self, name: str) -> Config | None:
        """The config of a tier that needs least memory, unless that is hopeless."""
        rows = self.local.tiers.get(name, {}).values()
        least = min(rows, key=attrgetter("nbytes"), default=None)
        if least is None or not least.nbytes <= _SURELY_TOO_LARGE * self._cap:
            return None

        return least.config

    def _follow_all(self, by_tier: dict[str, Config]) -> None:
        """Follow a config of each tier, and learn how much more than its rough figure it needs.

        Kept is what surely fits, and the first of each tier that may.
        """
        begin = time.monotonic()
        unknown = [config for config in by_tier.values() if config not in self._answers]
        found = self._workers.map(self.follow, unknown)
        self._answers |= zip(unknown, found, strict=True)
        self._following = max(self._following, time.monotonic() - begin)
        self._progress.followed(len(unknown))

        for name, config in by_tier.items():
            answer = self._answers[config]
            if answer is None:
                continue

            estimate, _ = answer
            grown = estimate.high - estimate.breakdown["context"]
            self._upper_ends[config] = grown
            growth = grown / self.local.rows[config].nbytes
            self._growths.setdefault(_kind_of(config), {})[config] = growth
            self._expected_growths.clear()

            if estimate.verdict == "yes" or (
                estimate.verdict == "maybe" and name not in self._followed
            ):
                self._followed[name] = answer

    def follow(self, config: Config) -> Followed | None:
        """The estimate of a config and the memory through its step; None where it cannot be
        traced."""
        hardware = self.question.hardware
        try:
            traced = trace(self.workload, config, hardware)
        except AutofitError:
            return None

        resting = resting_of(traced, self.workload, hardware)
        estimate = estimate_on(
            traced,
            self.workload,
            hardware,
            self.question.budget,
        )
        line = timeline_of(traced, hardware, rates=rates_for(hardware))

        return (
            dataclasses.replace(estimate, resting=resting),
            dataclasses.replace(line, resting=resting, bottleneck=estimate.bottleneck),
        )

    def _show_best(self) -> None:
        """Tell what leads so far."""
        best = max(self.local.rows.values(), key=self.merit, default=None)
        if best and self._fits(best):
            rate = self.workload.effective_batch_size / best.seconds
            tokens = None
            if self.workload.unit == "tokens":
                tokens = rate * (self.workload.sequence_length or 1)

            self._progress.leads(best.config, rate, tokens)


class _Progress:
    """Tells how far the search has come, as a share of the traces that it is expected to take."""

    def __init__(self, question: Question, tiers: int) -> None:
        self._path = question.progress
        self._begin = time.monotonic()
        self._best: dict[str, object] = {}
        self._done = 0
        self._left = 0

        # About as many as values of knobs change what is traced, and a few steps that are followed;
        # on several devices for each degree by which these can be divided.
        values = 0
        for knob, offered in question.knobs.items():
            if knob_named(knob).trace is Trace.OWN:
                values += len(offered)

        degrees = len(_divisors(question.hardware.world)) - 1
        self._expected = tiers * max(1, degrees) * (values + 2 * _FOLLOWED)

    def traces_left(self, left: int) -> None:
        """Note that so many traces are left of those that are under way."""
        self._done += max(0, self._left - left)
        self._left = left
        self._tell()

    def followed(self, steps: int) -> None:
        """Note that so many steps were followed."""
        self._done += _FOLLOWED * steps
        self._tell()

    def leads(self, config: Config, rate: float, tokens: float | None) -> None:
        """Note the best config so far, and its samples and tokens a second."""
        self._best = {
            "config": dict(config),
            "samples_per_second": rate,
            "tokens_per_second": tokens,
        }
        self._tell()

    def _tell(self) -> None:
        # A search that takes longer than expected is taken to need a little more.
        expected = max(self._expected, _LITTLE_MORE * self._done + self._left + 1)
        share = self._done / expected
        seconds = time.monotonic() - self._begin
        left = seconds / share - seconds if self._done else None
        told = {"share": share, "seconds_left": left, **self._best}
        write_cache_text(self._path, json.dumps(told))


def _usual(knobs: Values) -> Values:
    """Usual values of each knob, and one way to divide the devices."""
    usual = usual_values(knobs)
    for knob, values in knobs.items():
        if knob_named(knob).divides:
            usual[knob] = values[:1]

    return usual


def _of_every_size(
    workload: Workload,
    hardware: Hardware,
    knobs: Values,
    config: Config,
) -> list[Config]:
    """Configs of every micro-batch, rank and number of shards that any of the space may have."""
    sizes = _divisors(workload.effective_batch_size)
    ranks = {config.lora_rank, *knobs.get("lora_rank", ())}
    found = [
        config.replace(micro_batch_size=size, lora_rank=rank)
        for size, rank in itertools.product(sizes, ranks)
    ]
    if hardware.world > 1:
        layouts = [Layout(hardware.world // shard, shard) for shard in _divisors(hardware.world)]
        found += [config.replace(**layout.knobs) for layout in layouts]

    return found


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if not number % size]


def _kind_of(config: Config) -> _Kind:
    """What makes an estimate's interval wide: its tier, compiling, and memory of the host."""
    return tier(config), config.compile != "none", _keeps_on_host(config)


_keeps_on_host = functools.cache(techniques.keeps_on_host)


def predict_drawn(
    workload: Workload,
    hardware: Hardware,
    configs: Sequence[Config],
    knobs: Values,
    cap: float,
    objective: Objective,
    *,
    within: float,
    processes: int | None,
    **options: Any,
) -> tuple[BytesAndSeconds, list[Row]]:
    """The figures of configs that were drawn from a space; and rows of others that fit, around the
    best of each tier.

    On an 8B model within 24 GiB, of whose 746,472 configs 300,000 were drawn, the best of a tier
    lay up to 5 % behind what one or two changes make of it. To look takes less than a second, since
    what is needed was traced for the drawn ones.

    Args:
        knobs: the values of the space.
        cap: bytes that a config may take.
        within: as of SpacePredictor, for the drawn configs and for the others each.
        processes: as of Workers.
        options: as of SpacePredictor.
    """

    def merit(row: Row) -> Merit:
        if row.nbytes > cap:
            return (0.0, -row.nbytes)
        return (1.0, -row.seconds * objective.discount(row.config))

    workers = Workers(processes)
    sizes = _of_every_size(workload, hardware, knobs, configs[0])
    predict = SpacePredictor(
        workload, hardware, [*configs, *sizes], workers=workers, within=within, **options
    )
    try:
        figures = predict(configs)
        best: dict[str, Row] = {}
        for row in map(Row, configs, *figures):
            name = tier(row.config)
            is_known = not math.isnan(row.nbytes + row.seconds)
            if is_known and (name not in best or merit(row) > merit(best[name])):
                best[name] = row

        end = time.monotonic() + within
        neighbours = Neighbours(knobs, techniques.constraints(workload, hardware))
        local = LocalSearch(neighbours, predict, merit, lambda: time.monotonic() > end)
        local.add(row.config for row in best.values())
        for name in best:
            local.refine(name)
    finally:
        workers.close()

    drawn = set(configs)
    others = [row for row in local.rows.values() if row.config not in drawn and row.nbytes <= cap]

    return figures, others
