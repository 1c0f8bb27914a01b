"""Where the memory goes: what the peak of the best of each tier consists of, and how it comes about in a step."""

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
_BAR, _ROW = 22, 62
_NARROW = 160  # moments that a small picture can show


def breakdown(record: Record, width: int = 720) -> Picture | None:
    """A stacked bar for the best of each tier, at the fullest moment of a step; None where no step was traced."""
    traced = traced_tiers(record)
    if not traced:
        return None
    budget = record.result.budget
    usable, bottom = budget.cap_bytes(record.result.hardware.device), _ROW * len(traced) + 4
    picture = Picture(
        width, bottom + 30, "What the peak memory of the best of each tier consists of"
    )
    most = max(
        usable, *(max(timeline.peak_bytes, _measured(best)) for timeline, best in traced.values())
    )
    across = Scale(0.0, most / GIB * 1.02, 2, width - 8)
    for row, (name, (timeline, best)) in enumerate(traced.items()):
        _bar(picture, across, row * _ROW + 16, name, timeline, _measured(best))
    x = across(usable / GIB)
    picture.line((x, 2), (x, bottom), "budget")
    words = "budget" if usable == budget.device_bytes else "usable"
    picture.text(x - 4, bottom + 10, words, kind="budget-label", anchor="end")
    return picture


def timeline_picture(record: Record, name: str, width: int = 720) -> Picture | None:
    """The memory of one training step of the best of a tier; None where its step was not traced."""
    if name not in traced_tiers(record):
        return None
    timeline, _ = traced_tiers(record)[name]
    wide, height = width > 500, 230
    picture = Picture(
        width, height, f"Memory through one training step, best of {TIER_TITLES[name]}"
    )
    across = Scale(0.0, 1.0, 52, width - (110 if wide else 14))
    picture.root.set("data-across", f"{across.start:g} {across.end:g}")
    top = max(max(map(sum, timeline.moments)), timeline.peak_bytes)
    up = Scale(0.0, top / GIB * 1.06, height - 26, 16)
    shown = _thinned(timeline, None if wide else _NARROW)
    for level in range(len(KINDS), 0, -1):  # the highest first, so that each lower one covers it
        points = [(across(at), up(sum(moment[:level]) / GIB)) for at, moment in shown]
        area = f"M{points[0][0]:.1f},{up.start:.1f}L{steps(points)[1:]}H{across.end:.1f}V{up.start:.1f}z"
        picture.draw("path", d=area, kind=f"band {KINDS[level - 1]}")
    picture.line((across.start, up.start), (across.end, up.start), "axis")
    picture.scale_up(across.start, up, 4)
    picture.text(4, 11, "GiB", kind="title")
    ends = [when for _, when in timeline.phases[1:]] + [1.0]
    for (phase, when), end in zip(timeline.phases, ends, strict=True):
        start = across(when)
        picture.line((start, up.start), (start, up.end), "phase")
        if width_of(phase) < across(end) - start:
            picture.text(start + 3, up.start + 15, phase, kind="tick")
        elif phase == timeline.phases[-1][0]:
            picture.text(across.end, up.start + 15, phase, kind="tick", anchor="end")
    if wide:
        _name_bands(picture, across.end + 6, up, timeline)
    # The peak, marked and named.
    peak = sum(timeline.moments[timeline.fullest])
    x, y, words = across(timeline.at[timeline.fullest]), up(peak / GIB), f"peak {gib(peak)} GiB"
    picture.draw("circle", cx=x, cy=y, r=2.6, kind="peak")
    left = x + width_of(words) + 10 > across.end
    picture.text(
        x - 6 if left else x + 6, y + 1, words, kind="peak-label", anchor="end" if left else None
    )
    return picture


def moments(timeline: Timeline) -> str:
    """The moments as numbers of GiB, for the tooltip."""
    gibs = [[float(f"{size / GIB:.3g}") for size in moment] for moment in timeline.moments]
    return json.dumps(
        {"kinds": list(KIND_WORDS.values()), "at": timeline.at, "gib": gibs}, separators=(",", ":")
    )


