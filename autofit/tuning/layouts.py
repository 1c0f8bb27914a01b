"""Which ways of dividing many devices a search looks at, where all of them beside all other knobs are too many.

First every layout is predicted beside a few usual values of the other knobs; then the best layouts of each tier beside
all values.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.result import tier
from autofit.core.workload import Workload
from autofit.search.enumeration import MAX_CONFIGS, Enumeration
from autofit.search.space import Space

Predict = Callable[[Sequence[Config]], tuple[Sequence[float], Sequence[float]]]  # bytes and seconds of each
_LAYOUT = (
    *("data_parallel", "data_parallel_replicate", "reshard_after_forward"),
    *("tensor_parallel", "context_parallel"),
)
_FREE = (*_LAYOUT, "micro_batch_size", "lora_rank", "lora_alpha")  # more values of them cost no trace
_USUAL: dict[str, tuple[Value, ...]] = {
    "precision": ("bf16", "bf16-mixed", "fp16-mixed", "fp32"),  # the first that there is
    "reshard_after_forward": (True, False, None),
    "activation_checkpointing": ("none", "full"),
    "quantization": ("none", "nf4-dq"),
    "lora_targets": (None, "all-linear"),
    "loss": ("chunked", "standard"),
}
_SEVERAL = ("reshard_after_forward", "activation_checkpointing", "quantization", "lora_targets")
_KEPT, _SLOWER = 2, 1.05  # layouts of a tier: so many, and none that is so many times slower than the best


def with_best_layouts(
    space: Space, workload: Workload, hardware: Hardware, cap_bytes: float, predict: Predict, *, seed: int
) -> tuple[Space, str | None]:
    """The space with the layouts that are predicted to be best within so many bytes, and a note on them; the same where
    all of it can be predicted."""
    constraints = techniques.constraints(workload, hardware)
    if hardware.world == 1 or Enumeration(space.knobs, constraints).count().configs <= MAX_CONFIGS:
        return space, None
    usual = {knob: _usual(knob, values) for knob, values in space.knobs.items()}
    configs = Enumeration(usual, constraints).configs(seed)
    rows = [row for row in zip(configs, *predict(configs), strict=True) if not math.isnan(row[1])]
    chosen = best_layouts(rows, cap_bytes)
    if not chosen:
        return space, None
    kept = {
        # null settles by the others: to all devices beside ddp.
        knob: tuple(each for each in space.knobs[knob] if each is None or each in {config[knob] for config in chosen})
        for knob in _LAYOUT
        if knob in space.knobs
    }
    offloads = space.knobs.get("fsdp_offload", ())
    if "none" in offloads and all(nbytes <= cap_bytes for config, nbytes, _ in rows if config in chosen):
        kept["fsdp_offload"] = tuple(each for each in offloads if each != "cpu")  # slower wherever others fit
    every = len({_layout_of(config) for config in configs})
    note = f"of {every} ways to divide the devices, the search looks at those that are predicted to be among the best"
    words = "; ".join(f"{knob} {', '.join(map(str, values))}" for knob, values in kept.items())
    return dataclasses.replace(space, knobs={**space.knobs, **kept}), f"{note}: {words}."


def best_layouts(rows: Iterable[tuple[Config, float, float]], cap_bytes: float) -> list[Config]:
    """Of (config, bytes, seconds) a config of each of the best layouts: of each tier the fastest that fit, or else the
    one that needs least memory."""
    tiers: dict[str, list[tuple[Config, float, float]]] = {}
    for row in rows:
        tiers.setdefault(tier(row[0]), []).append(row)
    chosen: list[Config] = []
    for of_tier in tiers.values():
        fastest: dict[tuple[Value, ...], tuple[float, Config]] = {}
        for config, nbytes, seconds in of_tier:
            layout = _layout_of(config)
            if nbytes <= cap_bytes and (layout not in fastest or seconds < fastest[layout][0]):
                fastest[layout] = seconds, config
        ranked = sorted(fastest.values(), key=lambda found: found[0])[:_KEPT]
        chosen += [config for seconds, config in ranked if seconds <= _SLOWER * ranked[0][0]]
        if not ranked:
            chosen.append(min(of_tier, key=lambda row: row[1])[0])
    return chosen


def _layout_of(config: Config) -> tuple[Value, ...]:
    return tuple(config[knob] for knob in _LAYOUT)


def _usual(knob: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    if knob in _FREE and knob not in _USUAL:
        return values
    wanted = _USUAL.get(knob, (techniques.technique_named(knob).off,))
    found = tuple(value for value in wanted if value in values)
    return (found if knob in _SEVERAL else found[:1]) or values[:1]
