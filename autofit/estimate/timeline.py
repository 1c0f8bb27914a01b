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
from autofit.estimate.step_trace import Section, Trace
from autofit.estimate.trace import trace

MOST_MOMENTS = 400
_PHASES = ("forward", "backward", "update")
_END = "end"
_Point = tuple[float, list[int]]  # when it is, and the bytes by KINDS


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
    time axis is one event after the other. Of a model too deep to be followed as a whole the first and the last blocks
    are drawn, and a straight line between them."""
    speed = Speed.of(rates, hardware, traced.config) if rates else None
    timed = speed is not None and _edges(traced, speed)[1][-1] > 0
    if not timed:
        speed = None

    begins = traced.of_whole(lambda each: _begins(each, speed))
    _, end = begins.popitem()
    total = end or 1.0
    if traced.shallower is None:
        points = _fullest(_points(traced, hardware, speed), most)
    else:
        drawn = traced.of_whole(lambda each: _ends(each, hardware, speed))
        figures = list(drawn.values())
        width = 1 + len(KINDS)
        points = []
        for start in range(0, len(figures), width):
            when, *live = figures[start : start + width]
            points.append((when, list(map(int, live))))

    workspace = workspace_bytes(hardware)
    peak = peak_of(traced, hardware)
    return Timeline(
        config=traced.config,
        moments=tuple((*live[:-1], live[-1] + workspace) for _, live in points),
        at=tuple(round(when / total, 5) for when, _ in points),
        phases=tuple((phase, round(when / total, 5)) for (_, phase), when in begins.items()),
        timed=timed,
        peak_bytes=peak.nbytes + workspace,
        peak_phase=peak.phase,
        micro_batches=traced.config.gradient_accumulation_steps or 1,
    )


def _edges(traced: Trace, speed: Speed | None) -> tuple[list[int], list[float]]:
    """The events that the parts of a step begin with, and its last; and when that is, in seconds where the speed is
    known, else in events. Those of a part are evenly spaced."""
    spans = traced.spans(*_PHASES)
    lasting: list[float] = [after.events - mark.events for mark, after in spans]
    if speed is not None:
        lasting = [sum(traced.waits([span], speed).values()) for span in spans]
    edges = [spans[0][0].events, *(after.events for _, after in spans)]
    return edges, list(accumulate(lasting, initial=0.0))


def _begins(traced: Trace, speed: Speed | None) -> dict[tuple[int, str], float]:
    """When each phase begins, and when the step ends, by its number and name."""
    _, times = _edges(traced, speed)
    begins: list[tuple[str, float]] = []
    for (mark, _), when in zip(traced.spans(*_PHASES), times, strict=False):
        if not begins or begins[-1][0] != mark.phase:
            begins.append((mark.phase, when))
    begins.append((_END, times[-1]))
    return {(number, phase): when for number, (phase, when) in enumerate(begins)}


def _points(traced: Trace, hardware: Hardware, speed: Speed | None) -> list[_Point]:
    """When each event of the step is, and the bytes by KINDS after it."""
    edges, times = _edges(traced, speed)
    events, live = zip(*_moments(traced, hardware, edges[0], edges[-1]), strict=True)
    return list(zip(np.interp(events, edges, times).tolist(), live, strict=True))


def _ends(
    traced: Trace, hardware: Hardware, speed: Speed | None
) -> dict[tuple[Section, int, str], float]:
    """Of each section its first moment, its fullest and its last: when it is, and the bytes by KINDS."""
    first = traced.spans(*_PHASES)[0][0].events
    points = _points(traced, hardware, speed)[1:]
    figures: dict[tuple[Section, int, str], float] = {}
    for section, events in traced.sections().items():
        if section[0] not in _PHASES or not events:
            continue
        fullest = max(events, key=lambda event: sum(points[event - first][1]))
        for place, event in enumerate((events[0], fullest, events[-1])):
            when, live = points[event - first]
            figures[section, place, _END] = when
            for kind, nbytes in zip(KINDS, live, strict=True):
                figures[section, place, kind] = nbytes
    return figures


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


def _fullest(points: list[_Point], most: int) -> list[_Point]:
    """The fullest moment of each of so many intervals; the first and the last moment stay."""
    if len(points) <= most:
        return points
    inner = points[1:-1]
    edges = [round(index * len(inner) / (most - 2)) for index in range(most - 1)]
    fullest = [
        max(inner[start:end], key=lambda point: sum(point[1])) for start, end in pairwise(edges)
    ]
    return [points[0], *fullest, points[-1]]
