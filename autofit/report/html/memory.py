"""Where the memory goes: what the peak of the best of each tier consists of, and how it comes about in a step."""

from __future__ import annotations

import json

from autofit.core.estimate import KINDS, Estimate, Timeline
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import TIERS
from autofit.report.formatting import describe, gib, percent
from autofit.report.html.plot_data import TITLES
from autofit.report.html.svg import Picture, Scale, apart, steps, width_of

KIND_WORDS = {  # in the order of KINDS
    "parameters": "weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
    "temporary": "temporary",
}
_BAR = 22
_ROW = 62
_NARROW = 160  # moments that a small picture can show


def breakdown(record: Record, width: int = 720) -> Picture | None:
    """A stacked bar for the best of each tier, at the fullest moment of a step; None where no step was followed."""
    shown = _shown(record)
    if not shown:
        return None
    result = record.result
    picture = Picture(width, _ROW * len(shown) + 34, "What the peak memory of the best of each tier consists of")
    usable = result.budget.cap_bytes(result.hardware.device)
    most = max([usable, *(line.peak_bytes for line, _ in shown.values()), *(_measured(m) for _, m in shown.values())])
    across = Scale(0.0, most / GIB * 1.02, 2, width - 8)
    for row, (name, (line, measurement)) in enumerate(shown.items()):
        _bar(picture, across, row * _ROW + 16, name, line, _measured(measurement))
    bottom = _ROW * len(shown) + 4
    at = across(usable / GIB)
    picture.line((at, 2), (at, bottom), "budget")
    picture.text(
        at - 4,
        bottom + 10,
        "budget" if usable == result.budget.device_bytes else "usable",
        kind="budget-label",
        anchor="end",
    )
    return picture


def timeline_picture(record: Record, name: str, width: int = 720) -> Picture | None:
    """The memory of one training step of the best of a tier; None where its step was not followed."""
    pair = _shown(record).get(name)
    if pair is None:
        return None
    line = pair[0]
    height = 230
    picture = Picture(width, height, f"Memory through one training step, best of {TITLES[name]}")
    wide = width > 500
    across = Scale(0.0, 1.0, 52, width - (110 if wide else 14))
    picture.root.set("data-across", f"{across.start:g} {across.end:g}")
    top = max(max(map(sum, line.moments)), line.peak_bytes)
    up = Scale(0.0, top / GIB * 1.06, height - 26, 16)
    moments = _thinned(line, None if wide else _NARROW)
    for level in range(len(KINDS), 0, -1):  # the highest first, so that each lower one covers it
        points = [(across(at), up(sum(moment[:level]) / GIB)) for at, moment in moments]
        area = f"M{points[0][0]:.1f},{up.start:.1f}L{steps(points)[1:]}H{across.end:.1f}V{up.start:.1f}z"
        picture.draw("path", d=area, kind=f"band {KINDS[level - 1]}")
    _axes(picture, across, up, line)
    if wide:
        _name_bands(picture, across, up, line)
    _mark_peak(picture, across, up, line)
    return picture


def moments_json(line: Timeline) -> str:
    """The moments as numbers of GiB, for who points at one of them."""
    gibs = [[float(f"{size / GIB:.3g}") for size in moment] for moment in line.moments]
    return json.dumps({"kinds": list(KIND_WORDS.values()), "at": line.at, "gib": gibs}, separators=(",", ":"))


def followed_words(record: Record, name: str) -> str:
    """What a timeline shows and how far it is from what was measured, in a sentence or two."""
    line, measurement = _shown(record)[name]
    words = [f"{TITLES[name]}: {describe(line.config)}."]
    measured = _measured(measurement)
    if measured:
        off = abs(line.peak_bytes - measured) / measured
        how = "as measured" if off < 0.0005 else f"{'less than 1 %' if off < 0.005 else percent(off)} "
        how += "" if off < 0.0005 else ("more than measured" if line.peak_bytes > measured else "less than measured")
        words.append(f"Peak {gib(line.peak_bytes)} GiB predicted, {gib(measured)} GiB measured: {how}.")
    if line.peak_phase not in ("forward", "backward", "update"):
        words.append("The peak is reached before the step, while the model is made.")
    if line.micro_batches > 1:
        words.append(f"Shown is the last of {line.micro_batches} micro-batches, and the update.")
    if line.config.get("compile") not in (None, "none"):
        words.append("Compiled code cannot be followed: the memory is that of the operations before they are compiled.")
    return " ".join(words)


