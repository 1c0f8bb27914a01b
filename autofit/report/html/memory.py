"""Where the memory goes: what the peak of the best of each tier consists of, and how it comes about
in a step."""

import json
import math
from collections.abc import Sequence

from autofit.core.estimate import KINDS, Estimate, Timeline
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import TIERS
from autofit.report.formatting import TIER_TITLES, bound_by, describe, gib, percent, resting_words
from autofit.report.html.svg import Picture, Plot, Scale, apart, steps, width_of

KIND_WORDS = {kind: kind for kind in KINDS}
KIND_WORDS |= {
    "parameters": "weights",
    "optimizer": "optimizer state",
    "reduced": "being reduced",
}
Moment = tuple[float, tuple[int, ...]]  # when, as a share of the step, and the bytes by kind
_BAR = 22  # pixels of a bar
_ROW = 62  # pixels from one bar to the next
_NARROW = 160  # moments that a small picture can show


def breakdown(record: Record, width: int = 720) -> Picture | None:
    """A stacked bar for the best of each tier, at the fullest moment of a step.

    None where no step was traced.
    """
    traced = traced_tiers(record)
    if not traced:
        return None

    budget = record.result.budget
    usable = budget.cap_bytes(record.result.hardware.device)
    most = usable
    for timeline, best in traced.values():
        most = max(most, timeline.peak_bytes, _measured(best))

    bottom = _ROW * len(traced) + 4
    label = "What the peak memory of the best of each tier consists of"
    picture = Picture(width, bottom + 30, label)
    across = Scale(0.0, most / GIB * 1.02, 2, width - 8)

    top = 16
    for name, (timeline, best) in traced.items():
        sizes = timeline.moments[timeline.fullest]
        title = f"{TIER_TITLES[name]}: {gib(sum(sizes))} GiB"
        picture.text(2, top - 5, title, kind="row")

        _stack(picture, across, top, sizes)
        if measured := _measured(best):
            _mark_measured(picture, across(measured / GIB), top, measured)
        top += _ROW

    x = across(usable / GIB)
    words = "usable"
    if usable == budget.device_bytes:
        words = "budget"
    picture.line((x, 2), (x, bottom), "budget")
    picture.text(x - 4, bottom + 10, words, kind="budget-label", anchor="end")

    return picture


def _stack(
    picture: Picture,
    across: Scale,
    top: float,
    sizes: Sequence[int],
) -> None:
    """Draw sizes by kind as a stacked bar, each with its name and size where there is room."""
    below = 0
    for kind, size in zip(KINDS, sizes, strict=True):
        if not size:
            continue

        start = across(below / GIB)
        below += size
        width = across(below / GIB) - start
        drawn = max(width - 0.8, 0.5)
        picture.draw(
            "rect",
            x=start,
            y=top,
            width=drawn,
            height=_BAR,
            kind=f"band {kind}",
        )

        words = f"{KIND_WORDS[kind]} {gib(size)}"
        if width_of(words) >= width - 8:
            words = KIND_WORDS[kind]
        if width_of(words) < width - 8:
            picture.text(start + 5, top + 15, words, kind=f"inside {kind}")


def _mark_measured(
    picture: Picture,
    x: float,
    top: float,
    measured: int,
) -> None:
    """Draw where the measured peak ends, with its size below, inside the picture."""
    words = f"measured {gib(measured)}"
    wide = width_of(words)
    anchor = "middle"
    if x + wide + 4 > picture.width:
        anchor = "end"
    elif x < wide / 2:
        anchor = "start"

    bottom = top + _BAR
    picture.line((x, top - 3), (x, bottom + 3), "measured")
    picture.text(x, bottom + 13, words, kind="tick", anchor=anchor)


def timeline_picture(record: Record, name: str, width: int = 720) -> Picture | None:
    """The memory of one training step of the best of a tier; None where its step was not traced."""
    traced = traced_tiers(record)
    if name not in traced:
        return None

    timeline, _ = traced[name]
    moments = list(zip(timeline.at, timeline.moments, strict=True))
    highest = max(timeline.peak_bytes, *map(sum, timeline.moments))

    height = 230
    margin = 14
    is_wide = width > 500
    if is_wide:
        margin = 110  # for the names of the bands
    else:
        moments = _thinned(moments, _NARROW)

    plot = Plot(
        (width, height),
        f"Memory through one training step, best of {TIER_TITLES[name]}",
        across=Scale(0.0, 1.0, 52, width - margin),
        up=Scale(0.0, highest / GIB * 1.06, height - 26, 16),
    )
    left = plot.across.start
    right = plot.across.end
    bottom = plot.up.start
    plot.root.set("data-across", f"{left:g} {right:g}")

    _draw_bands(plot, moments)
    plot.line((left, bottom), (right, bottom), "axis")
    plot.ticks_up(4)
    plot.text(4, 11, "GiB", kind="title")
    _name_phases(plot, timeline)
    if is_wide:
        _name_bands(plot, timeline)
    _mark_peak(plot, timeline)

    return plot


def moments(timeline: Timeline) -> str:
    """The moments as numbers of GiB, for the tooltip."""
    shown = {
        "kinds": list(KIND_WORDS.values()),
        "at": timeline.at,
        "gib": list(map(_rounded, timeline.moments)),
    }
    return json.dumps(shown, separators=(",", ":"))


def _rounded(sizes: Sequence[int]) -> list[float]:
    """Sizes in GiB, to three figures."""
    return [float(f"{size / GIB:.3g}") for size in sizes]


