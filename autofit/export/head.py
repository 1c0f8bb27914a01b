"""The head of the emitted script: what was measured, where, with which versions, and how to run it.

The sentence of what was measured is also that of every export.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.export.template import WIDTH, plain


def head(
    hardware: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    packages: Sequence[str],
    changes: Sequence[str] = (),
) -> str:
    """The lines below the title of the script's docstring; `changes` are what was measured of one knob at a time."""
    used = [f"{name} {plain(versions[name])}" if name in versions else name for name in packages]
    by = f" (autofit {plain(versions['autofit'])})" if "autofit" in versions else ""
    blocks = [
        _wrapped(f"{measured_sentence(hardware, measured)} It needs {_listed(used)}{by}."),
        *(["\n".join(["Measured against it, with one knob changed:", *map(_item, changes)])] if changes else []),
        "    python train.py --data FILE --weights DIRECTORY --output DIRECTORY",
    ]
    return "\n\n".join(blocks)


def measured_sentence(hardware: Mapping[str, Any], measured: Mapping[str, Any] | None) -> str:
    """One or two sentences of figures."""
    where = f"on {plain(hardware.get('measured_on') or hardware.get('name', 'an unknown device'))}"
    if hardware.get("measured_on"):
        where += f", for {plain(hardware['name'])}"
    if hardware.get("budget_gib"):
        where += f", within {hardware['budget_gib']:g} GiB"
    if not measured:
        return f"Meant to run {where}; it was not measured."
    verified = " and verified in longer runs" if measured.get("verified") else ""
    return f"Measured {where}{verified}: {', '.join(_figures(measured))}."


def _figures(measured: Mapping[str, Any]) -> list[str]:
    figures = []
    for unit in ("tokens", "samples"):
        if measured.get(f"{unit}_per_second"):
            rate = measured[f"{unit}_per_second"]
            figures.append(f"{rate:,.0f} {unit} per second" if rate >= 100 else f"{rate:.3g} {unit} per second")
            break
    step, peak = measured.get("step_seconds"), measured.get("peak_gib")
    if step:
        figures.append(f"{step['median']:.3g} s per optimizer step ({step['low']:.3g} to {step['high']:.3g})")
    if peak:
        size = peak.get("device") or peak.get("reserved") or peak["allocated"]
        figures.append(f"peak memory {size:g} GiB")
    return figures or ["no figures"]


def _item(change: str) -> str:
    return f"    {plain(change)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
