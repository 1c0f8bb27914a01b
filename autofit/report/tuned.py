"""What tuning a file of another tool brings, in lines."""

from collections.abc import Iterable, Sequence

from autofit.core.estimate import Estimate
from autofit.report.formatting import gib, interval, number, rate, speed


def tuned_lines(
    before: Estimate | None,
    after: Estimate | None,
    usable: int,
    *,
    is_changed: bool,
) -> list[str]:
    """What is predicted of the file as it was, and as it is now.

    Args:
        before, after: None where a config is not possible on this device.
        usable: the bytes that may be used.
    """
    if not is_changed:
        return ["Nothing to change: nothing that learns the same is expected to be faster."]

    lines = [
        f"as it was: {_figures(before, usable)}",
        f"tuned:     {_figures(after, usable)}",
    ]
    if before and after and before.low <= usable and before.step_seconds and after.step_seconds:
        lines[-1] += f", {speed(before.step_seconds / after.step_seconds)}"

    return lines


def gain_lines(gains: Iterable[tuple[Sequence[str], float | None]]) -> list[str]:
    """What changes bring, each by its keys: how many times as fast it is, or None where it fits by
    them alone."""
    lines = []
    for keys, faster in gains:
        brings = "fits by this alone"
        if faster is not None:
            brings = speed(faster)
        lines.append(f"{', '.join(keys)}: {brings}")

    return lines


def in_tool_lines(
    tool: str,
    peak_bytes: int | None,
    tokens_per_second: float | None,
    said: tuple[int | None, float | None],
    notes: Sequence[str],
) -> list[str]:
    """What a file's own tool took to train from it, beside what was said.

    Args:
        said: the bytes and the tokens in a second.
        notes: why it did not train, or what differs.
    """
    took = _size_and_rate(peak_bytes, tokens_per_second)
    predicted = _size_and_rate(*said)
    if not took:
        return list(notes)

    line = f"in {tool}: {took}"
    if predicted:
        line += f"; said were {predicted}"
    return [line, *notes]


def _size_and_rate(nbytes: int | None, tokens_per_second: float | None) -> str:
    """Memory and speed, as far as they are known."""
    parts = []
    if nbytes:
        parts.append(f"{gib(nbytes)} GiB")
    if tokens_per_second:
        parts.append(f"{number(tokens_per_second)} tokens/s")

    return ", ".join(parts)


def _figures(estimate: Estimate | None, usable: int) -> str:
    if estimate is None:
        return "not possible on this device"

    figures = f"{interval(estimate.low, estimate.high)} GiB, {rate(estimate)}"
    if estimate.low > usable:
        return f"{figures}: it does not fit"
    if estimate.high > usable:
        return f"{figures}: it may not fit"

    return figures
