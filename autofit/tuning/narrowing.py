"""What a quick search looks at, and one over many devices, which has too many configs.

Every layout is predicted beside a few usual values of the other knobs. Around the best layout of
each tier every other knob is then changed alone, and what leaves a config far behind is left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.events import Notify
from autofit.core.hardware import Hardware
from autofit.core.knobs import KNOBS, Knob, Trace, knob_named
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.search.enumeration import MAX_CONFIGS, Enumeration
from autofit.search.space import Space

BytesAndSeconds = tuple[Sequence[float], Sequence[float]]  # of tensors and of a step, by config
Predict = Callable[[Sequence[Config]], BytesAndSeconds]
Values = Mapping[str, tuple[Value, ...]]  # to try, of each knob
Knobs = dict[str, tuple[Value, ...]]

_LAYOUT = tuple(name for name, knob in KNOBS.items() if knob.divides)
# More values of these cost no trace.
_SCALED = tuple(name for name, knob in KNOBS.items() if knob.trace is Trace.SCALED)
_FREE = (*_LAYOUT, *_SCALED)
MICRO_BATCH = "micro_batch_size"
_RESHARD = "reshard_after_forward"
_WHOLE = 50_000  # configs; to predict more for several devices takes minutes on two cores
_KEPT = 2  # layouts of a tier
_SLOWER = 1.05  # than the best layout of its tier: it is not kept
# A value is left out where it makes the best of every tier so many times slower: the first of these
# factors that leaves no more configs than can be predicted one by one. Of configs drawn at random
# from more, the fastest may be missed.
_BEHIND = (1.1, 1.05, 1.03)
# The share of the memory within which a config surely fits, before any was measured.
_SURELY = 0.95


class Row(NamedTuple):
    """What is predicted of a config: bytes of tensors and seconds of a step."""

    config: Config
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Narrowing:
    """Tells by predictions which part of a space is worth searching.

    Every method raises what `predict` raises.

    Attributes:
        cap_bytes: what tensors may take.
        seed: of the configs drawn from a space that is too large to list.
    """

    workload: Workload
    hardware: Hardware
    cap_bytes: float
    predict: Predict
    seed: int

    def part_of(
        self,
        space: Space,
        *,
        settings: Mapping[str, object],
        fast: bool,
        notify: Notify,
    ) -> Space:
        """The part of a space that a search looks at.

        Args:
            settings: knobs that the user set. How batches are split is not decided here if the
                user did.
            fast: whether usual values suffice.
            notify: hears of what is left out.
        """
        space, note = self.narrowed(space)
        if note:
            notify(note)

        if MICRO_BATCH not in settings:
            whole = without_micro_batches(space, self.workload)
            if fast and whole:
                found = self.quick(whole)
                if found:
                    return found

            space = self.with_whole_batches(space)

        if fast:
            return self.quick(space) or space
        return space

    def narrowed(self, space: Space) -> tuple[Space, str | None]:
        """The space with what is predicted to be among the best, and a note on what is left out.

        The same space, without a note, where predicting all of it takes little time.
        """
        if self.hardware.world == 1 or self._enumerated(space.knobs).count().configs <= _WHOLE:
            return space, None

        usual = usual_values(space.knobs)
        contexts = usual.get("context_parallel", ())
        if 1 in contexts:
            rows = self._known_rows([{**usual, "context_parallel": (1,)}])
            if self._one_at_a_time(rows):
                others = tuple(size for size in contexts if size != 1)
                rows += self._known_rows([{**usual, "context_parallel": others}])
        else:
            rows = self._known_rows([usual])

        chosen = best_layouts(rows, self.cap_bytes)
        if not chosen:
            return space, None

        layouts: Knobs = {}
        other_knobs: Knobs = {}
        for knob, values in space.knobs.items():
            if knob not in _FREE:
                other_knobs[knob] = values
            # To gather weights again takes little time, and what it frees may be of more use: both
            # ways are searched.
            if knob in _LAYOUT and knob != _RESHARD:
                # null settles by the others: to all devices beside ddp.
                kept = {None, *(row.config[knob] for row in chosen)}
                layouts[knob] = tuple(value for value in values if value in kept)

        firsts = [of_tier[0] for of_tier in _by_tier(chosen).values()]
        around: list[Values] = []
        for row in firsts:
            around += _changed(row.config, space.knobs)

        rows_by_preference = [
            *firsts,
            *rows,
            *self._known_rows(around),
        ]

        for behind in _BEHIND:
            worth = worth_searching(
                other_knobs,
                rows_by_preference,
                self.cap_bytes,
                behind,
            )
            knobs = {**space.knobs, **layouts, **worth}
            if self._enumerated(knobs).count().configs <= MAX_CONFIGS:
                break

        ways = len({_layout_of(row.config) for row in rows})
        gone = {}
        for knob, values in other_knobs.items():
            gone[knob] = [value for value in values if value not in worth[knob]]

        note = (
            f"of {ways} ways to divide the devices, the search looks at those that are predicted "
            f"to be among the best: {_listed(layouts)}. Of the other knobs it leaves out what is "
            f"predicted to be slower: {_listed(gone)}."
        )

        return replace(space, knobs=knobs), note

    def with_whole_batches(self, space: Space) -> Space:
        """The space without micro-batches for a model with BatchNorm, where any of it is predicted
        to fit; else the same space."""
        whole = without_micro_batches(space, self.workload)
        if whole is None:
            return space

        configs = self._enumerated(whole.knobs).configs(self.seed)
        if configs and any(row.nbytes <= self.cap_bytes for row in self._rows(configs)):
            return whole

        return space

    def quick(self, space: Space) -> Space | None:
        """The space with a few usual values of what takes a trace each; None where nothing of that
        is predicted to fit.

        What only saves memory is no part of it where hardly anything is faster than what fits
        without.
        """
        usual: Knobs = {}
        not_saving: Knobs = {}
        for name, values in space.knobs.items():
            knob = knob_named(name)
            if not knob.quick and name not in _FREE:
                few = _usual(name, values)
                # Those that work the same cost no trace.
                work = {knob.same_work.get(value, value) for value in few}
                values = (*few, *(value for value in values if value in work.difference(few)))

            usual[name] = values
            not_saving[name] = values[:1] if knob.saves_memory else _different(knob, values)

        for knobs in (not_saving, usual):
            configs = self._enumerated(knobs).configs(self.seed)
            rows = self._rows(configs) if len(configs) > 1 else []
            fitting = [row.seconds for row in rows if row.nbytes <= self.cap_bytes]
            if not fitting:
                continue

            known = [row.seconds for row in rows if not math.isnan(row.seconds)]
            if knobs == usual:
                return replace(
                    space,
                    knobs={**usual, **self._savings(space, usual, rows)},
                )

            if min(fitting) <= _BEHIND[0] * min(known):
                return replace(space, knobs=knobs)

        return None

    def _savings(self, space: Space, usual: Knobs, rows: Sequence[Row]) -> Knobs:
        """The values of what saves memory that may be better than usual ones.

        Of each tier the fastest that fits is looked at, and the fastest that surely does, with all
        values of what saves memory there.
        """
        found: Knobs = {}
        for first in self._fastest(rows):
            for name, values in space.knobs.items():
                knob = knob_named(name)
                if not knob.saves_memory or first.config[name] in (None, knob.off):
                    continue

                around: dict[str, tuple[Value, ...]] = {}
                for other, its_values in usual.items():
                    around[other] = its_values if other in _FREE else (first.config[other],)

                others = self._known_rows([{**around, name: values}])
                worth = worth_searching(
                    {name: values},
                    [first, *others],
                    self.cap_bytes,
                    _BEHIND[0],
                )
                found[name] = tuple(dict.fromkeys((*found.get(name, usual[name]), *worth[name])))

        return found

    def _fastest(self, rows: Sequence[Row]) -> list[Row]:
        """Of each tier the fastest row that fits, and the fastest that fits with room to spare."""
        found: dict[Config, Row] = {}
        for of_tier in _by_tier(rows).values():
            for cap_bytes in (self.cap_bytes, _SURELY * self.cap_bytes):
                fitting = [row for row in of_tier if row.nbytes <= cap_bytes]
                if fitting:
                    first = min(fitting, key=attrgetter("seconds"))
                    found[first.config] = first

        return list(found.values())

    @cached_property
    def _constraints(self) -> Constraints:
        return techniques.constraints(self.workload, self.hardware)

    def _enumerated(self, knobs: Values) -> Enumeration:
        return Enumeration(knobs, self._constraints)

    def _rows(self, configs: Sequence[Config]) -> list[Row]:
        return list(
            map(
                Row,
                configs,
                *self.predict(configs),
            )
        )

    def _known_rows(self, spaces: Sequence[Values]) -> list[Row]:
        """The rows of all configs of some spaces, without those that cannot be predicted."""
        configs: dict[Config, None] = {}
        for knobs in spaces:
            configs |= dict.fromkeys(self._enumerated(knobs).configs(self.seed))

        return [row for row in self._rows(list(configs)) if not math.isnan(row.seconds)]

    def _one_at_a_time(self, rows: Sequence[Row]) -> bool:
        """Whether a tier's best config computes one sample at a time, so that dividing it may pay;
        or none fits."""
        for of_tier in _by_tier(rows).values():
            fitting = [row for row in of_tier if row.nbytes <= self.cap_bytes]
            if not fitting:
                return True
            if min(fitting, key=attrgetter("seconds")).config.micro_batch_size == 1:
                return True

        return not rows


def without_micro_batches(space: Space, workload: Workload) -> Space | None:
    """The space of whole batches for a model with BatchNorm, whose statistics would be other ones
    in micro-batches.

    None where batches may be split, or never are.
    """
    sizes = space.knobs.get(MICRO_BATCH, ())
    if len(sizes) < 2 or workload.traits is None or not workload.traits.batch_norm:
        return None

    return replace(space, knobs={**space.knobs, MICRO_BATCH: sizes[-1:]})


def best_layouts(rows: Sequence[Row], cap_bytes: float) -> list[Row]:
    """A row of each of the best layouts: of each tier the fastest that fit, or else the one that
    needs least memory."""
    chosen: list[Row] = []
    for of_tier in _by_tier(rows).values():
        fastest: dict[tuple[Value, ...], Row] = {}
        for row in of_tier:
            layout = _layout_of(row.config)
            is_faster = layout not in fastest or row.seconds < fastest[layout].seconds
            if row.nbytes <= cap_bytes and is_faster:
                fastest[layout] = row

        ranked = sorted(fastest.values(), key=attrgetter("seconds"))[:_KEPT]
        chosen += [row for row in ranked if row.seconds <= _SLOWER * ranked[0].seconds]
        if not ranked:
            chosen.append(min(of_tier, key=attrgetter("nbytes")))

    return chosen


def worth_searching(
    values: Values,
    rows: Sequence[Row],
    cap_bytes: float,
    behind: float,
) -> Knobs:
    """The values of each knob that configs close to the best of their tier have.

    These are the configs that fit and are at most `behind` times slower than the first of their
    tier. Where that one does not fit, they are those that need no more memory than it: their values
    together may fit.
    """
    kept: dict[str, set[Value]] = {knob: set() for knob in values}
    for of_tier in _by_tier(rows).values():
        first = of_tier[0]
        most_bytes = first.nbytes
        most_seconds = math.inf
        if first.nbytes <= cap_bytes:
            most_bytes = cap_bytes
            most_seconds = behind * first.seconds

        for row in of_tier:
            if row.nbytes <= most_bytes and row.seconds <= most_seconds:
                for knob, found in kept.items():
                    found.add(row.config[knob])

    worth: Knobs = {}
    for knob, listed in values.items():
        found_values = tuple(value for value in listed if value in kept[knob])
        worth[knob] = found_values or listed  # what settles by other knobs may be none of the list

    return worth


def _by_tier(rows: Iterable[Row]) -> dict[str, list[Row]]:
    tiers: dict[str, list[Row]] = {}
    for row in rows:
        tiers.setdefault(tier(row.config), []).append(row)

    return tiers


def _changed(config: Config, values: Values) -> list[Values]:
    """The spaces around a config: in each another knob has all its values.

    What needs more memory, but less time, may fit once weights are given back after the forward.
    """
    around: Knobs = {}
    for knob, offered in values.items():
        around[knob] = offered if knob in _SCALED else (config[knob],)
    if not config.lora_rank:
        around["lora_rank"] = (0,)

    spaces: list[Values] = []
    for knob, offered in values.items():
        if len(offered) > 1 and knob not in _FREE:
            other = {**around, knob: offered}
            if knob_named(knob).saves_memory and _RESHARD in values:
                other[_RESHARD] = values[_RESHARD]

            spaces.append(other)

    return spaces


def _layout_of(config: Config) -> tuple[Value, ...]:
    return tuple(config[knob] for knob in _LAYOUT)


def usual_values(values: Values) -> Knobs:
    """All values of what costs no trace, and of what divides devices; of other knobs usual ones."""
    return {knob: _usual(knob, offered) for knob, offered in values.items()}


def _usual(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """The usual ones of a knob's values; else its off value, or the last one, which needs most
    memory and should be fast."""
    knob = knob_named(name)
    if name in _FREE and not knob.usual:
        return values

    wanted = knob.usual or knob.preferred or (techniques.technique_named(name).off,)
    found = tuple(value for value in wanted if value in values)
    if not knob.usual:
        found = found[:1]

    return found or values[-1:]


def _different(knob: Knob, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Without what only saves memory: optimizers and the like that are related to another value and
    no more faithful.

    Each would cost a trace of an update.
    """
    if knob.trace is not Trace.UNTRACED:
        return values

    kept = []
    for value in values:
        other = knob.relative(value)
        is_same = other != value and other in values
        if is_same and knob.fidelity.get(value, 0) <= knob.fidelity.get(other, 0):
            continue

        kept.append(value)

    return tuple(kept)


def _listed(knobs: Mapping[str, Sequence[Value]]) -> str:
    """Knobs with their values, without those that have none."""
    parts = []
    for knob, values in knobs.items():
        if values:
            parts.append(f"{knob} {', '.join(map(str, values))}")

    return "; ".join(parts)
