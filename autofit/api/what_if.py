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
from autofit.api.estimate import (
    SIZES,
    ConfigSource,
    Prediction,
    config_of,
    with_changes,
    workload_of,
)
from autofit.api.other_layouts import other_layouts, which_wins
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, UntraceableError, require, unknown
from autofit.core.estimate import Estimate
from autofit.core.hardware import Hardware
from autofit.core.layout import fitted_to
from autofit.core.options import SearchOptions, search_options
from autofit.core.plain import to_plain
from autofit.core.result import knobs_of
from autofit.core.workload import Workload
from autofit.estimate.cuda_kernels import kernels_of
from autofit.estimate.figures import predict_all
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import Card, card, card_names, card_prices, hardware_of
from autofit.models import HuggingFaceModel
from autofit.models.huggingface import of_length
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on, target_hardware

_MANY_OPERATORS = 8000  # of a step: ten seconds and more to follow
_PRECISION = 8  # the longest sequence is found to an eighth of itself
_SHORTEST = 16  # tokens of the sequences to try
_LONGEST = 2**20
_VERDICTS = ("yes", "maybe", "no")
_OF_CARDS = ("gpu", "nodes", "link", "set", *SIZES)
_FIGURES = ("fits", "device_bytes", "step_seconds", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class Change:
    """One knob of a config at another value, and the estimate of that, without a breakdown."""

    knob: str
    value: Value
    estimate: Estimate

    @property
    def merit(self) -> tuple[int, float, int]:
        """For sorting: what fits first, the fastest first; what does not fit, by its memory."""
        rank = _VERDICTS.index(self.estimate.verdict or "no")
        seconds = 0.0
        if _VERDICTS[rank] != "no":
            seconds = self.estimate.step_seconds or 0.0
        return rank, seconds, self.estimate.low


def takes_minutes(prediction: Prediction) -> bool:
    """Whether `what_if` has to follow large steps block by block, one for most changes."""
    if prediction.operators < _MANY_OPERATORS:
        return False

    config = prediction.estimate.config
    skeleton = Skeleton.cut_short(
        prediction.workload,
        prediction.hardware,
        Cut.of(config),
    )
    return skeleton.depth is None


def what_if(prediction: Prediction) -> dict[str, Any]:
    """What `--alternatives` shows beside a prediction.

    Returns:
        alternatives: single changes of a knob; none where nothing can be predicted.
        layouts, layouts_note: on several devices, the other ways to divide the training, and which
            is the fastest and why.
        largest: the largest sizes that still fit.
        remedies: what would help a config that does not surely fit.
    """
    rule = "what_if takes what predict gives"
    require(isinstance(prediction, Prediction), rule, prediction)
    base = prediction.estimate
    workload = prediction.workload
    legal = list(_legal_changes(prediction))
    ways = list(other_layouts(prediction))
    configs = [*(config for _, _, config in legal), *(config for _, config in ways)]
    estimates = _estimates(prediction, configs)
    alternatives = _changes(legal, estimates)

    largest: dict[str, Value] = {}
    for knob in ("micro_batch_size", "lora_rank"):
        candidates = [*alternatives, Change(knob, base.config[knob], base)]
        fitting = [
            candidate.value
            for candidate in candidates
            if candidate.knob == knob and candidate.estimate.verdict == "yes"
        ]
        largest[knob] = max((int(value) for value in fitting if value), default=None)
    if isinstance(workload.model, HuggingFaceModel) and workload.sequence_length:
        largest["sequence_length"] = longest(prediction)

    remedies = []
    if base.verdict != "yes":
        found = what_helps(workload, prediction.hardware, prediction.budget, base.config)
        remedies = to_plain(found)
    rows = []
    for change in alternatives:
        row = {"knob": change.knob, "value": change.value}
        row |= _figures(change.estimate)
        rows.append(row)

    answer: dict[str, Any] = {"alternatives": rows, "largest": largest, "remedies": remedies}
    layouts = []
    for (way, _), estimate in zip(ways, estimates[len(legal) :], strict=False):
        if estimate is not None:
            layouts.append({"knobs": dict(way), **_figures(estimate)})
    if layouts:
        answer["layouts"] = layouts
        answer["layouts_note"] = which_wins(prediction, layouts)

    return answer


def with_experts(prediction: Prediction) -> dict[str, Any] | None:
    """The figures with adapters on a mixture's experts, too; None where there are no experts."""
    traits = prediction.workload.traits
    if traits is None:
        return None

    targets = prediction.estimate.config.lora_targets
    wanted = ("lora_targets", f"{targets}+{traits.experts}")
    legal = [change for change in _legal_changes(prediction) if change[:2] == wanted]
    if not legal:
        return None
    found = _predicted(prediction, legal)
    if not found:
        return None
    return {"lora_targets": found[0].value, **_figures(found[0].estimate)}


def changes(prediction: Prediction) -> list[Change]:
    """Every legal change of a single knob that can be predicted, the best first."""
    return _predicted(prediction, list(_legal_changes(prediction)))


def _estimates(prediction: Prediction, configs: Sequence[Config]) -> list[Estimate | None]:
    """What is predicted of other configs, together; None where nothing can be, and no entry where
    that is so of all."""
    every = [prediction.estimate.config, *configs]
    try:
        memory, seconds = predict_all(
            prediction.workload,
            prediction.hardware,
            every,
            processes=prediction.processes,
        )
    except UntraceableError:
        return []

    found: list[Estimate | None] = []
    for config, nbytes, time in zip(configs, memory[1:], seconds[1:], strict=True):
        ratio = nbytes / memory[0]
        estimate = None
        if not math.isnan(ratio):
            estimate = scaled(prediction, config, memory=ratio, time=time / seconds[0])
        found.append(estimate)

    return found


def _predicted(
    prediction: Prediction,
    legal: Sequence[tuple[str, Value, Config]],
) -> list[Change]:
    """The changes that can be predicted, the best first."""
    configs = [config for _, _, config in legal]
    return _changes(legal, _estimates(prediction, configs))


def _changes(
    legal: Sequence[tuple[str, Value, Config]],
    estimates: Sequence[Estimate | None],
) -> list[Change]:
    """The changes of which something is predicted, the best first."""
    found = []
    for (knob, value, _), estimate in zip(legal, estimates, strict=False):
        if estimate is not None:
            found.append(Change(knob, value, estimate))
    return sorted(found, key=lambda change: change.merit)


def _legal_changes(prediction: Prediction) -> Iterator[tuple[str, Value, Config]]:
    """A knob, its other value, and the config with it: each possible config once."""
    base = prediction.estimate.config
    workload = prediction.workload
    hardware = prediction.hardware
    configs = {base}
    for technique in techniques.all_techniques():
        for value in technique.choices_for(workload, hardware):
            changed = with_changes({technique.name: value}, base)
            try:
                config = techniques.canonicalize(changed, workload, hardware)
            except InputError:  # it contradicts another knob
                continue
            if config not in configs and techniques.refuse(config, workload, hardware) is None:
                configs.add(config)
                yield technique.name, value, config


def longest(prediction: Prediction) -> int | None:
    """The longest samples predicted to fit, to an eighth; None where even short ones do not."""
    workload = prediction.workload
    config = prediction.estimate.config
    start = workload.sequence_length
    assert start, "only samples with a length can be of another"

    def bytes_at(length: int) -> float:
        other = of_length(workload, length)
        try:
            return predict_all(other, prediction.hardware, [config])[0][0]
        except UntraceableError:
            return math.nan

    reference = bytes_at(start)
    limit = prediction.budget.cap_bytes(prediction.hardware.device)

    def room(length: int) -> float:
        ratio = 1.0
        if length != start:
            ratio = bytes_at(length) / reference
        if math.isnan(ratio):
            return -math.inf
        return limit - scaled(prediction, config, memory=ratio).high

    model: Any = workload.model
    return _largest_with(room, start, model.longest() or _LONGEST)


def _largest_with(room: Callable[[int], float], start: int, most: int) -> int | None:
    """The largest length up to `most` that leaves room, 0 bytes or more, to one part in _PRECISION.

    None: not even the shortest does. Bytes grow with the length, nearly evenly: each length to try
    is where a straight line through what is known has no room left, and the next one a part beyond.
    """
    left = {start: room(start)}

    def fits(length: int) -> bool:
        if length not in left:
            left[length] = room(length)
        return left[length] >= 0

    low = start
    high = start
    if not fits(start):
        low = _SHORTEST
        if low >= start or not fits(low):
            return None

    while low == high:  # nothing that does not fit is known yet
        if low >= most:
            return low
        high = min(2 * low, most)
        if fits(high):
            low = high

    is_even = True  # whether the line told well so far
    while high - low > max(1, low // _PRECISION):
        middle = math.isqrt(low * high)
        if is_even and math.isfinite(left[high]):
            middle = int(low + (high - low) * left[low] / (left[low] - left[high]))

        middle = min(max(low + 1, middle), high - 1)
        beyond = middle + max(1, middle // _PRECISION)
        if not fits(middle):
            high = middle
            is_even = False
        elif beyond >= high:
            low = middle
        elif fits(beyond):
            low = beyond
            is_even = not is_even
        else:
            low = middle
            high = beyond

    return low


def scaled(
    prediction: Prediction,
    config: Config,
    *,
    memory: float,
    time: float = 1.0,
) -> Estimate:
    """The estimate of a config that takes so many times the predicted memory and time."""
    base = prediction.estimate
    context = base.breakdown["context"]  # which stays
    return dataclasses.replace(
        base,
        config=config,
        allocated_bytes=int(base.allocated_bytes * memory),
        reserved_bytes=base.reserved_bytes and int(base.reserved_bytes * memory),
        low=int(context + (base.low - context) * memory),
        high=int(context + (base.high - context) * memory),
        breakdown={},
        step_seconds=base.step_seconds and base.step_seconds * time,
        samples_per_second=base.samples_per_second and base.samples_per_second / time,
        tokens_per_second=base.tokens_per_second and base.tokens_per_second / time,
        bottleneck=None,
        utilisation=None,
        resting=None,
        evaluation_bytes=None,
        saving_bytes=None,
    )


def fitting_cards(
    model: str | Workload,
    config: ConfigSource = None,
    *,
    devices: int | str | Sequence[int | str] = 1,
    prices: Mapping[str, float] | str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Which cards of the catalogue a config fits, how many, how fast it is there and at what cost.

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
        if name not in _OF_CARDS:
            raise unknown("option", name, _OF_CARDS)
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    dollars: Mapping[str, float] = {}
    if prices is not None:
        dollars = card_prices(prices)

    named = options.pop("gpu", None)
    names = card_names() if named is None else [named]
    cards = [card(name) for name in names]
    newest = max(cards, key=lambda target: target.capability)

    numbers = devices if isinstance(devices, list | tuple) else [devices]
    require(numbers, "devices must be one number or several", devices)
    asked = [search_options(gpu=newest.name, devices=number, **options) for number in numbers]
    groups = {target_hardware(checked)[0] for checked in asked}
    groups_by_size = sorted(groups, key=lambda group: group.devices)
    workload = workload_of(model, groups_by_size[0], **sizes)

    rows: list[dict[str, Any]] = []
    configs: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    impossible: list[InputError] = []
    for group in groups_by_size:
        canonical: Config | InputError
        try:
            fitted = config
            if config is not None and len(groups) > 1:
                effective = workload.effective_batch_size
                fitted = fitted_to(knobs_of(config), group.world, effective)
            canonical, notes = config_of(fitted, asked[0].set, workload, group)
            configs.append({"devices": group.devices, "config": dict(canonical)})
        except InputError as error:  # perhaps for this number of devices alone
            canonical = error
            impossible.append(error)
        rows += _on_cards(workload, canonical, cards, group)
    if not configs:
        raise impossible[0]

    for row in rows:
        row |= _costs(row, dollars.get(row["name"]))
    if groups_by_size[-1].world == 1 and not dollars:
        rows.sort(key=lambda row: (row["memory_bytes"], row["name"]))
    else:
        rows.sort(key=_merit)

    return {
        "schema": 1,
        "model": workload.name,
        "workload": workload.summary(),
        "config": configs[0]["config"],
        "configs": configs,
        "cards": rows,
        "notes": list(notes),
    }


def _on_cards(
    workload: Workload,
    config: Config | InputError,
    cards: Sequence[Card],
    group: Hardware,
) -> Iterator[dict[str, Any]]:
    """The figures of a config on so many of each card; None, and why, where it is impossible."""
    traces: dict[tuple[bool, ...], Trace] = {}  # cards with the same kernels share them
    for target in cards:
        hardware = hardware_of(target).of_several(group.devices, group.nodes, group.link)
        figures = {**dict.fromkeys(_FIGURES), "fits": "no"}
        if isinstance(config, InputError):
            reason: str | None = config.message
        else:
            reason = techniques.refuse(config, workload, hardware)
            if not reason:
                kernels = kernels_of(hardware)
                if kernels not in traces:
                    traces[kernels] = trace(workload, config, hardware)
                budget = budget_for(SearchOptions(), hardware)
                figures = _figures(estimate_on(traces[kernels], workload, hardware, budget))

        yield {
            "name": target.name,
            "title": target.title,
            "memory_bytes": target.memory_bytes,
            "devices": group.devices,
            "nodes": group.nodes,
            **figures,
            "reason": reason,
        }


def _costs(row: Mapping[str, Any], price: float | None) -> dict[str, float | None]:
    """What a billion tokens cost, or a million samples where none are counted.

    `price` is in dollars an hour and card; None: it is not known.
    """
    per_tokens = None
    per_samples = None
    samples = row["samples_per_second"]
    if price is not None and samples:
        dollars_per_second = price * row["devices"] * row["nodes"] / 3600
        tokens = row["tokens_per_second"]
        if tokens:
            per_tokens = dollars_per_second * (1e9 / tokens)
        else:
            per_samples = dollars_per_second * (1e6 / samples)
    return {
        "dollars_per_billion_tokens": per_tokens,
        "dollars_per_million_samples": per_samples,
    }


def _merit(row: Mapping[str, Any]) -> tuple[int, float, float]:
    """For sorting: what fits first, by what it costs where that is known, else by its speed."""
    cost = row["dollars_per_billion_tokens"]
    if cost is None:
        cost = row["dollars_per_million_samples"]
    if cost is None:
        cost = math.inf
    return _VERDICTS.index(row["fits"]), cost, -(row["samples_per_second"] or 0.0)


def _figures(estimate: Estimate) -> dict[str, Any]:
    figures = estimate.to_dict()
    return {name: figures[name] for name in _FIGURES}
