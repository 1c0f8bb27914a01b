"""Where the memory goes: what the peak of the best of each tier consists of, and how it comes about
in a step."""

import json

from autofit.core.estimate import KINDS, Estimate, Timeline
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import TIERS
from autofit.report.formatting import TIER_TITLES, bound_by, describe, gib, percent, resting_words
from autofit.report.html.svg import Picture, Scale, apart, steps, width_of

KIND_WORDS = {kind: kind for kind in KINDS}
KIND_WORDS |= {"parameters": "weights", "optimizer": "optimizer state", "reduced": "being reduced"}
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
        _bar(picture, across, top, name, timeline, _measured(best))
        top += _ROW

    x = across(usable / GIB)
    words = "budget" if usable == budget.device_bytes else "usable"
    picture.line((x, 2), (x, bottom), "budget")
    picture.text(x - 4, bottom + 10, words, kind="budget-label", anchor="end")

    return picture


def timeline_picture(record: Record, name: str, width: int = 720) -> Picture | None:
    """The memory of one training step of the best of a tier; None where its step was not traced."""
    traced = traced_tiers(record)
    if name not in traced:
        return None

    timeline, _ = traced[name]
    is_wide = width > 500
    height = 230
    margin = 14
    if is_wide:
        margin = 110  # for the names of the bands
    across = Scale(0.0, 1.0, 52, width - margin)
    top = max(timeline.peak_bytes, *map(sum, timeline.moments))
    up = Scale(0.0, top / GIB * 1.06, height - 26, 16)

    label = f"Memory through one training step, best of {TIER_TITLES[name]}"
    picture = Picture(width, height, label)
    picture.root.set("data-across", f"{across.start:g} {across.end:g}")

    _draw_bands(picture, across, up, _thinned(timeline, None if is_wide else _NARROW))
    picture.line((across.start, up.start), (across.end, up.start), "axis")
    picture.scale_up(across.start, up, 4)
    picture.text(4, 11, "GiB", kind="title")
    _name_phases(picture, across, up, timeline)
    if is_wide:
        _name_bands(picture, across.end + 6, up, timeline)
    _mark_peak(picture, across, up, timeline)

    return picture


def moments(timeline: Timeline) -> str:
    """The moments as numbers of GiB, for the tooltip."""
    sizes = [[float(f"{size / GIB:.3g}") for size in moment] for moment in timeline.moments]
    shown = {
        "kinds": list(KIND_WORDS.values()),
        "at": timeline.at,
        "gib": sizes,
    }

    return json.dumps(shown, separators=(",", ":"))


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
    """By tier the timeline of its best, and its measurement, or its prediction where nothing was
    measured."""
    result = record.result
    traced: dict[str, tuple[Timeline, Measurement | Estimate]] = {}
    for name in TIERS:
        best = result.tiers.get(name) or result.predicted_tiers.get(name)
        timeline = record.timelines.get(name)
        if best is not None and timeline is not None and timeline.config == best.config:
            traced[name] = (timeline, best)

    return traced


def _measured(best: Measurement | Estimate) -> int:
    """The bytes of tensors that were measured at the peak; 0 where none were."""
    if isinstance(best, Measurement) and best.peak_bytes:
        return best.peak_bytes.allocated
    return 0


def _bar(
    picture: Picture,
    across: Scale,
    top: float,
    name: str,
    timeline: Timeline,
    measured: int,
) -> None:
    """Draw the peak of a tier as a stacked bar, and where the measured peak ends."""
    sizes = timeline.moments[timeline.fullest]
    picture.text(2, top - 5, f"{TIER_TITLES[name]}: {gib(sum(sizes))} GiB", kind="row")

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

        for words in (f"{KIND_WORDS[kind]} {gib(size)}", KIND_WORDS[kind]):
            if width_of(words) < width - 8:
                picture.text(start + 5, top + 15, words, kind=f"inside {kind}")
                break

    if not measured:
        return
    x = across(measured / GIB)
    words = f"measured {gib(measured)}"
    wide = width_of(words)
    anchor = "middle"
    if x + wide + 4 > picture.width:
        anchor = "end"
    elif x < wide / 2:
        anchor = "start"

    picture.line((x, top - 3), (x, top + _BAR + 3), "measured")
    picture.text(x, top + _BAR + 13, words, kind="tick", anchor=anchor)


