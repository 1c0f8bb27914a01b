"""The search's progress: every probe, and the best so far, by probe and by second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autofit.core.record import Record
from autofit.core.result import tier
from autofit.report.formatting import OUTCOMES, describe, number
from autofit.report.html.plot_data import levelled, unit
from autofit.report.html.scatter import shape
from autofit.report.html.svg import Picture, Scale, steps

_WIDTH, _HEIGHT = 350, 240


def progress(record: Record, *, by: str) -> Picture | None:
    """By "probe" or by "minute"; None where nothing fitted, or all was measured at once."""
    trials = record.result.trials
    if len(trials) < 2 or not any(each.fits for each in trials):
        return None
    ends = list(accumulate(each.seconds for each in trials))
    if by == "probe":
        at: Sequence[float] = range(1, len(trials) + 1)
        title = "probes"
    else:
        minutes = ends[-1] >= 180
        at, title = (
            [end / 60 if minutes else end for end in ends],
            "minutes of probing" if minutes else "seconds of probing",
        )
    return _drawn(record, at, title)


def _drawn(record: Record, at: Sequence[float], title: str) -> Picture | None:
    result = record.result
    rates = [levelled(each, result) if each.fits else 0.0 for each in result.trials]
    if not at[-1] > 0:
        return None
    picture = Picture(_WIDTH, _HEIGHT, f"Throughput of the best so far, by {title}", interactive=True)
    across = Scale(0.0, float(at[-1]), 52, _WIDTH - 10)
    up = Scale(0.0, max(rates) * 1.08, _HEIGHT - 44, 30)
    picture.frame(across, up, titles=(title, f"{unit(result)}/s"), ticks=(5, 4))
    best = list(accumulate(rates, max))
    begun = next(place for place, rate in enumerate(best) if rate)
    stair = [(across(at[place]), up(best[place])) for place in range(begun, len(best))]
    picture.draw("path", d=steps(stair) if len(stair) > 1 else "", kind="leading")
    for when, rate, each in zip(at, rates, result.trials, strict=True):
        kind = tier(each.config)
        link = picture.draw("a", href=f"#trial-{each.number}", kind=f"dot small {kind}", tabindex=-1)
        figure = f"{number(rate)} {unit(result)}/s" if each.fits else OUTCOMES[each.outcome]
        picture.draw("title", f"probe {each.number + 1}: {describe(each.config)} \u2014 {figure}", into=link)
        if each.fits:
            shape(picture, link, kind, (across(when), up(rate)), 3.0)
        else:
            x, y = across(when), up.start - 5
            picture.draw("path", into=link, d=f"M{x - 2.5:.1f},{y - 2.5:.1f}l5,5m0,-5l-5,5", kind="cross")
    return picture
