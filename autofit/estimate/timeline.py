"""The memory of one training step over time, from a trace, reduced to what a plot can show."""

from collections import Counter
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
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.estimator import times_of
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
    """The timelines of configs, traced at the same time.

    Args:
        processes: that trace; None: one per core. `parallel_map` says who may ask for more than
            one.
    """
    # Measured in a fork where this process is still to be forked: matrix products start threads.
    rates = rates_for(hardware) if processes == 1 else forked(lambda: rates_for(hardware))()
    with parallel_map(partial(timeline, workload, hardware, rates), processes) as timelines_of:
        return timelines_of(configs)


def timeline(
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None,
    config: Config,
) -> Timeline | None:
    """The timeline of a config; None where its step cannot be traced."""
    try:
        traced = trace(workload, config, hardware)
    except AutofitError:  # a model that cannot be traced was reported before the first probe
        return None

    bottleneck = None
    if rates:
        bottleneck = times_of(traced, workload, hardware, rates)["bottleneck"]

    return replace(
        timeline_of(traced, hardware, rates=rates),
        resting=resting_of(traced, workload, hardware),
        bottleneck=bottleneck,
    )


def timeline_of(
    traced: Trace,
    hardware: Hardware,
    *,
    rates: Rates | None = None,
    most: int = MOST_MOMENTS,
) -> Timeline:
    """What is live during the step of a trace.

    Args:
        rates: how fast the device is; None: the time axis is one event after the other.
        most: moments that are shown.
    """
    speed = Speed.of(rates, hardware, traced.config) if rates else None
    timed = speed is not None and _edges(traced, speed)[1][-1] > 0
    if not timed:
        speed = None

    begins = _begins(traced, speed)
    *_, (_, end) = begins
    total = end or 1.0
    points = _fullest(
        _points(traced, hardware, speed),
        most,
    )

    workspace = workspace_bytes(hardware)
    peak = peak_of(traced, hardware)

    return Timeline(
        config=traced.config,
        moments=tuple((*live[:-1], live[-1] + workspace) for _, live in points),
        at=tuple(round(when / total, 5) for when, _ in points),
        phases=tuple((phase, round(when / total, 5)) for phase, when in begins[:-1]),
        timed=timed,
        peak_bytes=peak.nbytes + workspace,
        peak_phase=peak.phase,
        micro_batches=traced.config.gradient_accumulation_steps or 1,
    )


def _edges(traced: Trace, speed: Speed | None) -> tuple[list[int], list[float]]:
    """The events that the parts of a step begin with, and its last; and when that is, in seconds
    where the speed is known, else in events.

    Those of a part are evenly spaced.
    """
    drawn = traced.whole or traced
    spans = drawn.spans(*_PHASES)
    lasting: list[float] = [after.events - mark.events for mark, after in spans]
    if speed is not None:
        lasting = _seconds(traced, speed)

    edges = [
        spans[0][0].events,
        *(after.events for _, after in spans),
    ]

    return edges, list(accumulate(lasting, initial=0.0))


def _seconds(traced: Trace, speed: Speed) -> list[float]:
    """How long each part of a step takes."""
    followed = _seconds_by_stretch(traced, speed)
    if traced.whole is None:
        return list(followed.values())

    # Of the blocks between those that were followed it is known what they take together.
    known = traced.of_whole(lambda part: _seconds_by_stretch(part, speed))
    totals = traced.of_whole(lambda part: _seconds_by_phase(part, speed))
    stretches = _stretches(traced.whole)
    unknown = Counter(phase for phase, *_ in stretches) - Counter(phase for phase, *_ in known)
    of_phase = dict.fromkeys(_PHASES, 0.0)
    for (phase, *_), seconds in known.items():
        of_phase[phase] += seconds

    found = []
    for stretch in stretches:
        phase = stretch[0]
        if stretch in known:
            found.append(known[stretch])
        else:
            found.append(max(0.0, totals[phase] - of_phase[phase]) / unknown[phase])

    return found


def _seconds_by_phase(traced: Trace, speed: Speed) -> dict[str, float]:
    """How long each phase of a step takes."""
    return {name: sum(traced.waits(traced.spans(name), speed).values()) for name in _PHASES}


def _stretches(traced: Trace) -> list[Section]:
    """Those of a step."""
    return [stretch for stretch in traced.stretches()[:-1] if stretch[0] in _PHASES]


def _seconds_by_stretch(traced: Trace, speed: Speed) -> dict[Section, float]:
    """How long each stretch of a step takes that was followed."""
    spans = traced.spans(*_PHASES)
    seconds = [sum(traced.waits([span], speed).values()) for span in spans]

    return dict(zip(_stretches(traced), seconds, strict=True))


def _begins(traced: Trace, speed: Speed | None) -> list[tuple[str, float]]:
    """When each phase begins, by its name, and when the step ends."""
    _, times = _edges(traced, speed)
    drawn = traced.whole or traced
    begins: list[tuple[str, float]] = []
    for (mark, _), when in zip(drawn.spans(*_PHASES), times, strict=False):
        if not begins or begins[-1][0] != mark.phase:
            begins.append((mark.phase, when))

    begins.append((_END, times[-1]))

    return begins


def _points(traced: Trace, hardware: Hardware, speed: Speed | None) -> list[_Point]:
    """When each event of the step is, and the bytes by KINDS after it."""
    edges, times = _edges(traced, speed)
    drawn = traced.whole or traced
    events, live = zip(
        *_moments(
            drawn,
            hardware,
            edges[0],
            edges[-1],
        ),
        strict=True,
    )

    return list(zip(np.interp(events, edges, times).tolist(), live, strict=True))


def _moments(
    traced: Trace,
    hardware: Hardware,
    first: int,
    last: int,
) -> Iterator[tuple[int, list[int]]]:
    """(event, bytes by KINDS) at each event of the step, and before its first one."""
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
    """The index in KINDS of each storage: what a forward makes and the backward finds is an
    activation."""
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
    fullest = []
    for start, end in pairwise(edges):
        fullest.append(max(inner[start:end], key=lambda point: sum(point[1])))

    return [points[0], *fullest, points[-1]]
