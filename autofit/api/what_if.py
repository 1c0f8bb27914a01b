"""What lies around a prediction: every single change of a knob, the largest sizes that fit, and other cards.

All of it is told relative to one full estimate: hundreds of configs are predicted together from a few shallow traces,
and scaled by how far those are off for the config that was estimated in full.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autofit import techniques
from autofit.api.estimate import Given, Prediction, config_of, on_device, with_changes, workload_of
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, UntraceableError
from autofit.core.estimate import Estimate
from autofit.core.options import SearchOptions, search_options
from autofit.core.workload import Workload
from autofit.estimate.space_estimator import predict_all
from autofit.estimate.trace import Trace, trace
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import Card, card, card_names, hardware_of
from autofit.models import HuggingFaceModel
from autofit.models.huggingface import huggingface_workload

_AMPERE = (8, 0)  # from which on attention takes other kernels: all that a trace knows of a card
_FINEST = 8  # the longest sequence is found to an eighth of itself
_SHORTEST, _LONGEST = 16, 2**20  # tokens: no sequence beyond is looked for
_TOLD = ("fits", "device_bytes", "step_seconds", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class Change:
    """One knob of a config at another value, and what is predicted then, but for the breakdown."""

    knob: str
    value: Value
    estimate: Estimate


def around(prediction: Prediction) -> dict[str, Any]:
    """The alternatives and the largest sizes that still fit: what `--alternatives` adds to the JSON object.

    Where nothing can be predicted of a space, both are empty.
    """
    found = changes(prediction)
    sizes: dict[str, Value] = {knob: _largest(knob, prediction, found) for knob in ("micro_batch_size", "lora_rank")}
    if _has_length(prediction.workload):
        sizes["sequence_length"] = longest(prediction)
    return {
        "alternatives": [{"knob": each.knob, "value": each.value, **_told(each.estimate)} for each in found],
        "largest": sizes,
    }


def changes(prediction: Prediction) -> list[Change]:
    """Every single change of a knob that is legal, the best first: what fits, and of that the fastest.

    Those that cannot be predicted are left out.
    """
    legal = list(_legal_changes(prediction))
    configs = [prediction.estimate.config, *(config for _, _, config in legal)]
    try:
        memory, seconds = predict_all(prediction.workload, prediction.hardware, configs)
    except UntraceableError:
        return []
    found = [
        Change(knob, value, scaled(prediction, config, memory=nbytes / memory[0], time=time / seconds[0]))
        for (knob, value, config), nbytes, time in zip(legal, memory[1:], seconds[1:], strict=True)
        if not math.isnan(nbytes / memory[0])
    ]
    return sorted(found, key=_merit)


def longest(prediction: Prediction) -> int | None:
    """The longest samples that still fit, to an eighth of their length; None where even short ones do not.

    A length that cannot be predicted counts as one that does not fit.
    """
    model, known = prediction.workload.model, prediction.workload.sequence_length
    assert isinstance(model, HuggingFaceModel) and known, "only these have a length that can be changed"
    reference = _bytes_at(known, model, prediction)

    def fits(length: int) -> bool:
        ratio = 1.0 if length == known else _bytes_at(length, model, prediction) / reference
        if math.isnan(ratio):
            return False
        return scaled(prediction, prediction.estimate.config, memory=ratio).verdict == "yes"

    return _largest_that(fits, known, model.longest() or _LONGEST)


def scaled(prediction: Prediction, config: Config, *, memory: float, time: float = 1.0) -> Estimate:
    """The estimate of a config that takes so many times the memory and the time of the one predicted."""
    here = prediction.estimate
    context = here.breakdown["context"]
    seconds = here.step_seconds and here.step_seconds * time
    return dataclasses.replace(
        here,
        config=config,
        allocated_bytes=int(here.allocated_bytes * memory),
        reserved_bytes=None if here.reserved_bytes is None else int(here.reserved_bytes * memory),
        low=int(context + (here.low - context) * memory),
        high=int(context + (here.high - context) * memory),
        breakdown={},
        step_seconds=seconds,
        samples_per_second=here.samples_per_second and here.samples_per_second / time,
        tokens_per_second=here.tokens_per_second and here.tokens_per_second / time,
        bottleneck=None,
        utilisation=None,
    )


def _has_length(workload: Workload) -> bool:
    return isinstance(workload.model, HuggingFaceModel) and bool(workload.sequence_length)


def _bytes_at(length: int, model: HuggingFaceModel, prediction: Prediction) -> float:
    batch = prediction.workload.effective_batch_size
    workload = huggingface_workload(model, sequence_length=length, effective_batch_size=batch)
    workload = dataclasses.replace(workload, traits=prediction.workload.traits)
    try:
        return predict_all(workload, prediction.hardware, [prediction.estimate.config])[0][0]
    except UntraceableError:
        return math.nan


def _legal_changes(prediction: Prediction) -> Iterator[tuple[str, Value, Config]]:
    here, workload, hardware = prediction.estimate.config, prediction.workload, prediction.hardware
    seen = {here}
    for technique in techniques.all_techniques():
        for value in technique.choices_for(workload, hardware):
            try:
                config = techniques.canonicalize(with_changes({technique.name: value}, here), workload, hardware)
            except InputError:  # it contradicts another knob
                continue
            if config not in seen and techniques.refuse(config, workload, hardware) is None:
                seen.add(config)
                yield technique.name, value, config


def _largest(knob: str, prediction: Prediction, found: list[Change]) -> Value:
    """The largest value of a knob that fits, among those that are searched; None where none does."""
    every = [*found, Change(knob, prediction.estimate.config[knob], prediction.estimate)]
    fitting = [each.value for each in every if each.knob == knob and each.estimate.verdict == "yes"]
    return max((value for value in fitting if isinstance(value, int) and value), default=None)


def _told(found: Estimate) -> dict[str, Any]:
    data = found.to_dict()
    return {key: data[key] for key in _TOLD}


def fitting_cards(
    model: str | Workload,
    config: Given = None,
    *,
    set: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Which cards of the catalogue a config fits, and how fast it is expected to be there, the smallest card first.

    Args:
        sizes: seq_len, effective_batch, trust_remote_code, as of `estimate`.
    """
    cards = sorted((card(name) for name in card_names()), key=lambda each: (each.memory_bytes, each.name))
    newest = hardware_of(max(cards, key=lambda each: each.capability))
    workload = workload_of(model, newest, **sizes)
    settled, notes = config_of(config, search_options(set=set or {}).set, workload, newest)
    traces: dict[bool, Trace] = {}
    rows = [_card_to_dict(target, _on_card(target, workload, settled, traces)) for target in cards]
    return {
        "schema": 1,
        "model": workload.name,
        "workload": workload.summary(),
        "config": dict(settled),
        "cards": rows,
        "notes": list(notes),
    }


