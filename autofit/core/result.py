"""Result: all measurements of a search, the verified best and the best of every tier. Data only.

The only place that knows how a result looks as YAML (`result.yaml`) and as JSON (`autofit search --json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from autofit.core import trials
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.estimate import Estimate
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement
from autofit.core.notebook import as_html
from autofit.core.pareto import Alternative, OtherBudget, Point, fastest_within
from autofit.core.strict_yaml import dump, load_mapping

SCHEMA = 1
TIERS = ("full", "lora", "qlora")


def tier(config: Mapping[str, Any]) -> str:
    """Which of the three kinds of learning a Config does; speeds are only equal work within one."""
    if not config.get("lora_rank"):
        return "full"
    return "lora" if config.get("quantization") in (None, "none") else "qlora"


@dataclass(frozen=True)
class Result:
    """What a search hands back.

    `workload` is Workload.summary(); `source` says how models/ can make the workload again (empty for one that lives
    in the user's process). `skipped` counts configs never probed: predicted, dominated, refused. `bound` is how much
    faster than the best measured one any other config is expected to be at the most, at 95 %, as a share of it.
    `finalists` are all that were verified, the best among them. `frontier` is by tier the most throughput for each
    amount of memory, also beyond the budget; `alternatives` are the best config with one knob changed; `predicted` says
    whether configs never measured had a part in both. Where nothing can be measured for the card that is meant, `best`
    is None and `predicted_best` the config predicted to be the fastest that fits, `predicted_tiers` that of every tier.
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

    @property
    def config(self) -> Config | None:
        """The config of the answer: the best that was measured, else the one predicted; None where nothing fits."""
        found = self.best or self.predicted_best
        return found.config if found else None

    def fastest_within(self, device_bytes: int) -> dict[str, Point | None]:
        """By tier what a budget of so many bytes would run, by all that was measured and predicted."""
        usable = replace(self.budget, device_bytes=device_bytes).cap_bytes(self.hardware.device)
        return {name: fastest_within(self.frontier.get(name, ()), usable) for name in TIERS}

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def to_json(self) -> dict[str, Any]:
        """The one object that `autofit search --json` prints."""
        return {
            "schema": SCHEMA,
            "best": _config_and_measured(self.best),
            "predicted": self._predicted(),
            "tiers": {name: _config_and_measured(self.tiers.get(name)) for name in TIERS},
            "trials": [trial.to_trial() for trial in self.trials],
            "skipped": {name: self.skipped.get(name, 0) for name in ("predicted", "dominated", "refused")},
            "stopped_by": self.stopped_by,
            "nearest_miss": self.nearest_miss.to_trial() if self.nearest_miss else None,
            "frontier": {name: [point.to_dict() for point in self.frontier.get(name, ())] for name in TIERS},
            "alternatives": [each.to_dict() for each in self.alternatives],
            "other_budgets": [self._other_budget(each) for each in self.other_budgets],
            "space_size": self.space_size,
            "search_seconds": round(self.search_seconds, 3),
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "files": {**dict.fromkeys(("result", "script", "exports", "report")), **self.files},
        }

    def _predicted(self) -> dict[str, Any] | None:
        if self.predicted_best is None:
            return None
        told = {name: self.predicted_tiers.get(name) for name in TIERS}
        tiers = {name: each and _config_and_estimate(each) for name, each in told.items()}
        return {**_config_and_estimate(self.predicted_best), "tiers": tiers}

    def _other_budget(self, other: OtherBudget) -> dict[str, Any]:
        runs = self.fastest_within(other.device_bytes)
        return {**asdict(other), "runs": {name: point and point.to_dict() for name, point in runs.items()}}

    def trials_csv(self) -> str:
        """All trials as CSV, one column a knob or a figure."""
        return trials.to_csv(self.trials)

    def trials_dataframe(self) -> Any:
        """All trials as a pandas.DataFrame.

        Raises:
            InputError: pandas is not installed.
        """
        return trials.to_dataframe(self.trials)

    def to_yaml(self) -> str:
        """The text of result.yaml.

        Raises:
            InputError: there is no best config to write down.
        """
        if self.config is None:
            raise InputError("a result without a best config has nothing to write down.")
        hardware = {
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
        return dump(
            {
                "autofit": SCHEMA,
                "model": self.model,
                "workload": dict(self.workload),
                "source": dict(self.source),
                "hardware": hardware,
                "versions": dict(self.versions),
                "config": dict(self.config),
                **self._figures(),
            }
        )

    def _figures(self) -> dict[str, Any]:
        """What was measured, or is predicted, of the config and of the best of each tier."""
        if self.best is not None:
            tiers = {name: _config_and_measured(self.tiers.get(name)) for name in TIERS}
            return {"measured": self.best.to_measured(), "tiers": tiers}
        assert self.predicted_best, "there is a config"
        told = {name: self.predicted_tiers.get(name) for name in TIERS}
        return {
            "measured": None,
            "predicted": self.predicted_best.to_predicted(),
            "tiers": {
                name: each and {"config": dict(each.config), "predicted": each.to_predicted()}
                for name, each in told.items()
            },
        }


def _config_and_measured(measurement: Measurement | None) -> dict[str, Any] | None:
    if measurement is None:
        return None
    return {"config": dict(measurement.config), "measured": measurement.to_measured()}


def _config_and_estimate(estimate: Estimate) -> dict[str, Any]:
    return {"config": dict(estimate.config), "estimate": estimate.to_dict()}


@dataclass(frozen=True)
class SavedResult:
    """What result.yaml tells a later command: how to make the workload again, and the config to run.

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
    def load(cls, path: Path) -> SavedResult:
        """Read a result.yaml.

        Raises:
            InputError: not there, not YAML, or not written by `autofit search`.
        """
        data = load_mapping(path)
        missing = [key for key in ("autofit", "model", "workload", "config") if key not in data]
        if missing:
            raise InputError(
                f"{path} is not a result of autofit: it lacks {', '.join(missing)}.", "Give a result.yaml."
            )
        if data["autofit"] != SCHEMA:
            raise InputError(f"{path} has schema {data['autofit']}; this autofit reads schema {SCHEMA}.")
        known = ("source", "hardware", "measured", "predicted", "versions")
        optional = [key for key in known if data.get(key) is not None]
        for key in ("workload", "config", *optional):
            if not isinstance(data[key], dict):
                raise InputError(f"{path}: {key} must be a mapping.", "Write it again with autofit search.")
        _check(_Measured, "measured", data, path)
        _check(_Predicted, "predicted", data, path)
        return cls(
            model=str(data["model"]),
            workload=data["workload"],
            source=data.get("source") or {},
            hardware=data.get("hardware") or {},
            config=Config(data["config"]),
            measured=data.get("measured") or {},
            versions=data.get("versions") or {},
            predicted=data.get("predicted") or {},
        )


class _Step(BaseModel):
    median: float
    low: float
    high: float


class _Peak(BaseModel):
    allocated: float
    reserved: float | None = None
    device: float | None = None


class _Measured(BaseModel):
    """The figures of `measured` that other tools' files and scripts tell."""

    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: _Step | None = None
    peak_gib: _Peak | None = None


class _Interval(BaseModel):
    low: int
    high: int


class _Predicted(BaseModel):
    """The figures of `predicted` that other tools' files and scripts tell."""

    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    device_bytes: _Interval | None = None


def _check(form: type[BaseModel], key: str, data: Mapping[str, Any], path: Path) -> None:
    try:
        form.model_validate(data.get(key) or {}, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (key, *first["loc"])))
        given = f"{where} is {first['input']!r}"
        raise InputError(f"{path}: {given}. {first['msg']}.", "Write it again with autofit search.") from error
