"""What a quick search looks at, and one over many devices, which has too many configs.

Every layout is predicted beside a few usual values of the other knobs. Around the best layout of each
tier every other knob is then changed alone, and what leaves a config far behind is left out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.knobs import KNOBS, Trace, knob_named
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.search.enumeration import MAX_CONFIGS, Enumeration
from autofit.search.space import Space

# Bytes and seconds of each config.
Predict = Callable[[Sequence[Config]], tuple[Sequence[float], Sequence[float]]]
_LAYOUT = tuple(name for name, knob in KNOBS.items() if knob.divides)
# More values of these cost no trace.
_SCALED = tuple(name for name, knob in KNOBS.items() if knob.trace is Trace.SCALED)
_FREE = (*_LAYOUT, *_SCALED)
_RESHARD = "reshard_after_forward"
_WHOLE = 50_000  # configs; to predict more for several devices takes minutes on two cores
_KEPT = 2  # layouts of a tier
_SLOWER = 1.05  # than the best layout of its tier: it is not kept
# A value is left out where it makes the best of every tier so many times slower: the first that leaves
# no more than can be predicted one by one, since of those drawn from more the fastest may be missed.
_BEHIND = (1.1, 1.05, 1.03)

Values = Mapping[str, tuple[Value, ...]]


class Row(NamedTuple):
    """What is predicted of a config: bytes of tensors and seconds of a step."""

    config: Config
    nbytes: float
    seconds: float


def narrowed(
    space: Space,
    workload: Workload,
    hardware: Hardware,
    cap_bytes: float,
    predict: Predict,
    *,
    seed: int,
) -> tuple[Space, str | None]:
    """The space with what is predicted to be among the best within so many bytes, and a note on that;
    the same space where all of it is soon predicted."""
    constraints = techniques.constraints(workload, hardware)
    if hardware.world == 1 or Enumeration(space.knobs, constraints).count().configs <= _WHOLE:
        return space, None

    def rows_of(spaces: Sequence[Values]) -> list[Row]:
        configs: dict[Config, None] = {}
        for knobs in spaces:
            configs |= dict.fromkeys(Enumeration(knobs, constraints).configs(seed))
        rows = map(Row, configs, *predict(list(configs)))
        return [row for row in rows if not math.isnan(row.seconds)]

    usual = {knob: _usual(knob, values) for knob, values in space.knobs.items()}
    contexts = usual.get("context_parallel", ())
    if 1 in contexts:
        rows = rows_of([{**usual, "context_parallel": (1,)}])
        if _one_at_a_time(rows, cap_bytes):
            others = tuple(size for size in contexts if size != 1)
            rows += rows_of([{**usual, "context_parallel": others}])
    else:
        rows = rows_of([usual])

    chosen = best_layouts(rows, cap_bytes)
    if not chosen:
        return space, None

    layouts: dict[str, tuple[Value, ...]] = {}
    for knob, values in space.knobs.items():
        # To gather weights again takes little time, and what it frees may be of more use: both ways
        # are searched.
        if knob in _LAYOUT and knob != _RESHARD:
            # null settles by the others: to all devices beside ddp.
            kept_values = {None, *(row.config[knob] for row in chosen)}
            layouts[knob] = tuple(value for value in values if value in kept_values)

    firsts = [of_tier[0] for of_tier in _tiers(chosen).values()]
    changed = rows_of([knobs for row in firsts for knobs in _changed(row.config, space.knobs)])
    others_of_space = {knob: values for knob, values in space.knobs.items() if knob not in _FREE}
    for behind in _BEHIND:
        kept = layouts | worth_searching(
            others_of_space, [*firsts, *rows, *changed], cap_bytes, behind
        )
        if Enumeration({**space.knobs, **kept}, constraints).count().configs <= MAX_CONFIGS:
            break

    ways = len({_layout_of(row.config) for row in rows})
    gone: dict[str, list[Value]] = {}
    for knob, values in others_of_space.items():
        gone[knob] = [value for value in values if value not in kept[knob]]
    note = (
        f"of {ways} ways to divide the devices, the search looks at those that are predicted to be "
        f"among the best: {_listed({knob: kept[knob] for knob in layouts})}. Of the other knobs it "
        f"leaves out what is predicted to be slower: {_listed(gone)}."
    )
    return dataclasses.replace(space, knobs={**space.knobs, **kept}), note


def _listed(knobs: Mapping[str, Sequence[Value]]) -> str:
    """Knobs with their values, without those that have none."""
    return "; ".join(
        f"{knob} {', '.join(map(str, values))}" for knob, values in knobs.items() if values
    )


def without_micro_batches(space: Space, workload: Workload) -> Space | None:
    """The space of whole batches for a model with BatchNorm, whose statistics would be other ones in
    micro-batches. None where batches may be split, or never are."""
    sizes = space.knobs.get("micro_batch_size", ())
    if len(sizes) < 2 or workload.traits is None or not workload.traits.batch_norm:
        return None
    return dataclasses.replace(space, knobs={**space.knobs, "micro_batch_size": sizes[-1:]})


def with_whole_batches(
    space: Space,
    workload: Workload,
    hardware: Hardware,
    cap_bytes: float,
    predict: Predict,
    *,
    seed: int,
) -> Space:
    """The space without micro-batches for a model with BatchNorm, where any of it is predicted to fit;
    else the same space."""
    whole = without_micro_batches(space, workload)
    if whole is None:
        return space
    configs = Enumeration(whole.knobs, techniques.constraints(workload, hardware)).configs(seed)
    nbytes, _ = predict(configs) if configs else ([], [])
    return whole if any(size <= cap_bytes for size in nbytes) else space


def quick(
    space: Space,
    workload: Workload,
    hardware: Hardware,
    cap_bytes: float,
    predict: Predict,
    *,
    seed: int,
) -> Space | None:
    """The space with a few usual values of what takes a trace each; None where nothing of that is
    predicted to fit. What only saves memory is no part of it where hardly anything is faster than what
    fits without."""
    constraints = techniques.constraints(workload, hardware)
    usual, without = {}, {}  # without what only saves memory
    for name, values in space.knobs.items():
        knob = knob_named(name)
        usual[name] = values if knob.quick or name in _FREE else _usual(name, values)
        without[name] = usual[name][:1] if knob.saves_memory else usual[name]

    for knobs in (without, usual):
        configs = Enumeration(knobs, constraints).configs(seed)
        rows = list(map(Row, configs, *predict(configs))) if len(configs) > 1 else []
        fits = [row.seconds for row in rows if row.nbytes <= cap_bytes]
        any_size = (row.seconds for row in rows if not math.isnan(row.seconds))
        if fits and (knobs == usual or min(fits) <= _BEHIND[0] * min(any_size)):
            return dataclasses.replace(space, knobs=knobs)
    return None


def _one_at_a_time(rows: Sequence[Row], cap_bytes: float) -> bool:
    """Whether a tier's best config computes one sample at a time, so that dividing it may pay; or none
    fits."""
    for of_tier in _tiers(rows).values():
        fitting = [row for row in of_tier if row.nbytes <= cap_bytes]
        if not fitting or min(fitting, key=lambda row: row.seconds).config.micro_batch_size == 1:
            return True
    return not rows


def best_layouts(rows: Sequence[Row], cap_bytes: float) -> list[Row]:
    """A row of each of the best layouts: of each tier the fastest that fit, or else the one that needs
    least memory."""
    chosen: list[Row] = []
    for of_tier in _tiers(rows).values():
        fastest: dict[tuple[Value, ...], Row] = {}
        for row in of_tier:
            layout = _layout_of(row.config)
            is_faster = layout not in fastest or row.seconds < fastest[layout].seconds
            if row.nbytes <= cap_bytes and is_faster:
                fastest[layout] = row

        ranked = sorted(fastest.values(), key=lambda row: row.seconds)[:_KEPT]
        chosen += [row for row in ranked if row.seconds <= _SLOWER * ranked[0].seconds]
        if not ranked:
            chosen.append(min(of_tier, key=lambda row: row.nbytes))
    return chosen


def worth_searching(
    values: Values, rows: Sequence[Row], cap_bytes: float, behind: float
) -> dict[str, tuple[Value, ...]]:
    """Of the values of each knob those of some config that fits and is at most so many times slower than
    the first of its tier; where that does not fit, those of all that need no more memory than it:
    together they may."""
    kept: dict[str, set[Value]] = {knob: set() for knob in values}
    for first, *others in _tiers(rows).values():
        if first.nbytes <= cap_bytes:
            fitting = [row for row in (first, *others) if row.nbytes <= cap_bytes]
            near = [row for row in fitting if row.seconds <= behind * first.seconds]
        else:
            near = [row for row in (first, *others) if row.nbytes <= first.nbytes]
        for row in near:
            for knob in values:
                kept[knob].add(row.config[knob])

    worth: dict[str, tuple[Value, ...]] = {}
    for knob, listed in values.items():
        found = tuple(value for value in listed if value in kept[knob])
        worth[knob] = found or listed  # what settles by other knobs may be none of those listed
    return worth


def _tiers(rows: Sequence[Row]) -> dict[str, list[Row]]:
    tiers: dict[str, list[Row]] = {}
    for row in rows:
        tiers.setdefault(tier(row.config), []).append(row)
    return tiers


def _changed(config: Config, values: Values) -> list[Values]:
    """The spaces around a config: in each another knob has all its values. What needs more memory, but
    less time, may fit once weights are given back after the forward."""
    around: dict[str, tuple[Value, ...]] = {knob: (config[knob],) for knob in values}
    around |= {knob: offered for knob, offered in values.items() if knob in _SCALED}
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


def _usual(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    knob = knob_named(name)
    if name in _FREE and not knob.usual:
        return values
    wanted = knob.usual or knob.preferred or (techniques.technique_named(name).off,)
    found = tuple(value for value in wanted if value in values)
    if not knob.usual:
        found = found[:1]
    return found or values[-1:]  # the last needs most memory, and should be fast