def _thinned(timeline: Timeline, most: int | None) -> list[tuple[float, tuple[int, ...]]]:
    """The moments, or of each stretch the fullest, so that there are at most so many."""
    every = list(zip(timeline.at, timeline.moments, strict=True))
    if most is None:
        return every

    stretch = -(-len(every) // most)
    fullest = []
    for start in range(0, len(every), stretch):
        moments_of_it = every[start : start + stretch]
        fullest.append(max(moments_of_it, key=lambda moment: sum(moment[1])))

    return fullest


def _draw_bands(
    picture: Picture,
    across: Scale,
    up: Scale,
    shown: list[tuple[float, tuple[int, ...]]],
) -> None:
    """Draw the kinds of memory, the highest first, so that each lower one covers it."""
    for level in range(len(KINDS), 0, -1):
        points = []
        for at, sizes in shown:
            points.append((across(at), up(sum(sizes[:level]) / GIB)))

        stair = steps(points).removeprefix("M")
        area = f"M{points[0][0]:.1f},{up.start:.1f}L{stair}H{across.end:.1f}V{up.start:.1f}z"
        picture.draw("path", d=area, kind=f"band {KINDS[level - 1]}")


def _name_phases(
    picture: Picture,
    across: Scale,
    up: Scale,
    timeline: Timeline,
) -> None:
    """Draw where each phase of the step begins, with its name where there is room; the last one's
    always."""
    y = up.start + 15
    last, _ = timeline.phases[-1]
    ends = [when for _, when in timeline.phases[1:]] + [1.0]
    for (phase, when), end in zip(timeline.phases, ends, strict=True):
        start = across(when)
        picture.line((start, up.start), (start, up.end), "phase")
        if width_of(phase) < across(end) - start:
            picture.text(start + 3, y, phase, kind="tick")
        elif phase == last:
            picture.text(across.end, y, phase, kind="tick", anchor="end")


def _name_bands(
    picture: Picture,
    x: float,
    up: Scale,
    timeline: Timeline,
) -> None:
    """Names at the right, each at the height of its band at the fullest moment, apart enough to
    read."""
    sizes = timeline.moments[timeline.fullest]
    total = sum(sizes)
    wanted: list[tuple[float, str]] = []
    below = 0
    for index, (kind, size) in enumerate(zip(KINDS, sizes, strict=True)):
        most = max(moment[index] for moment in timeline.moments)
        if most > 0.01 * total:
            wanted.append((-up((below + size / 2) / GIB), kind))
        below += size

    wanted.sort(key=lambda name: name[0])
    heights = apart((height for height, _ in wanted), 14.0)
    for height, (_, kind) in zip(heights, wanted, strict=True):
        y = min(-height + 4, up.start)
        picture.text(x, y, KIND_WORDS[kind], kind=f"name {kind}")


def _mark_peak(
    picture: Picture,
    across: Scale,
    up: Scale,
    timeline: Timeline,
) -> None:
    peak = sum(timeline.moments[timeline.fullest])
    x = across(timeline.at[timeline.fullest])
    y = up(peak / GIB)
    picture.draw(
        "circle",
        cx=x,
        cy=y,
        r=2.6,
        kind="peak",
    )

    words = f"peak {gib(peak)} GiB"
    if x + width_of(words) + 10 > across.end:
        picture.text(x - 6, y + 1, words, kind="peak-label", anchor="end")
    else:
        picture.text(x + 6, y + 1, words, kind="peak-label")