def timeline_words(record: Record, name: str) -> str:
    """What a timeline shows and how far it is from the measurement, in a sentence or two."""
    timeline, best = traced_tiers(record)[name]
    words, measured = [f"{TIER_TITLES[name]}: {describe(timeline.config)}."], _measured(best)
    if measured:
        off, more = abs(timeline.peak_bytes - measured) / measured, timeline.peak_bytes > measured
        how = (
            f"{percent(off)} {'more' if more else 'less'} than measured"
            if off >= 0.0005
            else "as measured"
        )
        words.append(
            f"Peak {gib(timeline.peak_bytes)} GiB predicted, {gib(measured)} GiB measured: {how}."
        )
    if timeline.peak_phase not in ("forward", "backward", "update"):
        words.append("The peak is reached before the step, while the model is made.")
    if timeline.micro_batches > 1:
        words.append(
            f"Shown is the last of {timeline.micro_batches} micro-batches, and the update."
        )
    if timeline.resting:
        words.append(resting_words(timeline.resting))
    if timeline.bottleneck:
        words.append(
            f"By what is predicted it is {bound_by(timeline.bottleneck, timeline.config)}."
        )
    if timeline.config.get("compile") not in (None, "none"):
        words.append(
            "Compiled code cannot be followed: the memory is that of the operations before they are compiled."
        )
    return " ".join(words)


def traced_tiers(record: Record) -> dict[str, tuple[Timeline, Measurement | Estimate]]:
    """By tier the timeline of its best, and its measurement, or its prediction where nothing was measured."""
    traced: dict[str, tuple[Timeline, Measurement | Estimate]] = {}
    for name in TIERS:
        best = record.result.tiers.get(name) or record.result.predicted_tiers.get(name)
        timeline = record.timelines.get(name)
        if best is not None and timeline is not None and timeline.config == best.config:
            traced[name] = (timeline, best)
    return traced


def _measured(best: Measurement | Estimate) -> int:
    return best.peak_bytes.allocated if isinstance(best, Measurement) and best.peak_bytes else 0


def _bar(
    picture: Picture, across: Scale, top: float, name: str, timeline: Timeline, measured: int
) -> None:
    sizes = timeline.moments[timeline.fullest]
    picture.text(2, top - 5, f"{TIER_TITLES[name]}: {gib(sum(sizes))} GiB", kind="row")
    before = 0
    for kind, size in zip(KINDS, sizes, strict=True):
        start, end = across(before / GIB), across((before + size) / GIB)
        before += size
        if size:
            picture.draw(
                "rect",
                x=start,
                y=top,
                width=max(end - start - 0.8, 0.5),
                height=_BAR,
                kind=f"band {kind}",
            )
            for words in (f"{KIND_WORDS[kind]} {gib(size)}", KIND_WORDS[kind]):
                if width_of(words) < end - start - 8:
                    picture.text(start + 5, top + 15, words, kind=f"inside {kind}")
                    break
    if measured:
        x, words = across(measured / GIB), f"measured {gib(measured)}"
        picture.line((x, top - 3), (x, top + _BAR + 3), "measured")
        wide = width_of(words)
        anchor = "end" if x + wide + 4 > picture.width else "start" if x < wide / 2 else "middle"
        picture.text(x, top + _BAR + 13, words, kind="tick", anchor=anchor)


def _thinned(timeline: Timeline, most: int | None) -> list[tuple[float, tuple[int, ...]]]:
    """The moments, or of each stretch the fullest."""
    every = list(zip(timeline.at, timeline.moments, strict=True))
    stretch = -(-len(every) // most) if most else 1
    stretches = (every[start : start + stretch] for start in range(0, len(every), stretch))
    return [max(each, key=lambda pair: sum(pair[1])) for each in stretches]


def _name_bands(picture: Picture, x: float, up: Scale, timeline: Timeline) -> None:
    """Names at the right, each at the height of its band at the fullest moment, apart enough to read."""
    sizes, below = timeline.moments[timeline.fullest], 0
    wanted: list[tuple[float, str]] = []
    for index, (kind, size) in enumerate(zip(KINDS, sizes, strict=True)):
        if max(moment[index] for moment in timeline.moments) > 0.01 * sum(sizes):
            wanted.append((-up((below + size / 2) / GIB), kind))
        below += size
    wanted.sort(key=lambda pair: pair[0])
    for y, (_, kind) in zip(apart((height for height, _ in wanted), 14.0), wanted, strict=True):
        picture.text(x, min(-y + 4, up.start), KIND_WORDS[kind], kind=f"name {kind}")
