"""The head of the emitted script: what was measured, where, with which versions, and how to run it.

The sentence of what was measured is also that of every export.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.hardware import GIB
from autofit.export.template import WIDTH, plain


def head(
    hardware: Mapping[str, Any],
    *,
    measured: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    packages: Sequence[str],
    changes: Sequence[str] = (),
    predicted: Mapping[str, Any] | None = None,
) -> str:
    """The lines below the title of the script's docstring; `changes` are what was measured of one knob at a time."""
    used = [f"{name} {plain(versions[name])}" if name in versions else name for name in packages]
    by = f" (autofit {plain(versions['autofit'])})" if "autofit" in versions else ""
    blocks = [
        _wrapped(f"{measured_sentence(hardware, measured, predicted)} It needs {_listed(used)}{by}."),
        *(["\n".join(["Measured against it, with one knob changed:", *map(_item, changes)])] if changes else []),
        "    python train.py --data FILE --weights DIRECTORY --output DIRECTORY",
    ]
    return "\n\n".join(blocks)


def measured_sentence(
    hardware: Mapping[str, Any], measured: Mapping[str, Any] | None, predicted: Mapping[str, Any] | None = None
) -> str:
    """One or two sentences of figures; of those that are only predicted that is said."""
    where = f"on {plain(hardware.get('measured_on') or hardware.get('name', 'an unknown device'))}"
    if hardware.get("measured_on"):
        where += f", for {plain(hardware['name'])}"
    if hardware.get("budget_gib"):
        where += f", within {hardware['budget_gib']:g} GiB"
    if measured:
        verified = " and verified in longer runs" if measured.get("verified") else ""
        return f"Measured {where}{verified}: {', '.join(_figures(measured))}."
    if predicted:
        return f"Nothing of it was measured. Predicted {where}: {', '.join(_predicted_figures(predicted))}."
    return f"Meant to run {where}; it was not measured."


def _predicted_figures(predicted: Mapping[str, Any]) -> list[str]:
    figures, step, peak = _rate(predicted), predicted.get("step_seconds"), predicted.get("device_bytes")
    if step:
        figures.append(f"{step:.3g} s per optimizer step")
    if peak:
        figures.append(f"peak memory {peak['low'] / GIB:.3g} to {peak['high'] / GIB:.3g} GiB")
    return figures or ["no figures"]


def _rate(known: Mapping[str, Any]) -> list[str]:
    for unit in ("tokens", "samples"):
        if rate := known.get(f"{unit}_per_second"):
            return [f"{rate:,.0f} {unit} per second" if rate >= 100 else f"{rate:.3g} {unit} per second"]
    return []


def _figures(measured: Mapping[str, Any]) -> list[str]:
    figures, step, peak = _rate(measured), measured.get("step_seconds"), measured.get("peak_gib")
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
