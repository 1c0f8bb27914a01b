"""Record: a Result with all that a report needs, as the data of `result.json`, from which it is read again.

It holds what `autofit search --json` prints and more: what the search was of, what was asked for, what was predicted of
what was measured, and how the memory of the best configs runs through a step. No model is needed to read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.estimate import Estimate, Timeline
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import Alternative, OtherBudget, Point
from autofit.core.result import SCHEMA, TIERS, Result

_AGAIN = "Write it again with autofit search."


@dataclass(frozen=True)
class Predicted:
    """What was predicted of a config that was measured: bytes of tensors and seconds of a step; None: nothing."""

    allocated_bytes: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class Record:
    """Everything that is kept of a search.

    Attributes:
        options: what was asked for and bears on the result: seed, tolerance, trials, time_limit, space, set.
        predicted: of each trial, in their order; empty where nothing was predicted.
        timelines: by tier, of its best config.
        finished: when the search ended, in ISO 8601.
        intact: whether it is as it was written; False of a file that somebody has changed, or that says nothing of it.
    """

    result: Result
    options: Mapping[str, Any] = field(default_factory=dict)
    predicted: tuple[Predicted, ...] = ()
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    finished: str = ""
    intact: bool = field(default=True, compare=False)

    @property
    def tolerance(self) -> float:
        """Within which configs count as tied."""
        return float(self.options.get("tolerance", 0.03))

    def to_text(self) -> str:
        """The text of result.json."""
        result = self.result
        predicted = self.predicted or (Predicted(),) * len(result.trials)
        data = {
            **result.to_json(),
            "trials": [
                {**trial.to_trial(), "predicted": dataclasses.asdict(each)}
                for trial, each in zip(result.trials, predicted, strict=True)
            ],
            "alternatives": [{**each.to_dict(), "config": dict(each.config)} for each in result.alternatives],
            "model": result.model,
            "workload": dict(result.workload),
            "source": dict(result.source),
            "hardware": result.hardware.to_dict(),
            "budget": dataclasses.asdict(result.budget),
            "options": dict(self.options),
            "finals": {
                "best": result.best and result.best.to_trial(),
                "runner_up": result.runner_up and result.runner_up.to_trial(),
                **{name: each and each.to_trial() for name, each in result.tiers.items()},
            },
            "finalists": [each.to_trial() for each in result.finalists],
            "bound": result.bound,
            "is_predicted": result.predicted,
            "notes": list(result.notes),
            "timelines": {name: each.to_dict() for name, each in self.timelines.items()},
            "run_directory": result.run_directory,
            "finished": self.finished,
        }
        return json.dumps({**data, "digest": _digest(data)}, default=str)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a result.json.

        Raises:
            InputError: not there, or not written by a search of this schema.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            message = f"there is no {path.name} in {path.parent}: {error.strerror}."
            raise InputError(message, "Give the directory of a search that has ended.") from error
        except ValueError as error:
            raise InputError(f"{path} is not JSON: {error}.", _AGAIN) from error
        if not isinstance(data, dict) or "finals" not in data:
            raise InputError(f"{path} is not a result of autofit.", "Give the directory of a search that has ended.")
        if data.get("schema") != SCHEMA:
            raise InputError(f"{path} has schema {data.get('schema')}; this autofit reads schema {SCHEMA}.")
        try:
            written = data.pop("digest", None)
            intact = written == _digest(data)
            return dataclasses.replace(cls._from_data(data), intact=intact)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__}: {error}.", _AGAIN) from error

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> Record:
        predicted = [Predicted(**trial.pop("predicted")) for trial in data["trials"]]
        return cls(
            result=_result(data),
            options=data["options"],
            predicted=tuple(predicted) if any(each != Predicted() for each in predicted) else (),
            timelines={name: Timeline.from_dict(each) for name, each in data["timelines"].items()},
            finished=data["finished"],
        )


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()


def _result(data: dict[str, Any]) -> Result:
    finals = {name: each and Measurement.from_trial(each) for name, each in data["finals"].items()}
    budget, predicted = Budget(**data["budget"]), data.get("predicted") or {}
    return Result(
        model=data["model"],
        workload=data["workload"],
        source=data["source"],
        hardware=Hardware.from_dict(data["hardware"]),
        budget=budget,
        versions=data["versions"],
        best=finals["best"],
        tiers={name: finals.get(name) for name in TIERS},
        trials=_measurements(data["trials"]),
        skipped=data["skipped"],
        stopped_by=data["stopped_by"],
        space_size=data["space_size"],
        search_seconds=data["search_seconds"],
        nearest_miss=data["nearest_miss"] and Measurement.from_trial(data["nearest_miss"]),
        runner_up=finals["runner_up"],
        finalists=_measurements(data.get("finalists", [])),
        run_directory=data["run_directory"],
        files=data["files"],
        notes=tuple(data["notes"]),
        bound=data["bound"],
        frontier={name: tuple(map(_point, points)) for name, points in data["frontier"].items()},
        alternatives=tuple(map(_alternative, data["alternatives"])),
        other_budgets=tuple(_other_budget(each) for each in data["other_budgets"]),
        predicted=data["is_predicted"],
        predicted_best=_estimate(predicted, budget),
        predicted_tiers={name: _estimate(each, budget) for name, each in predicted.get("tiers", {}).items()},
    )


def _estimate(data: Mapping[str, Any] | None, budget: Budget) -> Estimate | None:
    return Estimate.from_dict(data["estimate"], budget) if data else None


def _measurements(trials: Sequence[dict[str, Any]]) -> tuple[Measurement, ...]:
    return tuple(map(Measurement.from_trial, trials))


def _point(data: dict[str, Any]) -> Point:
    return Point(**{**data, "config": Config(data["config"])})


def _alternative(data: dict[str, Any]) -> Alternative:
    known = {name: each for name, each in data.items() if name != "value"}
    return Alternative(**{**known, "config": Config(data["config"]), "outcome": Outcome(data["outcome"])})


def _other_budget(data: dict[str, Any]) -> OtherBudget:
    return OtherBudget(data["why"], data["device_bytes"], data["card"])