def timeline_words(record: Record, name: str) -> str:
    """What a timeline shows and how far it is from the measurement, in a sentence or two."""
    timeline, best = traced_tiers(record)[name]
    predicted = timeline.peak_bytes
    measured = _measured(best)
    sentences = [f"{TIER_TITLES[name]}: {describe(timeline.config)}."]
    if measured:
        how = "as measured"
        off = abs(predicted - measured) / measured
        if off >= 0.0005:
            more = "more" if predicted > measured else "less"
            how = f"{percent(off)} {more} than measured"

        figures = f"{gib(predicted)} GiB predicted, {gib(measured)} GiB measured"
        sentences.append(f"Peak {figures}: {how}.")

    if timeline.peak_phase not in ("forward", "backward", "update"):
        sentences.append("The peak is reached before the step, while the model is made.")
    if timeline.micro_batches > 1:
        shown = f"the last of {timeline.micro_batches} micro-batches, and the update"
        sentences.append(f"Shown is {shown}.")

    if timeline.resting:
        sentences.append(resting_words(timeline.resting))
    if timeline.bottleneck:
        bound = bound_by(timeline.bottleneck, timeline.config)
        sentences.append(f"By what is predicted it is {bound}.")

    if timeline.config.get("compile") not in (None, "none"):
        sentences.append(
            "Compiled code cannot be followed: the memory is that of the operations before they are "
            "compiled."
        )

    return " ".join(sentences)


def traced_tiers(record: Record) -> dict[str, tuple[Timeline, Measurement | Estimate]]:
    """The timeline of each tier's best, with what was measured of that config.

    Where nothing was measured, with what is predicted of it.
    """
    result = record.result
    traced: dict[str, tuple[Timeline, Measurement | Estimate]] = {}
    for name in TIERS:
        best = result.tiers.get(name) or result.predicted_tiers.get(name)
        timeline = record.timelines.get(name)
        if best is None or timeline is None:
            continue
        if timeline.config == best.config:
            traced[name] = (timeline, best)

    return traced


def _measured(best: Measurement | Estimate) -> int:
    """The bytes of tensors that were measured at the peak; 0 where none were."""
    if isinstance(best, Measurement) and best.peak_bytes:
        return best.peak_bytes.allocated
    return 0


def _thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """The fullest moment of each stretch of the step, of at most so many stretches."""

    def held(moment: Moment) -> int:
        _, sizes = moment
        return sum(sizes)

    length = math.ceil(len(moments) / most)
    fullest = []
    for start in range(0, len(moments), length):
        stretch = moments[start : start + length]
        fullest.append(max(stretch, key=held))

    return fullest


def _draw_bands(plot: Plot, moments: Sequence[Moment]) -> None:
    """Draw the kinds of memory, the highest first, so that each lower one covers it."""
    right = plot.across.end
    bottom = plot.up.start
    for level in range(len(KINDS), 0, -1):
        points = []
        for when, sizes in moments:
            height = sum(sizes[:level]) / GIB
            points.append(plot.at(when, height))

        left, _ = points[0]
        start = f"M{left:.1f},{bottom:.1f}"
        stair = steps(points).replace("M", "L")
        end = f"H{right:.1f}V{bottom:.1f}z"
        plot.path(start + stair + end, f"band {KINDS[level - 1]}")


def _name_phases(plot: Plot, timeline: Timeline) -> None:
    """Draw where each phase of the step begins, with its name where there is room.

    The last one always has its name.
    """
    bottom = plot.up.start
    top = plot.up.end
    starts = [plot.across(when) for _, when in timeline.phases]
    ends = [*starts[1:], plot.across.end]
    last = len(starts) - 1

    for number, (phase, _) in enumerate(timeline.phases):
        start = starts[number]
        end = ends[number]
        plot.line((start, bottom), (start, top), "phase")
        if width_of(phase) < end - start:
            plot.text(start + 3, bottom + 15, phase, kind="tick")
        elif number == last:
            plot.text(end, bottom + 15, phase, kind="tick", anchor="end")


def _name_bands(plot: Plot, timeline: Timeline) -> None:
    """Name each band at the right, at its height at the fullest moment; names never overlap."""
    sizes = timeline.moments[timeline.fullest]
    total = sum(sizes)

    # Pixels grow downwards: names in rising order are those of negative heights.
    names = []
    below = 0
    for index, kind in enumerate(KINDS):
        size = sizes[index]
        most = max(moment[index] for moment in timeline.moments)
        if most > 0.01 * total:
            middle = plot.up((below + size / 2) / GIB)
            names.append((-middle, kind))

        below += size

    names.sort(key=lambda name: name[0])
    heights = apart((height for height, _ in names), 14.0)
    for height, (_, kind) in zip(heights, names, strict=True):
        y = min(-height + 4, plot.up.start)
        plot.text(
            plot.across.end + 6,
            y,
            KIND_WORDS[kind],
            kind=f"name {kind}",
        )


def _mark_peak(plot: Plot, timeline: Timeline) -> None:
    """Draw a dot at the fullest moment, with its size to the side where there is room."""
    moment = timeline.fullest
    peak = sum(timeline.moments[moment])
    x, y = plot.at(timeline.at[moment], peak / GIB)
    plot.circle((x, y), 2.6, "peak")

    words = f"peak {gib(peak)} GiB"
    left = x + 6
    anchor = None
    if left + width_of(words) + 4 > plot.across.end:
        left = x - 6
        anchor = "end"
    plot.text(left, y + 1, words, kind="peak-label", anchor=anchor)
