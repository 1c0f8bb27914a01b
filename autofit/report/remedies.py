"""What would help where a config, or a whole search, does not fit: a line each, with what to type."""

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.estimate import Remedy
from autofit.core.knobs import DERIVED, yaml_word
from autofit.core.measurement import Measurement
from autofit.core.plain import from_plain
from autofit.core.result import Result, tier
from autofit.report.formatting import gib, peak_bytes, rate, source

_KINDS = {
    "time": "the same learning, in smaller slices or computed again",
    "host": "the same learning, with a part of it in host memory",
    "numbers": "the same weights, in smaller numbers",
    "lora": "LoRA, which trains a few added weights only",
    "qlora": "QLoRA, which holds the frozen weights in 4 bits, too",
    "shorter": "shorter samples, if the data allows them",
    "devices": "more cards, each with a part of the weights",
    "memory": "more memory",
}


def remedy_lines(remedies: Sequence[Remedy | Mapping[str, Any]]) -> list[str]:
    """What to type, why it helps, and what is known of it; the cheapest first."""
    lines = []
    for remedy in remedies:
        if not isinstance(remedy, Remedy):
            remedy = from_plain(Remedy, remedy)
        lines.append(_line(remedy))

    return lines


def measured_remedies(result: Result, config: Mapping[str, Any], most: int = 3) -> list[Remedy]:
    """What a search measured to fit in less memory than this config, of the same tier, the fastest
    first."""
    own = 0
    for trial in result.latest_by_config.values():
        if trial.config == config:
            own = peak_bytes(trial) or 0

    smaller = []
    for trial in result.latest_by_config.values():
        peak = peak_bytes(trial)
        is_alike = trial.fits and tier(trial.config) == tier(config)
        if peak and is_alike and peak < own:
            smaller.append(_measured(trial, config, peak))

    smaller.sort(key=lambda remedy: -(remedy.samples_per_second or 0.0))
    return smaller[:most]


def _measured(trial: Measurement, config: Mapping[str, Any], peak: int) -> Remedy:
    """A measured config as a remedy: what to set to get there from another one."""
    options: list[str] = []
    for knob, (mine, _) in trial.config.differences(config).items():
        if knob not in DERIVED:
            options += ["--set", f"{knob}={yaml_word(mine)}"]

    step_seconds = None
    if trial.step_seconds:
        step_seconds = trial.step_seconds.median

    return Remedy(
        kind="time",
        options=tuple(options),
        config=trial.config,
        device_bytes=peak,
        step_seconds=step_seconds,
        samples_per_second=trial.samples_per_second,
        tokens_per_second=trial.tokens_per_second,
        measured=True,
    )


def _line(remedy: Remedy) -> str:
    """What to type, why it helps, and what is known of it."""
    typed = " ".join(remedy.options)
    why = _KINDS[remedy.kind]
    if remedy.kind == "numbers" and "_offload=cpu" in typed:
        why += ", with a part of them in host memory"

    figures = f"at most {gib(remedy.device_bytes)} GiB"
    speed = rate(remedy)
    if speed:
        figures += f", {speed}"

    known = source(remedy.measured)
    return f"{typed}: {why}; {figures} {known}"
