"""The header of every exported file and of train.py: what was measured, where, with which versions.
These are plain lines; each file format makes its own comments of them."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autofit.core.environment import ALLOCATOR, EXPANDABLE
from autofit.core.hardware import GIB
from autofit.core.quoting import lines_of, one_line
from autofit.core.tasks import task_named
from autofit.export.source import LEARNT, Deviation, ExportSource
from autofit.export.template import WIDTH
from autofit.report.formatting import listed, number

_LOSSES = {
    "standard": "the model's own, with the logits of all tokens in memory",
    "chunked": "chunked, which never holds the logits of all tokens",
    "fused": "fused (Liger's), which never holds the logits of all tokens",
}


def script_header(
    figures: str,
    versions: Mapping[str, str],
    packages: Sequence[str],
    changes: Sequence[str],
    run: str = "python",
) -> str:
    """The text below the title of train.py.

    Args:
        figures: a `measured_sentence`.
        packages: what has to be installed.
        changes: what changing one knob did, a line each.
        run: the command that starts it.
    """
    used = []
    for name in packages:
        if name in versions:
            name += f" {versions[name]}"
        used.append(name)

    needs = listed(used)
    if "autofit" in versions:
        needs += f" (autofit {versions['autofit']})"
    text = _wrapped(f"{figures} It needs {needs}.")

    if changes:
        text += ["", "Measured against it, with one knob changed:"]
        text += [f"    {one_line(change)}" for change in changes]

    command = f"{run} train.py --data FILE --weights DIRECTORY --output DIRECTORY"
    text += ["", textwrap.indent(command, "    ")]
    return "\n".join(text)


def export_header(
    tool: str,
    source: ExportSource,
    *,
    deviations: Sequence[Deviation],
    run: str,
) -> tuple[str, ...]:
    """The lines above an export for a tool and its version, each short enough for a comment."""
    title = f"Training {source.model} with the keys of {tool}"
    if "autofit" in source.versions:
        title += f", by autofit {source.versions['autofit']}"
    lines = _wrapped(f"{title}.")
    lines += _wrapped(" ".join(_sentences(source)))
    lines.append("")

    if deviations:
        name, _, _ = tool.partition(" ")
        lines.append(f"What was {source.origin} and {name} does otherwise:")
        for deviation in deviations:
            lines += _wrapped(f"- {deviation.message}", indent="  ")
    else:
        lines.append(f"The keys below cover every knob of the {source.origin} config.")

    yours = "The learning rate, the data and all that no knob decides are yours to set. Then:"
    lines += ["", yours]
    lines += [f"  {line}" for line in lines_of(run)]
    return tuple(lines)


def measured_sentence(
    hardware: Mapping[str, Any],
    measured: Mapping[str, Any] | None,
    predicted: Mapping[str, Any] | None = None,
    *,
    world: int = 1,
) -> str:
    """The figures and where they were measured, on how many devices; predicted figures are called
    that."""
    name = hardware.get("name") or "an unknown device"
    measured_on = hardware.get("measured_on")
    where = f"on {measured_on or name}"
    if world > 1:
        where = f"on {world} x {measured_on or name}"
    if measured_on:
        where += f", for {name}"
    if hardware.get("budget_gib"):
        where += f", within {hardware['budget_gib']:g} GiB"
        if world > 1:
            where += " each"

    if predicted and not measured:
        return f"Nothing of it was measured. Predicted {where}: {_figures(predicted)}."
    if not measured:
        return f"Meant to run {where}; it was not measured."

    waited = measured.get("predicted_communication_seconds")
    if waited is not None:
        alone = f"Rank 0 alone was measured, of a training {where}"
        apart = f"{waited:.2g} s of communication a step are predicted"
        return f"{alone}; {apart}: {_figures(measured)}."

    if measured.get("verified"):
        where += " and verified in longer runs"

    return f"Measured {where}: {_figures(measured)}."


def _figures(known: Mapping[str, Any]) -> str:
    """Speed, seconds per step and peak memory, as far as they are known."""
    figures = []
    for unit in ("tokens", "samples"):
        speed = known.get(f"{unit}_per_second")
        if speed:
            figures.append(f"{number(speed)} {unit} per second")
            break

    step = known.get("step_seconds")
    if isinstance(step, Mapping):  # measured
        between = f"{step['low']:.3g} to {step['high']:.3g}"
        figures.append(f"{step['median']:.3g} s per optimizer step ({between})")
    elif step:
        figures.append(f"{step:.3g} s per optimizer step")

    measured = known.get("peak_gib")
    predicted = known.get("device_bytes")
    if measured:
        highest = measured.get("device") or measured.get("reserved") or measured["allocated"]
        figures.append(f"peak memory {highest:g} GiB")
    elif predicted:
        low = predicted["low"] / GIB
        high = predicted["high"] / GIB
        figures.append(f"peak memory {low:.3g} to {high:.3g} GiB")

    return ", ".join(figures) or "no figures"


def _sentences(source: ExportSource) -> Iterator[str]:
    """What was measured, the work, the data and the loss, and the versions."""
    yield measured_sentence(
        source.hardware,
        source.measured,
        source.predicted,
        world=source.layout.world,
    )
    if source.device == "cuda":
        setting = f"{ALLOCATOR}={source.hardware.get('allocator') or EXPANDABLE}"
        yield f"Memory: {source.origin} under {setting}, to be set in the tool's environment too."

    work = []
    if source.effective_batch_size:
        work.append(f"{source.effective_batch_size} samples per optimizer step")
    if source.sequence_length:
        work.append(f"{source.sequence_length} tokens per sample")
    if work and source.packing:
        work.append("packed one after the other")
    elif work and source.packing is False:
        work.append("padded to the longest of a batch")

    if work:
        yield f"The work: {source.task}, {', '.join(work)}."
    if source.data and source.form in LEARNT:
        yield f"The data: {source.data}, of which {LEARNT[source.form]}."
    if task_named(source.task).continues_text:
        loss = source.config.loss
        yield f"The loss: {_LOSSES.get(loss, loss)}."

    used = []
    for name, version in source.versions.items():
        if name not in ("autofit", "optuna"):
            used.append(f"{name} {version}")
    if used:
        yield f"{source.origin.capitalize()} with {', '.join(used)}."


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
