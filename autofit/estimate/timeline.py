"""The memory of one training step over time, from a trace, reduced to what a plot can show."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.estimate import KINDS, Timeline
from autofit.core.forks import forked
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.estimator import times_of
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.peak import peak_of, rounded
from autofit.estimate.processes import parallel_map
from autofit.estimate.rates import Rates, rates_for
from autofit.estimate.recorder import HOST
from autofit.estimate.resting import resting_of
from autofit.estimate.roofline import Speed
from autofit.estimate.trace import Trace, trace

MOST_MOMENTS = 400


def timelines(
    workload: Workload,
    hardware: Hardware,
    configs: Sequence[Config],
    *,
    processes: int | None = None,
) -> list[Timeline | None]:
    """The timelines of configs, traced at the same time by as many processes, None: one per core; see `parallel_map`
    for who may ask for more than one."""
    # Measured in a fork where this process is still to be forked: matrix products start threads.
    rates = rates_for(hardware) if processes == 1 else forked(lambda: rates_for(hardware))()
    with parallel_map(partial(timeline, workload, hardware, rates), processes) as each:
        return each(configs)


def timeline(
    workload: Workload, hardware: Hardware, rates: Rates | None, config: Config
) -> Timeline | None:
    """The timeline of a config; None where its step cannot be traced."""
    try:
        traced = trace(workload, config, hardware)
    except AutofitError:  # a model that cannot be traced was reported before the first probe
        return None
    return replace(
        timeline_of(traced, hardware, rates=rates),
        resting=resting_of(traced, workload, hardware),
        bottleneck=times_of(traced, workload, hardware, rates)["bottleneck"] if rates else None,
    )


def timeline_of(
    traced: Trace, hardware: Hardware, *, rates: Rates | None = None, most: int = MOST_MOMENTS
) -> Timeline:
    """What is live during the step of a trace, at `most` moments of it; without `rates` (how fast the device is) the
    time axis is one event after the other."""
    spans = traced.spans("forward", "backward", "update")
    first, last = spans[0][0].events, spans[-1][1].events
    speed = Speed.of(rates, hardware, traced.config) if rates else None
    seconds = [sum(traced.waits([span], speed).values()) for span in spans] if speed else []
    timed = sum(seconds) > 0
    weights = seconds if timed else [after.events - mark.events for mark, after in spans]
    total = sum(weights) or 1.0
    # of spans, from 0 to 1
    starts = list(accumulate((weight / total for weight in weights), initial=0.0))
    edges = [first, *(after.events for _, after in spans)]  # the events of a span are evenly spaced
    workspace = workspace_bytes(hardware)
    shown = _fullest(list(_moments(traced, hardware, first, last)), most)
    peak = peak_of(traced, hardware)
    phases = [
        (mark.phase, round(start, 5)) for (mark, _), start in zip(spans, starts, strict=False)
    ]
    return Timeline(
        config=traced.config,
        moments=tuple((*moment[:-1], moment[-1] + workspace) for _, moment in shown),
        at=tuple(
            round(float(time), 5)
            for time in np.interp([event for event, _ in shown], edges, starts)
        ),
        phases=tuple(now for before, now in pairwise([("", 0.0), *phases]) if before[0] != now[0]),
        timed=timed,
        peak_bytes=peak.nbytes + workspace,
        peak_phase=peak.phase,
        micro_batches=traced.config.gradient_accumulation_steps or 1,
    )


def _moments(
    traced: Trace, hardware: Hardware, first: int, last: int
) -> Iterator[tuple[int, list[int]]]:
    """(event, bytes by KINDS) at each event of the step, and before its first one."""
    kinds, live = _kinds(traced, first), [0] * len(KINDS)
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
    """The index in KINDS of each storage: what a forward makes and the backward finds is an activation."""
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for index, event in enumerate(traced.events):
        made.setdefault(event.storage, index)
        if event.nbytes == 0:
            freed[event.storage] = index
    backward = traced.start("backward")

    def kind(storage: int) -> str:
        label = traced.labels.get(storage)
        if label in KINDS:
            return label
        waits = first <= made[storage] < backward <= freed.get(storage, len(traced.events))
        return "activations" if waits or label in ("inputs", HOST) else "temporary"

    return {storage: KINDS.index(kind(storage)) for storage in made}


def _fullest(moments: list[tuple[int, list[int]]], most: int) -> list[tuple[int, list[int]]]:
    """The fullest moment of each of so many intervals; the first and the last moment stay."""
    if len(moments) <= most:
        return moments
    inner = moments[1:-1]
    edges = [round(index * len(inner) / (most - 2)) for index in range(most - 1)]
    fullest = [
        max(inner[start:end], key=lambda moment: sum(moment[1])) for start, end in pairwise(edges)
    ]
    return [moments[0], *fullest, moments[-1]]
