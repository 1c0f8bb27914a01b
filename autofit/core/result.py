"""Result: all measurements of a search, the verified best and the best of every tier. Data only.

The only place that knows how a result looks as YAML (`result.yaml`), as JSON (`autofit search --json`) and as a table.
"""

import csv
import functools
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, require, shown
from autofit.core.estimate import Estimate, Remedy
from autofit.core.files import expanded
from autofit.core.hardware import GIB, Hardware
from autofit.core.learning import LearningCurve
from autofit.core.measurement import Measurement
from autofit.core.notebook import as_html
from autofit.core.pareto import Alternative, OtherBudget, Point, fastest_within
from autofit.core.plain import to_plain
from autofit.core.strict_yaml import dump, load_mapping

SCHEMA = 1
TIERS = ("full", "lora", "qlora", "head")
_AGAIN = "Write it again with autofit search."
_FIGURES = ("tokens_per_second", "samples_per_second", "loss", "seconds", "build_seconds", "compile_seconds", "steps")


def tier(config: Mapping[str, Any]) -> str:
    """Which of the kinds of learning a Config does; speeds are only equal work within one."""
    knobs = config if isinstance(config, Config) else Config(config)
    if knobs.head_only:
        return "head"
    if not knobs.lora_rank:
        return "full"
    return "lora" if knobs.quantization in (None, "none") else "qlora"


def tiers_of(points: Iterable[Point]) -> tuple[str, ...]:
    """The tiers to tell of: of the head alone only where it was asked for."""
    return TIERS if any(tier(each.config) == "head" for each in points) else TIERS[:-1]


@dataclass(frozen=True)
class OnDevices:
    """What is predicted of the best config on so many devices of each node: the bytes that each needs at most, and the
    tokens, or else samples, of all in a second."""

    devices: int
    high: int
    rate: float | None


