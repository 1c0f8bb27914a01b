"""What surrounds a prediction: every single change of a knob, the largest sizes that fit, and other
cards.

Hundreds of configs are predicted together from a few shallow traces, and scaled by how far those
are off for the one config that was estimated in full."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.api.estimate import SIZES, ConfigSource, Prediction, config_of, with_changes, workload_of
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, UntraceableError, require, unknown
from autofit.core.estimate import Estimate
from autofit.core.hardware import Hardware
from autofit.core.layout import fitted_to
from autofit.core.options import SearchOptions, search_options
from autofit.core.plain import to_plain
from autofit.core.result import knobs_of
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.trace import Trace, trace
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import Card, card, card_names, card_prices, hardware_of
from autofit.models import HuggingFaceModel
from autofit.models.huggingface import huggingface_workload
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on, target_hardware

_AMPERE = (8, 0)  # attention takes other kernels from here on: all that a trace depends on of a card
_PRECISION = 8  # the longest sequence is found to an eighth of itself
_SHORTEST, _LONGEST = 16, 2**20  # tokens of the sequences to try
_VERDICTS = ("yes", "maybe", "no")
_OF_CARDS = ("gpu", "nodes", "link", "set")
_COSTS = ("dollars_per_billion_tokens", "dollars_per_million_samples")
_SHOWN = ("fits", "device_bytes", "step_seconds", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class Change:
    """One knob of a config at another value, and the estimate of that, without a breakdown."""

    knob: str
    value: Value
    estimate: Estimate

    @property
    def merit(self) -> tuple[int, float, int]:
        """For sorting: what fits first, the fastest of it first; what does not fit, by the memory
        it needs."""
        index = _VERDICTS.index(self.estimate.verdict or "no")
        return index, self.estimate.step_seconds or 0.0 if index < 2 else 0.0, self.estimate.low


def what_if(prediction: Prediction) -> dict[str, Any]:
    """The alternatives, the largest sizes that still fit, and of what does not surely fit what
    would help, for `--alternatives`; none where nothing is predicted."""
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
    asked = workload, prediction.hardware, prediction.budget, base.config
    remedies = [] if base.verdict == "yes" else to_plain(what_helps(*asked))
    return {"alternatives": rows, "largest": largest, "remedies": remedies}


def with_experts(prediction: Prediction) -> dict[str, Any] | None:
    """What adapters on a mixture's experts, too, would make of a config; None where there are none
    to be had."""
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
    """The longest samples predicted to fit, to an eighth of their length; None where even short
    ones are not."""
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
    """The largest length up to `most` that fits, to one part in _PRECISION; None where not even the
    shortest does."""
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
    """The estimate of a config that takes so many times the memory and time of the predicted
    one."""
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
        resting=None,
    )


def fitting_cards(
    model: str | Workload,
    config: ConfigSource = None,
    *,
    devices: int | str | Sequence[int | str] = 1,
    prices: Mapping[str, float] | str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Which cards of the catalogue a config fits, how many of them it takes, how fast it is there
    and what that costs.

    Args:
        config: as of `estimate`; of several numbers of devices, it is fitted to each.
        devices: of each node, one number or several.
        prices: dollars an hour for one card, by its name, or a file of them.
        options: gpu (one card instead of all), nodes, link, set, task, seq_len, effective_batch,
            trust_remote_code.

    Returns:
        The object of `autofit estimate --gpu list --json`. Of one device without prices the
        smallest card is the first; else what fits comes first, and of it the cheapest, or without
        prices the fastest.
    """
    for name in options:
        if name not in (*_OF_CARDS, *SIZES):
            raise unknown("option", name, (*_OF_CARDS, *SIZES))
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    dollars = {} if prices is None else card_prices(prices)
    named = options.pop("gpu", None)
    cards = [card(name) for name in (card_names() if named is None else [named])]
    newest = max(cards, key=lambda each: each.capability)
    numbers = devices if isinstance(devices, list | tuple) else [devices]
    require(numbers, "devices must be one number or several", devices)
    asked = [search_options(gpu=newest.name, devices=number, **options) for number in numbers]
    groups = sorted({target_hardware(each)[0] for each in asked}, key=lambda each: each.devices)
    workload = workload_of(model, groups[0], **sizes)
    rows: list[dict[str, Any]] = []
    configs: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    impossible: list[InputError] = []
    for group in groups:
        canonical: Config | InputError
        try:
            fitted = config
            if config is not None and len(groups) > 1:
                fitted = fitted_to(knobs_of(config), group.world, workload.effective_batch_size)
            canonical, notes = config_of(fitted, asked[0].set, workload, group)
            configs.append({"devices": group.devices, "config": dict(canonical)})
        except InputError as error:  # perhaps for this number of devices alone
            canonical = error
            impossible.append(error)
        rows += _on_cards(workload, canonical, cards, group)
    if not configs:
        raise impossible[0]
    rows = [row | _costs(row, dollars.get(row["name"])) for row in rows]
    alone = groups[-1].world == 1 and not dollars
    rows.sort(key=lambda row: (row["memory_bytes"], row["name"]) if alone else _merit(row))
    asked_of = {"model": workload.name, "workload": workload.summary(), "config": configs[0]["config"]}
    return {"schema": 1, **asked_of, "configs": configs, "cards": rows, "notes": list(notes)}


def _on_cards(
    workload: Workload, config: Config | InputError, cards: Sequence[Card], group: Hardware
) -> Iterator[dict[str, Any]]:
    """The figures of a config on so many of each card; of what is no config there, why it is
    none."""
    traces: dict[bool, Trace] = {}  # cards share them
    for target in cards:
        hardware = hardware_of(target).of_several(group.devices, group.nodes, group.link)
        ampere = target.capability >= _AMPERE
        row = {"name": target.name, "title": target.title, "memory_bytes": target.memory_bytes}
        row |= {"devices": group.devices, "nodes": group.nodes}
        figures = dict.fromkeys(_SHOWN) | {"fits": "no"}
        reason = config.message if isinstance(config, InputError) else techniques.refuse(config, workload, hardware)
        if isinstance(config, Config) and not reason:
            if ampere not in traces:
                traces[ampere] = trace(workload, config, hardware)
            figures = _figures(estimate_on(traces[ampere], workload, hardware, budget_for(SearchOptions(), hardware)))
        yield row | figures | {"reason": reason}


def _costs(row: Mapping[str, Any], price: float | None) -> dict[str, float | None]:
    """What a billion tokens cost, or a million samples where none are counted, at so many dollars
    an hour and card."""
    tokens, samples = row["tokens_per_second"], row["samples_per_second"]
    costs: dict[str, float | None] = dict.fromkeys(_COSTS)
    if price is not None and samples:
        a_second = price * row["devices"] * row["nodes"] / 3600
        name, cost = (_COSTS[0], 1e9 / tokens) if tokens else (_COSTS[1], 1e6 / samples)
        costs[name] = a_second * cost
    return costs


def _merit(row: Mapping[str, Any]) -> tuple[int, float, float]:
    """For sorting: what fits first, by what it costs where that is known, else by its speed."""
    costs = [row[name] for name in _COSTS if row[name] is not None]
    return _VERDICTS.index(row["fits"]), costs[0] if costs else math.inf, -(row["samples_per_second"] or 0.0)


def _figures(estimate: Estimate) -> dict[str, Any]:
    data = estimate.to_dict()
    return {name: data[name] for name in _SHOWN}
