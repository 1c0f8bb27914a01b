"""The memory of one training step, moment by moment, from a trace; bounded to what a picture can show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.estimate import KINDS, Timeline
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.peak import peak_of, rounded
from autofit.estimate.rates import Rates, rates_for
from autofit.estimate.recorder import HOST, Mark
from autofit.estimate.roofline import Speed, Work, passes_of
from autofit.estimate.scaling import ONE, UNSCALED
from autofit.estimate.trace import Trace, trace

MOST_MOMENTS = 400
_PHASES = ("forward", "backward", "update")


def timelines(workload: Workload, hardware: Hardware, configs: Sequence[Config]) -> list[Timeline | None]:
    """One for each config, None where its step cannot be followed."""
    return [_followed(workload, hardware, config) for config in configs]


def _followed(workload: Workload, hardware: Hardware, config: Config) -> Timeline | None:
    try:
        traced = trace(workload, config, hardware)
    except AutofitError:  # a model that cannot be followed was told about before the first probe
        return None
    return timeline_of(traced, hardware, rates=rates_for(hardware))


def timeline_of(traced: Trace, hardware: Hardware, *, rates: Rates | None = None, most: int = MOST_MOMENTS) -> Timeline:
    """What lives during the step of a trace, at most so many moments of it.

    Args:
        rates: how fast the device is, for when things happen; None: one allocation after the other.
    """
    spans = [(mark, after) for mark, after in pairwise(traced.marks) if mark.phase in _PHASES]
    first, last = spans[0][0].events, spans[-1][1].events
    weights = (
        _seconds(traced, hardware, spans, rates) if rates else [after.events - mark.events for mark, after in spans]
    )
    timed = rates is not None and sum(weights) > 0
    starts = _starts(weights if timed else [after.events - mark.events for mark, after in spans])
    workspace = workspace_bytes(hardware) if hardware.device == "cuda" else 0
    shown = _fullest(list(_moments(traced, hardware, first, last)), most)
    peak = peak_of(traced, hardware)
    return Timeline(
        config=traced.config,
        moments=tuple((*moment[:-1], moment[-1] + workspace) for _, moment in shown),
        at=tuple(round(_when(event, spans, starts), 5) for event, _ in shown),
        phases=tuple(_beginnings(spans, starts)),
        timed=timed,
        peak_bytes=peak.nbytes + workspace,
        peak_phase=peak.phase,
        micro_batches=int(traced.config["gradient_accumulation_steps"] or 1),
    )


def _moments(traced: Trace, hardware: Hardware, first: int, last: int) -> Iterator[tuple[int, list[int]]]:
    """(the event, bytes by KINDS) of each moment of the step, the one before its first event too."""
    kinds = _kinds(traced, first)
    live = [0] * len(KINDS)
    sizes: dict[int, int] = {}
    for event, (storage, nbytes) in enumerate(rounded(traced, hardware)):
        if event == first:
            yield event, list(live)
        if event >= last:
            return
        live[kinds[storage]] += nbytes - sizes.get(storage, 0)
        sizes[storage] = nbytes
        if event >= first:
            yield event, list(live)


def _kinds(traced: Trace, first: int) -> dict[int, int]:
    """What each storage is, as a place in KINDS: what a forward made and the backward finds is an activation."""
    made: dict[int, int] = {}
    ended: dict[int, int] = {}
    for event, each in enumerate(traced.events):
        made.setdefault(each.storage, event)
        if each.nbytes == 0:
            ended[each.storage] = event
    backward = next((mark.events for mark in traced.marks if mark.phase == "backward"), len(traced.events))

    def kind(storage: int) -> str:
        label = traced.labels.get(storage)
        if label in KINDS:
            return label
        waits = first <= made[storage] < backward <= ended.get(storage, len(traced.events))
        return "activations" if waits or label in ("inputs", HOST) else "temporary"

    return {storage: KINDS.index(kind(storage)) for storage in made}


def _fullest(moments: list[tuple[int, list[int]]], most: int) -> list[tuple[int, list[int]]]:
    """Of each of so many stretches the fullest moment; the first and the last stay."""
    if len(moments) <= most:
        return moments
    inner = moments[1:-1]
    edges = [round(place * len(inner) / (most - 2)) for place in range(most - 1)]
    kept = [max(inner[start:end], key=lambda each: sum(each[1])) for start, end in pairwise(edges)]
    return [moments[0], *kept, moments[-1]]


def _seconds(traced: Trace, hardware: Hardware, spans: list[tuple[Mark, Mark]], rates: Rates) -> list[float]:
    """What the operators of each span are predicted to take."""
    config = traced.config
    cuda = hardware.device == "cuda"
    speed = Speed(rates, asynchronous=cuda, tf32=config["precision"] == "tf32", compiled=config["compile"] != "none")
    return [
        sum(
            float(each[0])
            for each in Work.of(
                traced.costs[mark.costs : after.costs], ONE, UNSCALED, after.dispatched - mark.dispatched
            )
            .seconds(speed, passes=passes_of(config, mark.phase))
            .values()
        )
        for mark, after in spans
    ]


def _starts(weights: Sequence[float]) -> list[float]:
    """Where each span begins and the last one ends, from 0 to 1."""
    total = sum(weights) or 1.0
    starts = [0.0]
    for weight in weights:
        starts.append(starts[-1] + weight / total)
    return starts


def _when(event: int, spans: list[tuple[Mark, Mark]], starts: list[float]) -> float:
    """When an event is: those of a span follow one another evenly."""
    place = next(place for place, (mark, after) in enumerate(spans) if event < after.events or place == len(spans) - 1)
    mark, after = spans[place]
    share = (event - mark.events) / max(1, after.events - mark.events)
    return starts[place] + share * (starts[place + 1] - starts[place])


def _beginnings(spans: list[tuple[Mark, Mark]], starts: list[float]) -> Iterator[tuple[str, float]]:
    before = ""
    for (mark, _), start in zip(spans, starts, strict=False):
        if mark.phase != before:
            yield mark.phase, round(start, 5)
            before = mark.phase
