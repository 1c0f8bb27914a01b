"""The comment that every export begins with: what was measured, where and by what, and where the tool departs from it.

In plain lines: what makes a comment of them is the business of each file's format.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from autofit.core.environment import ALLOCATOR, EXPANDABLE
from autofit.export.deviation import Deviation
from autofit.export.head import measured_sentence
from autofit.export.source import ExportSource
from autofit.export.template import WIDTH, plain

_LOSSES = {
    "standard": "the model's own, with the logits of all tokens in memory",
    "chunked": "chunked, which never holds the logits of all tokens",
    "fused": "fused (Liger's), which never holds the logits of all tokens",
}


def heading(written_for: str, found: ExportSource, *, departures: Sequence[Deviation], run: str) -> tuple[str, ...]:
    """The lines, each of them short enough to be a comment."""
    return tuple(_lines(written_for, found, departures, run))


def _lines(written_for: str, found: ExportSource, departures: Sequence[Deviation], run: str) -> Iterator[str]:
    by = f", by autofit {plain(found.versions['autofit'])}" if "autofit" in found.versions else ""
    yield from _wrapped(f"Training {plain(found.model)} with the keys of {written_for}{by}.")
    yield from _wrapped(" ".join(_sentences(found)))
    yield ""
    if departures:
        yield f"What was {_known(found)} and {written_for.partition(' ')[0]} does otherwise:"
        for each in departures:
            yield from _wrapped(f"- {plain(each.told)}", hanging=True)
    else:
        yield f"Every knob of the {_known(found)} config is told."
    yield ""
    yield "The learning rate, the data and all that no knob decides are yours to set. Then:"
    yield f"  {run}"


def _sentences(found: ExportSource) -> Iterator[str]:
    yield measured_sentence(found.hardware, found.measured, found.predicted)
    if found.device == "cuda":
        allocator = found.hardware.get("allocator") or EXPANDABLE
        told = f"{_known(found)} under {ALLOCATOR}={plain(allocator)}"
        yield f"Memory: {told}, to be set in the tool's environment too."
    samples = f"{found.effective_batch_size} samples per optimizer step" if found.effective_batch_size else ""
    tokens = f"{found.sequence_length} tokens per sample" if found.sequence_length else ""
    if samples or tokens:
        yield f"The work: {found.task}, {', '.join(each for each in (samples, tokens) if each)}."
    if found.task == "causal-lm":
        loss = str(found.config.get("loss", "standard"))
        yield f"The loss: {_LOSSES.get(loss, plain(loss))}."
    used = [f"{name} {plain(version)}" for name, version in found.versions.items() if name not in ("autofit", "optuna")]
    if used:
        yield f"{_known(found).capitalize()} with {', '.join(used)}."


def _known(found: ExportSource) -> str:
    return "predicted" if found.predicted else "measured"


def _wrapped(text: str, *, hanging: bool = False) -> list[str]:
    indent = "  " if hanging else ""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
