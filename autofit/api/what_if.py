"""What surrounds a prediction: every single change of a knob, the largest sizes that fit, and other cards.

Hundreds of configs are predicted together from a few shallow traces, and scaled by how far those are off for the one
config that was estimated in full.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit import techniques
from autofit.api.estimate import ConfigSource, Prediction, config_of, with_changes, workload_of
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, UntraceableError, require
from autofit.core.estimate import Estimate
from autofit.core.options import SearchOptions, search_options
from autofit.core.workload import Workload
from autofit.estimate.space_estimator import predict_all
from autofit.estimate.trace import Trace, trace
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import card, card_names, hardware_of
from autofit.models import HuggingFaceModel
from autofit.models.huggingface import huggingface_workload
from autofit.tuning.target import estimate_on

_AMPERE = (8, 0)  # attention takes other kernels from here on: all that a trace depends on of a card
_PRECISION = 8  # the longest sequence is found to an eighth of itself
_SHORTEST, _LONGEST = 16, 2**20  # tokens of the sequences to try
_SHOWN = ("fits", "device_bytes", "step_seconds", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class Change:
    """One knob of a config at another value, and the estimate of that, without a breakdown."""

    knob: str
    value: Value
    estimate: Estimate

    @property
    def merit(self) -> tuple[int, float, int]:
        """For sorting: what fits first, the fastest of it first; what does not fit, by the memory it needs."""
        index = ("yes", "maybe", "no").index(self.estimate.verdict or "no")
        return index, self.estimate.step_seconds or 0.0 if index < 2 else 0.0, self.estimate.low


def what_if(prediction: Prediction) -> dict[str, Any]:
    """The alternatives and the largest sizes that still fit, for `--alternatives`; none where nothing is predicted."""
    require(isinstance(prediction, Prediction), "what_if takes what predict gives", prediction)
    alternatives = changes(prediction)
    base, workload = prediction.estimate, prediction.workload
    largest: dict[str, Value] = {}
    for knob in ("micro_batch_size", "lora_rank"):
        candidates = [*alternatives, Change(knob, base.config[knob], base)]
        fitting = [each.value for each in candidates if each.knob == knob and each.estimate.verdict == "yes"]
        largest[knob] = max((value for value in fitting if isinstance(value, int) and value), default=None)
    if isinstance(workload.model, HuggingFaceModel) and workload.sequence_length:
        largest["sequence_length"] = longest(prediction)
    rows = [{"knob": each.knob, "value": each.value, **_figures(each.estimate)} for each in alternatives]
    return {"alternatives": rows, "largest": largest}


def with_experts(prediction: Prediction) -> dict[str, Any] | None:
    """What adapters on a mixture's experts, too, would make of a config; None where there are none to be had."""
    traits, targets = prediction.workload.traits, prediction.estimate.config["lora_targets"]
    wanted = "lora_targets", f"{targets}+{traits.experts if traits else None}"
    legal = [change for change in _legal_changes(prediction) if change[:2] == wanted]
    found = _changes(prediction, legal) if legal else []
    return {"lora_targets": found[0].value, **_figures(found[0].estimate)} if found else None


def changes(prediction: Prediction) -> list[Change]:
    """Every legal change of a single knob that can be predicted, the best first."""
    return _changes(prediction, list(_legal_changes(prediction)))


def _changes(prediction: Prediction, legal: Sequence[tuple[str, Value, Config]]) -> list[Change]:
    configs = [prediction.estimate.config, *(config for _, _, config in legal)]
    try:
        memory, seconds = predict_all(prediction.workload, prediction.hardware, configs)
    except UntraceableError:
        return []
    legal_changes = [
        Change(knob, value, scaled(prediction, config, memory=nbytes / memory[0], time=time / seconds[0]))
        for (knob, value, config), nbytes, time in zip(legal, memory[1:], seconds[1:], strict=True)
        if not math.isnan(nbytes / memory[0])
    ]
    return sorted(legal_changes, key=lambda change: change.merit)