@dataclass(frozen=True)
class Result:
    """The outcome of a search.

    Attributes:
        workload: Workload.description().
        source: how models/ makes the workload again; empty for one that lives in the user's process.
        skipped: number of configs never probed, by reason: predicted, dominated, refused.
        finalists: all that were verified, the best among them.
        bound: how much faster than the best measured config any other is expected to be at most, at 95 %, as a share.
        frontier: by tier the most throughput for each amount of memory, also beyond the budget.
        alternatives: the best config with one knob changed.
        predicted: whether configs never measured had a part in `frontier` and `alternatives`.
        predicted_best, predicted_tiers: the configs predicted to be the fastest that fit, where nothing can be measured
            for the card that is meant; `best` is None then.
        on_devices: the config of the answer on other numbers of devices, the fewest first; empty for a search over one.
        remedies: where nothing fits, what would help, the cheapest first.
        learning: what finalists learnt, where a judge was asked.
    """

    model: str
    workload: Mapping[str, Any]
    source: Mapping[str, Any]
    hardware: Hardware
    budget: Budget
    versions: Mapping[str, str]
    best: Measurement | None
    tiers: Mapping[str, Measurement | None]
    trials: tuple[Measurement, ...]
    skipped: Mapping[str, int]
    stopped_by: str
    space_size: int
    search_seconds: float
    nearest_miss: Measurement | None = None
    runner_up: Measurement | None = None
    finalists: tuple[Measurement, ...] = ()
    run_directory: str | None = None
    files: Mapping[str, str | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bound: float | None = None
    frontier: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    other_budgets: tuple[OtherBudget, ...] = ()
    predicted: bool = False
    predicted_best: Estimate | None = None
    predicted_tiers: Mapping[str, Estimate | None] = field(default_factory=dict)
    on_devices: tuple[OnDevices, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    learning: tuple[LearningCurve, ...] = ()

    @property
    def config(self) -> Config | None:
        """The config of the answer: the best that was measured, else the one predicted; None where nothing fits."""
        answer = self.best or self.predicted_best
        return answer.config if answer else None

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return self.stopped_by == "interrupt"

    # What reports ask for with every trial; each would otherwise look at all of them.

    @functools.cached_property
    def latest_by_config(self) -> Mapping[Config, Measurement]:
        """Of every config its latest measurement: finalists were measured again."""
        verified = (*self.finalists, *self.tiers.values(), self.runner_up, self.best)
        return {one.config: one for one in (*self.trials, *verified) if one is not None}

    @functools.cached_property
    def best_explored(self) -> Measurement | None:
        """The first measurement of the best config."""
        return next((one for one in self.trials if self.best and one.config == self.best.config), None)

    @functools.cached_property
    def unit(self) -> str:
        """What throughput counts."""
        return "tokens" if any(trial.tokens_per_second for trial in self.trials) else "samples"

    @functools.cached_property
    def units_per_sample(self) -> float:
        """Units of throughput in a sample: its tokens where tokens are counted."""
        for one in (self.best, *self.trials):
            if one and one.tokens_per_second and one.samples_per_second:
                return one.tokens_per_second / one.samples_per_second
        return 1.0

    def fastest_within(self, device_bytes: int) -> dict[str, Point | None]:
        """By tier the fastest config, measured or predicted, in a budget of so many bytes."""
        usable = replace(self.budget, device_bytes=device_bytes).cap_bytes(self.hardware.device)
        return {name: fastest_within(self.frontier.get(name, ()), usable) for name in self._shown}

    @property
    def _shown(self) -> tuple[str, ...]:
        """The tiers that are written down: of the head alone where it was asked for."""
        asked = self.tiers.get("head") or self.predicted_tiers.get("head") or self.frontier.get("head")
        return TIERS if asked else TIERS[:-1]

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The one object that `autofit search --json` prints."""
        predicted = _predicted(self.predicted_best)
        tiers = {name: _predicted(self.predicted_tiers.get(name)) for name in self._shown}
        return {
            "schema": SCHEMA,
            "best": _measured(self.best),
            "predicted": predicted and {**predicted, "tiers": tiers},
            "tiers": {name: _measured(self.tiers.get(name)) for name in self._shown},
            "trials": to_plain(self.trials),
            "skipped": {name: self.skipped.get(name, 0) for name in ("predicted", "dominated", "refused")},
            "stopped_by": self.stopped_by,
            "nearest_miss": to_plain(self.nearest_miss),
            "frontier": {name: to_plain(self.frontier.get(name, ())) for name in self._shown},
            "alternatives": [each.to_dict() for each in self.alternatives],
            "other_budgets": [
                {**to_plain(each), "runs": to_plain(self.fastest_within(each.device_bytes))}
                for each in self.other_budgets
            ],
            "on_devices": to_plain(self.on_devices),
            "remedies": to_plain(self.remedies),
            **({"learning": to_plain(self.learning)} if self.learning else {}),
            "space_size": self.space_size,
            "search_seconds": round(self.search_seconds, 3),
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "files": {**dict.fromkeys(("result", "script", "exports", "report")), **self.files},
        }

    def trials_csv(self) -> str:
        """All trials as CSV, a column a knob or a figure; what was not measured is empty."""
        rows = self._rows()
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["number"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def trials_dataframe(self) -> Any:
        """All trials as a pandas.DataFrame; raises InputError where pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("a data frame needs pandas, which is not installed.", "pip install pandas") from error
        return pandas.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        """One mapping a trial, all with the same names; None where a figure was not measured. Sizes are bytes."""
        knobs = list(dict.fromkeys(knob for trial in self.trials for knob in trial.config))
        return [
            {
                "number": trial.number,
                **{knob: trial.config.get(knob) for knob in knobs},
                "outcome": trial.outcome.value,
                "step_seconds": (steps := trial.step_seconds) and steps.median,
                "step_seconds_low": steps and steps.low,
                "step_seconds_high": steps and steps.high,
                **{name: getattr(trial, name) for name in _FIGURES},
                "allocated_bytes": (peak := trial.peak_bytes) and peak.allocated,
                "reserved_bytes": peak and peak.reserved,
                "device_bytes": peak and peak.device,
                "verified": trial.verified,
                "reason": trial.reason,
            }
            for trial in self.trials
        ]

    def to_yaml(self) -> str:
        """The text of result.yaml; raises InputError where there is no best config to write down."""
        if self.config is None:
            raise InputError("a result without a best config has nothing to write down.")
        hardware = {
            "device": self.hardware.device,
            "name": self.hardware.name,
            "memory_gib": round(self.hardware.memory_bytes / GIB, 1),
            "budget_gib": round(self.budget.device_bytes / GIB, 3),
            "margin": self.budget.margin,
        }
        optional = {"allocator": self.hardware.allocator, "measured_on": self.hardware.measured_on}
        data: dict[str, Any] = {
            "autofit": SCHEMA,
            "model": self.model,
            "workload": dict(self.workload),
            "source": dict(self.source),
            "devices": self.hardware.devices,  # on each node
            "nodes": self.hardware.nodes,
            "hardware": {**hardware, **{name: value for name, value in optional.items() if value}},
            "versions": dict(self.versions),
            "config": dict(self.config),
        }
        if self.best is not None:
            data["measured"] = self.best.to_measured()
            data["tiers"] = {name: _measured(self.tiers.get(name)) for name in self._shown}
        elif self.predicted_best is not None:
            data |= {"measured": None, "predicted": self.predicted_best.to_predicted()}
            estimates = {name: self.predicted_tiers.get(name) for name in self._shown}
            data["tiers"] = {
                name: each and {"config": dict(each.config), "predicted": each.to_predicted()}
                for name, each in estimates.items()
            }
        return dump(data)


def _measured(measurement: Measurement | None) -> dict[str, Any] | None:
    return None if measurement is None else {"config": dict(measurement.config), "measured": measurement.to_measured()}


def _predicted(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else {"config": dict(estimate.config), "estimate": estimate.to_dict()}


def result_of(given: "Result | SavedResult | str | Path") -> "Result | SavedResult":
    """A result, read where it is the path of a result.yaml; an InputError for anything else."""
    if isinstance(given, str | Path):
        return SavedResult.load(expanded(given, "the path of a result"))
    rule = "a result is needed, or the path of a result.yaml"
    require(isinstance(given, Result | SavedResult), rule, given, "Give what autofit.search gave.")
    return given


@dataclass(frozen=True)
class SavedResult:
    """What a later command reads from result.yaml: how to make the workload again, and the config to run. Where nothing
    was measured, `measured` is empty and `predicted` holds the figures."""

    model: str
    workload: Mapping[str, Any]
    source: Mapping[str, Any]
    hardware: Mapping[str, Any]
    config: Config
    measured: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> "SavedResult":
        """Read a result.yaml; raises InputError where `autofit search` did not write it."""
        data = load_mapping(path)
        missing = [key for key in ("autofit", "model", "workload", "config") if key not in data]
        if missing:
            message = f"{path} is not a result of autofit: it lacks {', '.join(missing)}."
            raise InputError(message, "Give a result.yaml.")
        if data["autofit"] != SCHEMA:
            raise InputError(f"{path} has schema {shown(data['autofit'])}; this autofit reads schema {SCHEMA}.")
        parts = {key: data[key] for key in ("workload", "config")}
        parts |= {key: data.get(key) or {} for key in ("source", "hardware", "measured", "predicted", "versions")}
        several = {key: data[key] for key in ("devices", "nodes") if key in data}
        for key, part in parts.items():
            if not isinstance(part, dict) or not isinstance(data.get(key), dict | None):
                raise InputError(f"{path}: {key} must be a mapping.", _AGAIN)
        try:
            parts["hardware"] = {**parts["hardware"], **several}
            _Parts.model_validate({**parts, "model": data["model"]}, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            given = f"{'.'.join(map(str, first['loc']))} is {shown(first['input'])}"
            raise InputError(f"{path}: {given}. {first['msg']}.", _AGAIN) from error
        return cls(model=data["model"], **{**parts, "config": Config(parts["config"])})


def knobs_of(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The knobs of a config file, of a result.yaml, or of a mapping."""
    if isinstance(source, Mapping):
        return source
    rule = "config must be an autofit.Config, a mapping of knobs or a path"
    require(isinstance(source, str | Path), rule, source, "Or leave it out.")
    data = load_mapping(expanded(source, "config"))
    return SavedResult.load(source).config if {"autofit", "config"} & data.keys() else data


# What is read of a result.yaml: each part and figure optional, but of its type where it is there.
_TEXT: Any = (str | None, None)
_COUNT: Any = (Annotated[int, Field(ge=1)] | None, None)
_FINITE: Any = Annotated[float, Field(allow_inf_nan=False)]
_NUMBER: Any = (_FINITE | None, None)
_STEP: Any = (create_model("Step", median=_FINITE, low=_FINITE, high=_FINITE) | None, None)
_PEAK: Any = (create_model("Peak", allocated=_FINITE, reserved=_NUMBER, device=_NUMBER) | None, None)
_INTERVAL: Any = (create_model("Interval", low=_FINITE, high=_FINITE) | None, None)
_Speeds = create_model("Speeds", tokens_per_second=_NUMBER, samples_per_second=_NUMBER)
_SIZES = dict.fromkeys(("memory_gib", "budget_gib", "margin"), _NUMBER)
_Parts = create_model(
    "Parts",
    model=str,
    workload=create_model(
        "Work",
        **dict.fromkeys(("task", "data", "form"), _TEXT),
        packing=(bool | None, None),
        **dict.fromkeys(("sequence_length", "effective_batch_size", "document_tokens"), _COUNT),
    ),
    hardware=create_model(
        "Device",
        **_SIZES,
        **dict.fromkeys(("device", "name", "allocator", "measured_on"), _TEXT),
        **dict.fromkeys(("devices", "nodes"), _COUNT),
    ),
    versions=dict[str, str],
    measured=create_model(
        "Measured", __base__=_Speeds, step_seconds=_STEP, peak_gib=_PEAK, predicted_communication_seconds=_NUMBER
    ),
    predicted=create_model("Predicted", __base__=_Speeds, step_seconds=_NUMBER, device_bytes=_INTERVAL),
)