def _on_card(target: Card, workload: Workload, config: Config, traces: dict[bool, Trace]) -> Estimate | str:
    """The estimate of a config on a card, or why it cannot run there. Cards share traces."""
    hardware = hardware_of(target)
    reason = techniques.refuse(config, workload, hardware)
    if reason:
        return reason
    ampere = target.capability >= _AMPERE
    if ampere not in traces:
        traces[ampere] = trace(workload, config, hardware)
    return on_device(traces[ampere], workload, hardware, budget_for(SearchOptions(), hardware))


def _card_to_dict(target: Card, found: Estimate | str) -> dict[str, Any]:
    row = {"name": target.name, "title": target.title, "memory_bytes": target.memory_bytes}
    if isinstance(found, str):
        return row | dict.fromkeys(_TOLD) | {"fits": "no", "reason": found}
    return row | _told(found) | {"reason": None}


def _merit(change: Change) -> tuple[int, float, int]:
    """For sorting: what fits first; the faster before the slower, and what does not fit by what it needs."""
    found = change.estimate
    place = ("yes", "maybe", "no").index(found.verdict or "no")
    return place, found.step_seconds or 0.0 if place < 2 else 0.0, found.low


def _largest_that(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """The largest length up to `most` that fits, to one part in _FINEST; None where not even the shortest does."""
    low = high = start
    if not fits(start):
        low = _SHORTEST
        if low >= start or not fits(low):
            return None
    while low == high:
        if low >= most:
            return low
        high = min(2 * low, most)
        low = high if fits(high) else low
    while high - low > max(1, low // _FINEST):
        middle = high // 2 if high >= 4 * low else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
