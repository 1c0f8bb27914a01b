"""What would help where a config, or a whole search, does not fit: a line each, with what to type."""

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.estimate import Remedy
from autofit.core.knobs import DERIVED, yaml_word
from autofit.core.measurement import Measurement
from autofit.core.plain import from_plain
from autofit.core.result import Result, tier
from autofit.report.formatting import gib, rate, source
from autofit.report.rows import latest_by_config

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
    return [
        _line(each if isinstance(each, Remedy) else from_plain(Remedy, each)) for each in remedies
    ]


def measured_remedies(result: Result, config: Mapping[str, Any], most: int = 3) -> list[Remedy]:
    """What a search measured to fit in less memory than this config, of the same tier, the fastest first."""
    latest = latest_by_config(result)
    own = next(
        (each for each in latest.values() if each.config == config and each.peak_bytes), None
    )
    fitting = [
        each
        for each in latest.values()
        if each.fits and each.peak_bytes and tier(each.config) == tier(config)
    ]
    peak = own.peak_bytes.held_bytes if own and own.peak_bytes else 0
    less = [each for each in fitting if each.peak_bytes and each.peak_bytes.held_bytes < peak]
    return [
        _measured(each, config) for each in sorted(less, key=lambda each: -each.throughput)[:most]
    ]


def _measured(trial: Measurement, config: Mapping[str, Any]) -> Remedy:
    options: list[str] = []
    for knob, (mine, _) in trial.config.differences(config).items():
        if knob not in DERIVED:
            options += ["--set", f"{knob}={yaml_word(mine)}"]
    assert trial.peak_bytes, "chosen by it"
    return Remedy(
        "time",
        tuple(options),
        trial.config,
        trial.peak_bytes.held_bytes,
        trial.step_seconds.median if trial.step_seconds else None,
        trial.samples_per_second,
        trial.tokens_per_second,
        measured=True,
    )


def _line(remedy: Remedy) -> str:
    why = _KINDS[remedy.kind]
    if remedy.kind == "numbers" and any(
        option.endswith("_offload=cpu") for option in remedy.options
    ):
        why += ", with a part of them in host memory"
    figures = ", ".join(filter(None, (f"at most {gib(remedy.device_bytes)} GiB", rate(remedy))))
    return f"{' '.join(remedy.options)}: {why}; {figures} {source(remedy.measured)}"
