"""Record: a Result with all that a report needs, as `result.json` stores it.

It holds what `autofit search --json` prints and more: the model searched for, the options,
predictions beside the measurements, and how memory runs through a step of the best configs. No
model is needed to read it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget
from autofit.core.errors import InputError, sentence, shown
from autofit.core.estimate import Estimate, Timeline
from autofit.core.files import expanded, read_text
from autofit.core.measurement import Measurement
from autofit.core.plain import UNREADABLE, field_types, from_plain, to_plain
from autofit.core.result import SCHEMA, TIERS, Result

RECORD = "result.json"
_AGAIN = "Write it again with autofit search."
_ENDED = "Give the directory of a search that has ended."
_LATER = ("finalists", "on_devices", "remedies", "learning")  # which older files lack
# Fields of a Result that result.json does not hold as they are.
_ARRANGED = ("best", "runner_up", "tiers", "predicted", "predicted_best", "predicted_tiers")


@dataclass(frozen=True)
class Predicted:
    """A prediction for a measured config: bytes of tensors, seconds of a step; None: unknown."""

    allocated_bytes: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class Record:
    """A finished search."""

    result: Result
    # seed, tolerance, trials, time_limit, space, set
    options: Mapping[str, Any] = field(default_factory=dict)
    predicted: tuple[Predicted, ...] = ()  # one a trial, in their order; may be empty
    timelines: Mapping[str, Timeline] = field(default_factory=dict)  # by tier, of its best config
    finished: str = ""  # when the search ended, in ISO 8601
    # False where the file was edited or has no digest
    intact: bool = field(default=True, compare=False)

    @property
    def tolerance(self) -> float:
        """Relative difference of speed within which configs are tied."""
        return float(self.options.get("tolerance", 0.03))

    def to_text(self) -> str:
        """The text of result.json."""
        result = self.result
        trials = [trial.to_trial() for trial in result.trials]
        predicted = self.predicted or (Predicted(),) * len(trials)
        for trial, prediction in zip(trials, predicted, strict=True):
            trial["predicted"] = to_plain(prediction)

        alternatives = [alternative.to_dict() for alternative in result.alternatives]
        for alternative, written in zip(result.alternatives, alternatives, strict=True):
            written["config"] = dict(alternative.config)

        finals = {"best": result.best, "runner_up": result.runner_up, **result.tiers}
        data = {
            **result.to_json(),
            "trials": trials,
            "alternatives": alternatives,
            "model": result.model,
            "workload": to_plain(result.workload),
            "source": to_plain(result.source),
            "hardware": to_plain(result.hardware),
            "budget": to_plain(result.budget),
            "options": dict(self.options),
            "finals": to_plain(finals),
            "finalists": to_plain(result.finalists),
            "bound": result.bound,
            "is_predicted": result.predicted,
            "trained": dict(result.trained),
            "timelines": to_plain(self.timelines),
            "run_directory": result.run_directory,
            "finished": self.finished,
        }
        data["digest"] = _digest(data)
        return json.dumps(data, default=str)

    @classmethod
    def of_run(cls, run: str | Path) -> "Record":
        """The record in the directory of a search; raises InputError where none has ended there."""
        directory = expanded(run)
        if not directory.is_dir():
            what = "is a file, not a run directory" if directory.exists() else "is not there"
            remedy = "Give the directory of a search, such as autofit-runs/NAME."
            raise InputError(f"{run} {what}.", remedy)

        if not (directory / RECORD).exists():
            remedy = "Go on with one by autofit search --resume --out, or give another directory."
            raise InputError(f"{run} holds no {RECORD}: no search has ended there.", remedy)
        return cls.load(directory / RECORD)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a result.json; raises InputError where no search of this schema wrote it."""
        try:
            data = json.loads(read_text(path))
        except OSError as error:
            message = f"there is no {path.name} in {path.parent}: {error.strerror}."
            raise InputError(message, _ENDED) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}.", _AGAIN) from error

        if not isinstance(data, dict) or "finals" not in data:
            raise InputError(f"{path} is not a result of autofit.", _ENDED)
        if data.get("schema") != SCHEMA:
            schema = shown(data.get("schema"))
            raise InputError(f"{path} has schema {schema}; this autofit reads schema {SCHEMA}.")

        try:
            return cls._from_data(data)
        except UNREADABLE as error:
            reason = f"{type(error).__name__}: {sentence(error)}"
            raise InputError(f"{path} is damaged: {reason}.", _AGAIN) from error

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> "Record":
        """The record in the data of a result.json; raises what reading damaged data raises."""
        options = data["options"]
        tolerance = options.get("tolerance", 0.03)
        if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise ValueError(f"the tolerance is {shown(tolerance)}")

        digest = data.pop("digest", None)
        intact = digest == _digest(data)

        plain = [trial.pop("predicted") for trial in data["trials"]]
        predicted: tuple[Predicted, ...] = from_plain(tuple[Predicted, ...], plain)
        if set(predicted) == {Predicted()}:
            predicted = ()

        return cls(
            result=_result(data),
            options=options,
            predicted=predicted,
            timelines=from_plain(Mapping[str, Timeline], data["timelines"]),
            finished=data["finished"],
            intact=intact,
        )


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()


def _result(data: dict[str, Any]) -> Result:
    data = {**dict.fromkeys(_LATER, ()), "trained": {}, **data}
    for alternative in data["alternatives"]:
        alternative.pop("value", None)  # of its config
    for budget in data["other_budgets"]:
        budget.pop("runs", None)  # found again on the Pareto front

    finals = from_plain(Mapping[str, Measurement | None], data["finals"])
    for final in finals.values():
        if final and not (final.throughput and finals["best"]):
            raise ValueError("a config that fits has no speed, or there is no best one")

    kinds = {name: kind for name, kind in field_types(Result).items() if name not in _ARRANGED}
    values = {name: from_plain(kind, data[name]) for name, kind in kinds.items()}

    predicted = data.get("predicted") or {}
    tiers = predicted.get("tiers", {})
    budget = values["budget"]
    return Result(
        **values,
        best=finals["best"],
        runner_up=finals["runner_up"],
        tiers={name: finals[name] for name in TIERS if name in finals},
        predicted=data["is_predicted"],
        predicted_best=_estimate(predicted, budget),
        predicted_tiers={name: _estimate(plain, budget) for name, plain in tiers.items()},
    )


def _estimate(data: Mapping[str, Any] | None, budget: Budget) -> Estimate | None:
    return Estimate.from_dict(data["estimate"], budget) if data else None