def _shown(record: Record) -> dict[str, tuple[Timeline, Measurement | Estimate]]:
    """By tier the timeline of its best, and what was measured of that, or predicted where nothing was."""
    found: dict[str, tuple[Timeline, Measurement | Estimate]] = {}
    for name in TIERS:
        best = record.result.tiers.get(name) or record.result.predicted_tiers.get(name)
        line = record.timelines.get(name)
        if best is not None and line is not None and line.config == best.config:
            found[name] = (line, best)
    return found


def followed_tiers(record: Record) -> list[str]:
    """The tiers of which the best was followed."""
    return list(_shown(record))


def _measured(best: Measurement | Estimate) -> int:
    return best.peak_bytes.allocated if isinstance(best, Measurement) and best.peak_bytes else 0


def _bar(picture: Picture, across: Scale, top: float, name: str, line: Timeline, measured: int) -> None:
    parts = line.moments[line.fullest]
    picture.text(2, top - 5, f"{TITLES[name]}: {gib(sum(parts))} GiB", kind="row")
    before = 0
    for kind, size in zip(KINDS, parts, strict=True):
        start, end = across(before / GIB), across((before + size) / GIB)
        if size:
            picture.draw("rect", x=start, y=top, width=max(end - start - 0.8, 0.5), height=_BAR, kind=f"band {kind}")
            words = f"{KIND_WORDS[kind]} {gib(size)}"
            words = words if width_of(words) < end - start - 8 else KIND_WORDS[kind]
            if width_of(words) < end - start - 8:
                picture.text(start + 5, top + 15, words, kind=f"inside {kind}")
        before += size
    if measured:
        at = across(measured / GIB)
        picture.line((at, top - 3), (at, top + _BAR + 3), "measured")
        words = f"measured {gib(measured)}"
        wide = width_of(words)
        anchor = "end" if at + wide + 4 > picture.width else "start" if at < wide / 2 else "middle"
        picture.text(at, top + _BAR + 13, words, kind="tick", anchor=anchor)


def _thinned(line: Timeline, most: int | None) -> list[tuple[float, tuple[int, ...]]]:
    """The moments, or of each stretch the fullest."""
    every = list(zip(line.at, line.moments, strict=True))
    if most is None or len(every) <= most:
        return every
    stretch = -(-len(every) // most)
    return [
        max(every[place : place + stretch], key=lambda each: sum(each[1])) for place in range(0, len(every), stretch)
    ]


def _axes(picture: Picture, across: Scale, up: Scale, line: Timeline) -> None:
    picture.line((across.start, up.start), (across.end, up.start), "axis")
    for number in up.ticks(4):
        picture.line((across.start - 4, up(number)), (across.start, up(number)), "axis")
        picture.text(across.start - 7, up(number) + 3.5, f"{number:g}", anchor="end", kind="tick")
    picture.text(4, 11, "GiB", kind="title")
    ends = [when for _, when in line.phases[1:]] + [1.0]
    for (phase, when), end in zip(line.phases, ends, strict=True):
        start, wide = across(when), across(end) - across(when)
        picture.line((start, up.start), (start, up.end), "phase")
        if width_of(phase) < wide:
            picture.text(start + 3, up.start + 15, phase, kind="tick")
        elif phase == line.phases[-1][0]:
            picture.text(across.end, up.start + 15, phase, kind="tick", anchor="end")


def _name_bands(picture: Picture, across: Scale, up: Scale, line: Timeline) -> None:
    """Names at the right, each at the height of its band at the fullest moment, apart enough to read."""
    parts, below = line.moments[line.fullest], 0
    wanted: list[tuple[float, int]] = []
    for place, size in enumerate(parts):
        if max(moment[place] for moment in line.moments) > 0.01 * sum(parts):
            wanted.append((-up((below + size / 2) / GIB), place))
        below += size
    wanted.sort()
    for y, (_, place) in zip(apart((at for at, _ in wanted), 14.0), wanted, strict=True):
        name = KIND_WORDS[KINDS[place]]
        picture.text(across.end + 6, min(-y + 4, up.start), name, kind=f"name {KINDS[place]}")


def _mark_peak(picture: Picture, across: Scale, up: Scale, line: Timeline) -> None:
    place = line.fullest
    x, y = across(line.at[place]), up(sum(line.moments[place]) / GIB)
    picture.draw("circle", cx=x, cy=y, r=2.6, kind="peak")
    words = f"peak {gib(sum(line.moments[place]))} GiB"
    left = x + width_of(words) + 10 > across.end
    picture.text(x - 6 if left else x + 6, y + 1, words, kind="peak-label", anchor="end" if left else None)