def _legal_changes(prediction: Prediction) -> Iterator[tuple[str, Value, Config]]:
    start, workload, hardware = prediction.estimate.config, prediction.workload, prediction.hardware
    configs = {start}
    for technique in techniques.all_techniques():
        for value in technique.choices_for(workload, hardware):
            try:
                config = techniques.canonicalize(with_changes({technique.name: value}, start), workload, hardware)
            except InputError:  # it contradicts another knob
                continue
            if config not in configs and techniques.refuse(config, workload, hardware) is None:
                configs.add(config)
                yield technique.name, value, config


def longest(prediction: Prediction) -> int | None:
    """The longest samples predicted to fit, to an eighth of their length; None where even short ones are not."""
    workload, config = prediction.workload, prediction.estimate.config
    model, start = workload.model, workload.sequence_length
    assert isinstance(model, HuggingFaceModel) and start, "only these have a length that can be changed"

    def bytes_at(length: int) -> float:
        longer = huggingface_workload(model, sequence_length=length, effective_batch_size=workload.effective_batch_size)
        try:
            longer = dataclasses.replace(longer, traits=workload.traits)
            return predict_all(longer, prediction.hardware, [config])[0][0]
        except UntraceableError:
            return math.nan

    reference = bytes_at(start)

    def fits(length: int) -> bool:
        ratio = 1.0 if length == start else bytes_at(length) / reference
        return not math.isnan(ratio) and scaled(prediction, config, memory=ratio).verdict == "yes"

    return _largest_that(fits, start, model.longest() or _LONGEST)


def _largest_that(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """The largest length up to `most` that fits, to one part in _PRECISION; None where not even the shortest does."""
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
    while high - low > max(1, low // _PRECISION):
        middle = high // 2 if high >= 4 * low else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scaled(prediction: Prediction, config: Config, *, memory: float, time: float = 1.0) -> Estimate:
    """The estimate of a config that takes so many times the memory and time of the predicted one."""
    base = prediction.estimate
    context = base.breakdown["context"]
    return dataclasses.replace(
        base,
        config=config,
        allocated_bytes=int(base.allocated_bytes * memory),
        reserved_bytes=None if base.reserved_bytes is None else int(base.reserved_bytes * memory),
        low=int(context + (base.low - context) * memory),
        high=int(context + (base.high - context) * memory),
        breakdown={},
        step_seconds=base.step_seconds and base.step_seconds * time,
        samples_per_second=base.samples_per_second and base.samples_per_second / time,
        tokens_per_second=base.tokens_per_second and base.tokens_per_second / time,
        bottleneck=None,
        utilisation=None,
    )


def fitting_cards(
    model: str | Workload, config: ConfigSource = None, *, set: Mapping[str, Any] | None = None, **sizes: Any
) -> dict[str, Any]:
    """Which cards of the catalogue a config fits and how fast, the smallest first; the arguments are of `estimate`."""
    cards = sorted((card(name) for name in card_names()), key=lambda each: (each.memory_bytes, each.name))
    newest = hardware_of(max(cards, key=lambda each: each.capability))
    workload = workload_of(model, newest, **sizes)
    canonical, notes = config_of(config, search_options(set=set or {}).set, workload, newest)
    traces: dict[bool, Trace] = {}  # cards share them
    rows = []
    for target in cards:
        hardware, ampere = hardware_of(target), target.capability >= _AMPERE
        row: dict[str, Any] = {"name": target.name, "title": target.title, "memory_bytes": target.memory_bytes}
        figures = dict.fromkeys(_SHOWN) | {"fits": "no"}
        if not (reason := techniques.refuse(canonical, workload, hardware)):
            if ampere not in traces:
                traces[ampere] = trace(workload, canonical, hardware)
            budget = budget_for(SearchOptions(), hardware)
            figures = _figures(estimate_on(traces[ampere], workload, hardware, budget))
        rows.append(row | figures | {"reason": reason})
    asked = {"model": workload.name, "workload": workload.summary(), "config": dict(canonical)}
    return {"schema": 1, **asked, "cards": rows, "notes": list(notes)}


def _figures(estimate: Estimate) -> dict[str, Any]:
    data = estimate.to_dict()
    return {name: data[name] for name in _SHOWN}
