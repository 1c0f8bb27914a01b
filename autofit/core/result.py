"""Result: all measurements of a search, the verified best and the best of every tier. Data only.

The only place that knows how a result looks as YAML (`result.yaml`), as JSON (`autofit search
--json`) and as a table.
"""

import csv
import functools
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, pluralize, require, shown
from autofit.core.estimate import Estimate, Remedy
from autofit.core.files import expanded
from autofit.core.hardware import GIB, Hardware
from autofit.core.knobs import KNOBS
from autofit.core.learning import LearningCurve
from autofit.core.measurement import Measurement
from autofit.core.notebook import as_html
from autofit.core.pareto import Alternative, OtherBudget, Point, fastest_within
from autofit.core.plain import to_plain
from autofit.core.strict_yaml import dump, load_mapping

SCHEMA = 1
TIERS = ("full", "lora", "qlora", "head")
_SKIPPED = ("predicted", "dominated", "refused")
_FILES = ("result", "script", "exports", "report")
_AGAIN = "Write it again with autofit search."


def tier(config: Mapping[str, Any]) -> str:
    """What a Config trains: all weights, adapters, adapters of a quantized model, or the head."""
    knobs = config if isinstance(config, Config) else Config(config)
    if knobs.head_only:
        return "head"
    if not knobs.lora_rank:
        return "full"
    if knobs.quantization in (None, "none"):
        return "lora"
    return "qlora"


class _Row(Protocol):
    """What has a config: a measurement, a point, figures."""

    @property
    def config(self) -> Config: ...


_R = TypeVar("_R", bound=_Row)


def of_tier(name: str, rows: Iterable[_R]) -> list[_R]:
    """Those of a tier."""
    return [row for row in rows if tier(row.config) == name]


def tiers_of(points: Iterable[Point]) -> tuple[str, ...]:
    """The tiers to report; the head's only where a point trains the head alone."""
    if any(tier(point.config) == "head" for point in points):
        return TIERS
    return TIERS[:-1]


