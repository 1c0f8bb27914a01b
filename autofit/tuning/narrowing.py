"""What a quick search looks at, and one over many devices, where all knobs beside all ways to divide them are too many.

Every layout is predicted beside a few usual values of the other knobs. Around the best layout of each tier every other
knob is then changed alone, and what leaves a config far behind is left out.
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

Predict = Callable[[Sequence[Config]], tuple[Sequence[float], Sequence[float]]]  # bytes and seconds of each
_LAYOUT = tuple(name for name, knob in KNOBS.items() if knob.divides)
_SCALED = tuple(name for name, knob in KNOBS.items() if knob.trace is Trace.SCALED)  # more values cost no trace
_RESHARD = "reshard_after_forward"
_WHOLE = 50_000  # configs; to predict more for several devices takes minutes on two cores
_KEPT, _SLOWER = 2, 1.05  # layouts of a tier: so many, and none that is so many times slower than the best
# A value is left out where it makes the best of every tier so many times slower: the first that leaves no more than can
# be predicted one by one, since of those drawn from more the fastest may be missed.
_BEHIND = (1.1, 1.05, 1.03)

Values = Mapping[str, tuple[Value, ...]]


class Row(NamedTuple):
    """What is predicted of a config: bytes of tensors and seconds of a step."""

    config: Config
    nbytes: float
    seconds: float


def narrowed(
    space: Space, workload: Workload, hardware: Hardware, cap_bytes: float, predict: Predict, *, seed: int
) -> tuple[Space, str | None]:
    """The space with what is predicted to be among the best within so many bytes, and a note on that; the same space
    where all of it is soon predicted."""
    constraints = techniques.constraints(workload, hardware)
    if hardware.world == 1 or Enumeration(space.knobs, constraints).count().configs <= _WHOLE:
        return space, None

    def rows_of(spaces: Sequence[Values]) -> list[Row]:
        configs = {config: None for knobs in spaces for config in Enumeration(knobs, constraints).configs(seed)}
        rows = map(Row, configs, *predict(list(configs)))
        return [row for row in rows if not math.isnan(row.seconds)]

    usual = {knob: _usual(knob, values) for knob, values in space.knobs.items()}
    contexts = usual.get("context_parallel", ())
    if 1 in contexts:
        rows = rows_of([{**usual, "context_parallel": (1,)}])
        if _one_at_a_time(rows, cap_bytes):
            rows += rows_of([{**usual, "context_parallel": tuple(size for size in contexts if size != 1)}])
    else:
        rows = rows_of([usual])

    chosen = best_layouts(rows, cap_bytes)
    if not chosen:
        return space, None
    layouts: dict[str, tuple[Value, ...]] = {}
    for knob, values in space.knobs.items():
        # To gather weights again takes little time, and what it frees may be of more use: both ways are searched.
        if knob in _LAYOUT and knob != _RESHARD:
            # null settles by the others: to all devices beside ddp.
            kept_values = {None, *(row.config[knob] for row in chosen)}
            layouts[knob] = tuple(value for value in values if value in kept_values)

    firsts = [of_tier[0] for of_tier in _tiers(chosen).values()]
    changed = rows_of([each for row in firsts for each in _changed(row.config, space.knobs)])
    others = {knob: values for knob, values in space.knobs.items() if knob not in (*_LAYOUT, *_SCALED)}
    for behind in _BEHIND:
        kept = layouts | worth_searching(others, [*firsts, *rows, *changed], cap_bytes, behind)
        if Enumeration({**space.knobs, **kept}, constraints).count().configs <= MAX_CONFIGS:
            break
    every = len({_layout_of(row.config) for row in rows})
    note = f"of {every} ways to divide the devices, the search looks at those that are predicted to be among the best"
    words = "; ".join(f"{knob} {', '.join(map(str, kept[knob]))}" for knob in layouts)
    left_out = (
        f"{knob} {', '.join(map(str, gone))}"
        for knob, values in others.items()
        if (gone := [value for value in values if value not in kept[knob]])
    )
    note = f"{note}: {words}. Of the other knobs it leaves out what is predicted to be slower: {'; '.join(left_out)}."
    return dataclasses.replace(space, knobs={**space.knobs, **kept}), note


def without_micro_batches(space: Space, workload: Workload) -> Space | None:
    """The space of whole batches for a model with BatchNorm, whose statistics would be other ones in micro-batches.
    None where batches may be split, or never are."""
    sizes = space.knobs.get("micro_batch_size", ())
    if len(sizes) < 2 or workload.traits is None or not workload.traits.batch_norm:
        return None
    return dataclasses.replace(space, knobs={**space.knobs, "micro_batch_size": sizes[-1:]})


def with_whole_batches(
    space: Space, workload: Workload, hardware: Hardware, cap_bytes: float, predict: Predict, *, seed: int
) -> Space:
    """The space without micro-batches for a model with BatchNorm, where any of it is predicted to fit; else the same
    space."""
    whole = without_micro_batches(space, workload)
    if whole is None:
        return space
    configs = Enumeration(whole.knobs, techniques.constraints(workload, hardware)).configs(seed)
    nbytes, _ = predict(configs) if configs else ([], [])
    return whole if any(each <= cap_bytes for each in nbytes) else space


def quick(
    space: Space, workload: Workload, hardware: Hardware, cap_bytes: float, predict: Predict, *, seed: int
) -> Space | None:
    """The space with a few usual values of what takes a trace each; None where nothing of that is predicted to fit.
    What only saves memory is no part of it where hardly anything is faster than what fits without."""
    constraints = techniques.constraints(workload, hardware)
    usual, without = {}, {}  # without what only saves memory
    for name, values in space.knobs.items():
        knob = knob_named(name)
        is_whole = knob.quick or name in (*_LAYOUT, *_SCALED)
        usual[name] = values if is_whole else _usual(name, values)
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
    """Whether the best config of a tier computes one sample at a time, so that dividing it may pay; or none fits."""
    for of_tier in _tiers(rows).values():
        fitting = [row for row in of_tier if row.nbytes <= cap_bytes]
        if not fitting or min(fitting, key=lambda row: row.seconds).config.micro_batch_size == 1:
            return True
    return not rows


def best_layouts(rows: Sequence[Row], cap_bytes: float) -> list[Row]:
    """A row of each of the best layouts: of each tier the fastest that fit, or else the one that needs least memory."""
    chosen: list[Row] = []
    for of_tier in _tiers(rows).values():
        fastest: dict[tuple[Value, ...], Row] = {}
        for row in of_tier:
            layout = _layout_of(row.config)
            if row.nbytes <= cap_bytes and (layout not in fastest or row.seconds < fastest[layout].seconds):
                fastest[layout] = row
        ranked = sorted(fastest.values(), key=lambda row: row.seconds)[:_KEPT]
        chosen += [row for row in ranked if row.seconds <= _SLOWER * ranked[0].seconds]
        if not ranked:
            chosen.append(min(of_tier, key=lambda row: row.nbytes))
    return chosen


def worth_searching(
    values: Values, rows: Sequence[Row], cap_bytes: float, behind: float
) -> dict[str, tuple[Value, ...]]:
    """Of the values of each knob those of some config that fits and is at most so many times slower than the first of
    its tier; where that does not fit, those of all that need no more memory than it: together they may."""
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
    # What settles by other knobs may be none of the values that are listed.
    return {knob: tuple(each for each in values[knob] if each in found) or values[knob] for knob, found in kept.items()}


def _tiers(rows: Sequence[Row]) -> dict[str, list[Row]]:
    tiers: dict[str, list[Row]] = {}
    for row in rows:
        tiers.setdefault(tier(row.config), []).append(row)
    return tiers


def _changed(config: Config, values: Values) -> list[Values]:
    """The spaces around a config: in each another knob has all its values. What needs more memory, but less time, may
    fit once weights are given back after the forward."""
    around = {knob: offered if knob in _SCALED else (config[knob],) for knob, offered in values.items()}
    if not config.lora_rank:
        around["lora_rank"] = (0,)

    spaces: list[Values] = []
    for knob, offered in values.items():
        if len(offered) > 1 and knob not in (*_LAYOUT, *_SCALED):
            other = {**around, knob: offered}
            if knob_named(knob).saves_memory and _RESHARD in values:
                other[_RESHARD] = values[_RESHARD]
            spaces.append(other)
    return spaces


def _layout_of(config: Config) -> tuple[Value, ...]:
    return tuple(config[knob] for knob in _LAYOUT)


def _usual(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    knob = knob_named(name)
    if name in (*_LAYOUT, *_SCALED) and not knob.usual:
        return values
    wanted = knob.usual or knob.preferred or (techniques.technique_named(name).off,)
    found = tuple(value for value in wanted if value in values)
    if not knob.usual:
        found = found[:1]
    return found or values[-1:]  # the last needs most memory, and should be fast
