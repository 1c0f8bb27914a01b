"""Record: a Result with all that a report needs, as the data of `result.json`, from which it is read again.

It holds what `autofit search --json` prints and more: the model searched for, the options, predictions beside the
measurements, and how memory runs through a step of the best configs. No model is needed to read it.
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
from autofit.core.files import read_text
from autofit.core.measurement import Measurement
from autofit.core.plain import field_types, from_plain, to_plain
from autofit.core.result import SCHEMA, TIERS, Result

RECORD = "result.json"
_AGAIN = "Write it again with autofit search."
_ENDED = "Give the directory of a search that has ended."
# Fields of a Result that result.json does not hold as they are.
_ARRANGED = ("best", "runner_up", "tiers", "predicted", "predicted_best", "predicted_tiers")


@dataclass(frozen=True)
class Predicted:
    """What was predicted of a config that was measured: bytes of tensors and seconds of a step; None: nothing."""

    allocated_bytes: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class Record:
    """A finished search."""

    result: Result
    options: Mapping[str, Any] = field(default_factory=dict)  # seed, tolerance, trials, time_limit, space, set
    predicted: tuple[Predicted, ...] = ()  # one a trial, in their order; empty where nothing was predicted
    timelines: Mapping[str, Timeline] = field(default_factory=dict)  # by tier, of its best config
    finished: str = ""  # when the search ended, in ISO 8601
    intact: bool = field(default=True, compare=False)  # False where the file was edited or has no digest

    @property
    def tolerance(self) -> float:
        """Relative difference of speed within which configs are tied."""
        return float(self.options.get("tolerance", 0.03))

    def to_text(self) -> str:
        """The text of result.json."""
        result = self.result
        pairs = zip(result.trials, self.predicted or (Predicted(),) * len(result.trials), strict=True)
        data = {
            **result.to_json(),
            "trials": [{**trial.to_trial(), "predicted": to_plain(prediction)} for trial, prediction in pairs],
            "alternatives": [{**each.to_dict(), "config": dict(each.config)} for each in result.alternatives],
            **{name: to_plain(getattr(result, name)) for name in ("model", "workload", "source", "hardware", "budget")},
            "options": dict(self.options),
            "finals": to_plain({"best": result.best, "runner_up": result.runner_up, **result.tiers}),
            "finalists": to_plain(result.finalists),
            "bound": result.bound,
            "is_predicted": result.predicted,
            "notes": list(result.notes),
            "timelines": to_plain(self.timelines),
            "run_directory": result.run_directory,
            "finished": self.finished,
        }
        return json.dumps({**data, "digest": _digest(data)}, default=str)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a result.json; raises InputError where no search of this schema wrote it."""
        try:
            data = json.loads(read_text(path))
        except OSError as error:
            raise InputError(f"there is no {path.name} in {path.parent}: {error.strerror}.", _ENDED) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}.", _AGAIN) from error
        if not isinstance(data, dict) or "finals" not in data:
            raise InputError(f"{path} is not a result of autofit.", _ENDED)
        if data.get("schema") != SCHEMA:
            raise InputError(f"{path} has schema {shown(data.get('schema'))}; this autofit reads schema {SCHEMA}.")
        try:
            _check_options(data["options"])
            written = data.pop("digest", None)
            intact = written == _digest(data)
            predicted = from_plain(tuple[Predicted, ...], [trial.pop("predicted") for trial in data["trials"]])
            return cls(
                result=_result(data),
                options=data["options"],
                predicted=predicted if any(each != Predicted() for each in predicted) else (),
                timelines=from_plain(Mapping[str, Timeline], data["timelines"]),
                finished=data["finished"],
                intact=intact,
            )
        except (KeyError, TypeError, ValueError, AttributeError, InputError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__}: {sentence(error)}.", _AGAIN) from error


def _check_options(options: Any) -> None:
    """Raise a ValueError for options that no search has."""
    tolerance = options.get("tolerance", 0.03)
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise ValueError(f"the tolerance is {shown(tolerance)}")


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()


def _result(data: dict[str, Any]) -> Result:
    data = {"finalists": [], "on_devices": [], "remedies": [], "learning": [], **data}  # older records have none
    for each in data["alternatives"]:
        each.pop("value", None)  # of its config
    for each in data["other_budgets"]:
        each.pop("runs", None)  # found again on the Pareto front
    finals = from_plain(Mapping[str, Measurement | None], data["finals"])
    if any(each and not (each.throughput and finals["best"]) for each in finals.values()):
        raise ValueError("a config that fits has no speed, or there is no best one")
    predicted = data.get("predicted") or {}
    values = {name: from_plain(kind, data[name]) for name, kind in field_types(Result).items() if name not in _ARRANGED}
    tiers, budget = predicted.get("tiers", {}), values["budget"]
    return Result(
        **values,
        best=finals["best"],
        runner_up=finals["runner_up"],
        tiers={name: finals[name] for name in TIERS if name in finals},
        predicted=data["is_predicted"],
        predicted_best=_estimate(predicted, budget),
        predicted_tiers={name: _estimate(each, budget) for name, each in tiers.items()},
    )


def _estimate(data: Mapping[str, Any] | None, budget: Budget) -> Estimate | None:
    return Estimate.from_dict(data["estimate"], budget) if data else None