@dataclass(frozen=True)
class OnDevices:
    """A prediction for the best config on a number of devices of each node.

    Attributes:
        devices: their number.
        high: the bytes that each needs at most.
        rate: tokens a second of all together, or samples where no tokens are counted.
    """

    devices: int
    high: int
    rate: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The configs that a search recommends.

    Attributes:
        best: the fastest that was measured and verified; None where nothing fits or nothing could
            be measured.
        tiers: the same of every tier.
        predicted_best, predicted_tiers: the configs predicted to be the fastest that fit, where the
            card that is meant is not here to be measured on.
        remedies: where nothing fits, what would help, the cheapest first.
    """

    best: Measurement | None
    tiers: Mapping[str, Measurement | None]
    runner_up: Measurement | None = None
    nearest_miss: Measurement | None = None
    predicted_best: Estimate | None = None
    predicted_tiers: Mapping[str, Estimate | None] = field(default_factory=dict)
    remedies: tuple[Remedy, ...] = ()

    @property
    def config(self) -> Config | None:
        """The config of the answer, measured or else predicted; None where nothing fits."""
        answer = self.best or self.predicted_best
        return answer.config if answer else None


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What a search tried.

    Attributes:
        skipped: number of configs never probed, by reason: predicted, dominated, refused.
        finalists: the measurements of all configs that were verified, the best among them.
        bound: how much faster than the best measured config any other is expected to be at most, at
            95 %, as a share; by discounted speed.
    """

    trials: tuple[Measurement, ...]
    skipped: Mapping[str, int]
    stopped_by: str
    space_size: int
    search_seconds: float
    finalists: tuple[Measurement, ...] = ()
    bound: float | None = None

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the search."""
        return self.stopped_by == "interrupt"

    @functools.cached_property
    def unit(self) -> str:
        """What throughput counts."""
        return "tokens" if any(trial.tokens_per_second for trial in self.trials) else "samples"

    def trials_csv(self) -> str:
        """All trials as CSV, a column a knob or a figure; what was not measured is empty."""
        rows = self._rows()
        columns = list(rows[0]) if rows else ["number"]

        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def trials_dataframe(self) -> Any:
        """All trials as a pandas.DataFrame; raises InputError where pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            message = "a data frame needs pandas, which is not installed."
            raise InputError(message, "pip install pandas") from error
        return pandas.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        """One mapping a trial, all with the same keys; None for what was not measured."""
        knobs = dict.fromkeys(knob for trial in self.trials for knob in trial.config)
        rows = []

        for trial in self.trials:
            steps = trial.step_seconds
            peak = trial.peak_bytes
            settings = {knob: trial.config.get(knob) for knob in knobs}

            row = {
                "number": trial.number,
                **settings,
                "outcome": trial.outcome.value,
                "step_seconds": steps and steps.median,
                "step_seconds_low": steps and steps.low,
                "step_seconds_high": steps and steps.high,
                "tokens_per_second": trial.tokens_per_second,
                "samples_per_second": trial.samples_per_second,
                "loss": trial.loss,
                "seconds": trial.seconds,
                "build_seconds": trial.build_seconds,
                "compile_seconds": trial.compile_seconds,
                "steps": trial.steps,
                "allocated_bytes": peak and peak.allocated,
                "reserved_bytes": peak and peak.reserved,
                "device_bytes": peak and peak.device,
                "verified": trial.verified,
                "reason": trial.reason,
            }
            rows.append(row)
        return rows


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """What a search says around its answer.

    Attributes:
        frontier: by tier the most throughput for each amount of memory, also beyond the budget.
        alternatives: the best config with one knob changed.
        predicted: whether configs never measured had a part in `frontier` and `alternatives`.
        on_devices: the config of the answer on other numbers of devices, the fewest first; empty
            for a search over one.
        trained: how many parameters the best of each tier trains, where its step was followed.
        learning: what finalists learnt, where a judge was asked.
        notes: sentences that the user should know.
    """

    frontier: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    other_budgets: tuple[OtherBudget, ...] = ()
    predicted: bool = False
    on_devices: tuple[OnDevices, ...] = ()
    trained: Mapping[str, int] = field(default_factory=dict)
    learning: tuple[LearningCurve, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result(Answer, Trials, Annotations):
    """The outcome of a search: what was searched for, the answer, the trials, and annotations.

    Attributes:
        workload: Workload.description().
        source: how models/ makes the workload again; empty for one that lives in the user's
            process.
        files: the paths of what was written, by kind.
    """

    model: str
    workload: Mapping[str, Any]
    source: Mapping[str, Any]
    hardware: Hardware
    budget: Budget
    versions: Mapping[str, str]
    run_directory: str | None = None
    files: Mapping[str, str | None] = field(default_factory=dict)

    # Reports ask for these with every trial, and computing one looks at all trials: so they are
    # cached.

    @functools.cached_property
    def latest_by_config(self) -> Mapping[Config, Measurement]:
        """The latest measurement of each config: finalists were measured again."""
        in_order = (
            *self.trials,
            *self.finalists,
            *self.tiers.values(),
            self.runner_up,
            self.best,
        )

        return {trial.config: trial for trial in in_order if trial is not None}

    @functools.cached_property
    def best_explored(self) -> Measurement | None:
        """The first measurement of the best config."""
        if self.best:
            for trial in self.trials:
                if trial.config == self.best.config:
                    return trial
        return None

    @functools.cached_property
    def units_per_sample(self) -> float:
        """Units of throughput in a sample: its tokens where tokens are counted."""
        for measurement in (self.best, *self.trials):
            if measurement and measurement.tokens_per_second and measurement.samples_per_second:
                return measurement.tokens_per_second / measurement.samples_per_second
        return 1.0

    def fastest_within(self, device_bytes: int) -> dict[str, Point | None]:
        """By tier the fastest config, measured or predicted, in a budget of so many bytes."""
        budget = replace(self.budget, device_bytes=device_bytes)
        usable = budget.cap_bytes(self.hardware.device)

        fronts = {name: self.frontier.get(name, ()) for name in self._shown_tiers}
        return {name: fastest_within(front, usable) for name, front in fronts.items()}

    @property
    def _shown_tiers(self) -> tuple[str, ...]:
        """The tiers that are written down; the head's only where it was asked for."""
        for by_tier in (self.tiers, self.predicted_tiers, self.frontier):
            if by_tier.get("head"):
                return TIERS
        return TIERS[:-1]

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def __repr__(self) -> str:
        """The answer of each tier, a line each; `to_json` and `trials_dataframe` hold the rest."""
        memory = f"{self.budget.device_bytes / GIB:.2f} GiB"
        trials = pluralize(len(self.trials), "trial")
        lines = [f"Result: {self.model} on {self.hardware.title} within {memory}, {trials}"]

        for name in self._shown_tiers:
            measured = self.tiers.get(name)
            estimate = self.predicted_tiers.get(name)
            if measured and measured.peak_bytes:
                lines.append(_line(name, measured, measured.peak_bytes.held_bytes, "measured"))
            elif estimate:
                lines.append(_line(name, estimate, estimate.high, "predicted"))

        if self.config is None:
            lines.append("  nothing fits")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The one object that `autofit search --json` prints."""
        tiers = self._shown_tiers

        predicted = _predicted(self.predicted_best)
        if predicted is not None:
            estimates = self.predicted_tiers
            predicted["tiers"] = {name: _predicted(estimates.get(name)) for name in tiers}

        other_budgets = []
        for budget in self.other_budgets:
            runs = self.fastest_within(budget.device_bytes)
            other_budgets.append({**to_plain(budget), "runs": to_plain(runs)})

        data = {
            "schema": SCHEMA,
            "best": _measured(self.best),
            "predicted": predicted,
            "tiers": {name: _measured(self.tiers.get(name)) for name in tiers},
            "trials": to_plain(self.trials),
            "skipped": {reason: self.skipped.get(reason, 0) for reason in _SKIPPED},
            "stopped_by": self.stopped_by,
            "nearest_miss": to_plain(self.nearest_miss),
            "frontier": {name: to_plain(self.frontier.get(name, ())) for name in tiers},
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "other_budgets": other_budgets,
            "on_devices": to_plain(self.on_devices),
            "remedies": to_plain(self.remedies),
        }
        if self.learning:
            data["learning"] = to_plain(self.learning)

        return data | {
            "space_size": self.space_size,
            "search_seconds": round(self.search_seconds, 3),
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "files": {**dict.fromkeys(_FILES), **self.files},
        }

    def to_yaml(self) -> str:
        """The text of result.yaml; raises InputError where there is no best config."""
        if self.config is None:
            raise InputError("a result without a best config has nothing to write down.")

        hardware: dict[str, Any] = {
            "device": self.hardware.device,
            "name": self.hardware.name,
            "memory_gib": round(self.hardware.memory_bytes / GIB, 1),
            "budget_gib": round(self.budget.device_bytes / GIB, 3),
            "margin": self.budget.margin,
        }
        if self.hardware.allocator:
            hardware["allocator"] = self.hardware.allocator
        if self.hardware.measured_on:
            hardware["measured_on"] = self.hardware.measured_on

        data: dict[str, Any] = {
            "autofit": SCHEMA,
            "model": self.model,
            "workload": dict(self.workload),
            "source": dict(self.source),
            "devices": self.hardware.devices,  # on each node
            "nodes": self.hardware.nodes,
            "hardware": hardware,
            "versions": dict(self.versions),
            "config": dict(self.config),
        }

        if self.best is not None:
            data["measured"] = self.best.to_measured()
            data["tiers"] = {name: _measured(self.tiers.get(name)) for name in self._shown_tiers}
        elif self.predicted_best is not None:
            data["measured"] = None
            data["predicted"] = self.predicted_best.to_predicted()
            data["tiers"] = dict.fromkeys(self._shown_tiers)
            for name in self._shown_tiers:
                estimate = self.predicted_tiers.get(name)
                if estimate:
                    data["tiers"][name] = {
                        "config": dict(estimate.config),
                        "predicted": estimate.to_predicted(),
                    }
        return dump(data)


def _line(name: str, answer: Measurement | Estimate, held_bytes: int, how: str) -> str:
    """The best of a tier: its speed, its memory and the knobs that are on."""
    rate, unit = answer.tokens_per_second, "tokens"
    if not rate:
        rate, unit = answer.samples_per_second, "samples"
    speed = f"{rate:,.4g} {unit}/s, " if rate else ""

    knobs = []
    for knob, value in answer.config.items():
        if value is not None and not (knob in KNOBS and value == KNOBS[knob].off):
            knobs.append(f"{knob}={value}")
    return f"  {name}: {speed}{held_bytes / GIB:.2f} GiB ({how}); {', '.join(knobs)}"


def _measured(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    return {"config": dict(measurement.config), "measured": measurement.to_measured()}


def _predicted(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"config": dict(estimate.config), "estimate": estimate.to_dict()}


def result_of(given: "Result | SavedResult | str | Path") -> "Result | SavedResult":
    """A result, read where it is the path of a result.yaml; an InputError for anything else."""
    if isinstance(given, str | Path):
        return SavedResult.load(expanded(given, "the path of a result"))

    rule = "a result is needed, or the path of a result.yaml"
    require(isinstance(given, Result | SavedResult), rule, given, "Give what autofit.search gave.")
    return given


@dataclass(frozen=True)
class SavedResult:
    """What a later command reads from result.yaml: how to make the workload, and the config to run.

    Where nothing was measured, `measured` is empty and `predicted` holds the figures.
    """

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
            schema = shown(data["autofit"])
            raise InputError(f"{path} has schema {schema}; this autofit reads schema {SCHEMA}.")

        parts = {key: data[key] for key in ("workload", "config")}
        for key in ("source", "hardware", "measured", "predicted", "versions"):
            part = data.get(key)
            parts[key] = {} if part is None else part

        for key, part in parts.items():
            if not isinstance(part, dict):
                raise InputError(f"{path}: {key} must be a mapping.", _AGAIN)

        counts = {key: data[key] for key in ("devices", "nodes") if key in data}
        parts["hardware"] = {**parts["hardware"], **counts}
        parts["model"] = data["model"]

        try:
            _Parts.model_validate(parts, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            message = f"{path}: {place} is {shown(first['input'])}. {first['msg']}."
            raise InputError(message, _AGAIN) from error

        parts["config"] = Config(parts["config"])
        return cls(**parts)


def knobs_of(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The knobs of a config file, of a result.yaml, or of a mapping."""
    if isinstance(source, Mapping):
        return source

    rule = "config must be an autofit.Config, a mapping of knobs or a path"
    require(isinstance(source, str | Path), rule, source, "Or leave it out.")

    data = load_mapping(expanded(source, "config"))
    if "autofit" in data or "config" in data:
        return SavedResult.load(source).config
    return data


# What is read of a result.yaml: each figure may be absent, but is of its type where it is there.
# Errors show the names Interval, Step and Peak, which is why they have no underscore.
_Text = str | None
_Count = Annotated[int, Field(ge=1)] | None
_Number = FiniteFloat | None


class _Workload(BaseModel):
    task: _Text = None
    data: _Text = None
    form: _Text = None
    packing: bool | None = None
    sequence_length: _Count = None
    effective_batch_size: _Count = None
    document_tokens: _Count = None
    data_tokens: _Count = None


class _Hardware(BaseModel):
    memory_gib: _Number = None
    budget_gib: _Number = None
    margin: _Number = None
    device: _Text = None
    name: _Text = None
    allocator: _Text = None
    measured_on: _Text = None
    devices: _Count = None
    nodes: _Count = None


class Interval(BaseModel):
    low: FiniteFloat
    high: FiniteFloat


class Step(BaseModel):
    median: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Peak(BaseModel):
    allocated: FiniteFloat
    reserved: _Number = None
    device: _Number = None


class _Speeds(BaseModel):
    tokens_per_second: _Number = None
    samples_per_second: _Number = None


class _Measured(_Speeds):
    step_seconds: Step | None = None
    peak_gib: Peak | None = None
    predicted_communication_seconds: _Number = None


class _Predicted(_Speeds):
    step_seconds: _Number = None
    device_bytes: Interval | None = None


class _Parts(BaseModel):
    model: str
    workload: _Workload
    hardware: _Hardware
    versions: dict[str, str]
    measured: _Measured
    predicted: _Predicted
