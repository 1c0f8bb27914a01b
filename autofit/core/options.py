"""SearchOptions: everything a user may say about a search beside the workload, checked where it comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autofit.core.budget import gib_to_bytes
from autofit.core.config import Value
from autofit.core.errors import InputError, unknown
from autofit.core.strict_yaml import parse

_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}


class SearchOptions(BaseModel):
    """Where to search and for how long. Sizes in GiB, times in seconds (or text such as "10m")."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    gpu_mem: float | None = None
    gpu: str | None = None
    device: str | None = None
    mem: float | None = None
    host_mem: float | None = None
    margin: float = 0.05
    space: str | None = None
    set: Mapping[str, tuple[Value, ...]] = Field(default_factory=dict)
    trials: int = 40
    time_limit: float | None = None
    tolerance: float = 0.03
    seed: int = 0
    workers: int | None = None
    out: Path | None = None
    resume: bool = False
    store: bool = True  # start from what earlier searches measured, and keep what this one does
    memory_snapshot: bool = False  # keep a record of one step of the best config
    probe_timeout: float = 600.0

    @field_validator("gpu_mem", "mem", "host_mem", mode="before")
    @classmethod
    def _gib(cls, value: Any, info: Any) -> Any:
        if value is not None:
            gib_to_bytes(
                value,
                {"gpu_mem": "the GPU memory", "mem": "the memory", "host_mem": "the host memory"}[info.field_name],
            )
        return value

    @field_validator("time_limit", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        return seconds_of(value) if isinstance(value, str) else value

    @field_validator("set", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            knob: tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
            for knob, given in value.items()
        }

    @model_validator(mode="after")
    def _sense(self) -> SearchOptions:
        if self.device not in (None, "cpu", "cuda"):
            raise InputError(f"the device must be cpu or cuda, not {self.device!r}.")
        for wrong, remedy in self._contradictions():
            raise InputError(wrong, remedy)
        if not 0 <= self.margin < 1:
            raise InputError(
                f"the margin must be a fraction from 0 to below 1, not {self.margin}.", "For example 0.05."
            )
        if not 0 <= self.tolerance < 1:
            raise InputError(f"the tolerance must be a fraction from 0 to below 1, not {self.tolerance}.")
        if self.trials < 1:
            raise InputError(f"the number of trials must be at least 1, not {self.trials}.")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"the number of workers must be at least 1, not {self.workers}.")
        if self.time_limit is not None and not self.time_limit > 0:
            raise InputError(f"the time limit must be more than 0 s, not {self.time_limit}.", "For example 10m.")
        if self.resume and self.out is None:
            raise InputError("to resume, the run directory must be named.", "Add --out DIR.")
        return self

    def _contradictions(self) -> list[tuple[str, str]]:
        given = {
            "--gpu-mem and --mem name two budgets.": self.gpu_mem is not None and self.mem is not None,
            "--gpu and --gpu-mem name two budgets.": self.gpu is not None and self.gpu_mem is not None,
            "--gpu-mem is a GPU's memory, but the device is the CPU.": self.device == "cpu"
            and self.gpu_mem is not None,
            "--gpu names a card, but the device is the CPU.": self.device == "cpu" and self.gpu is not None,
            "--mem is the CPU's budget, but the device is CUDA.": self.device == "cuda" and self.mem is not None,
            "--mem is the CPU's budget, but --gpu names a card.": self.gpu is not None and self.mem is not None,
        }
        return [(text, "Use --gpu-mem for a GPU, or --device cpu --mem.") for text, wrong in given.items() if wrong]

    @property
    def names_a_card(self) -> bool:
        """Whether the search is for a card, said by its name or its memory, that may be predicted for where it is not
        here. A search that is resumed has measured: it goes on with that, or not at all."""
        return (self.gpu_mem is not None or self.gpu is not None) and not self.resume

    @property
    def wanted_device(self) -> str | None:
        """The device asked for, said or implied by the budget; None: whatever is there."""
        if self.device:
            return self.device
        if self.gpu_mem is not None or self.gpu is not None:
            return "cuda"
        return "cpu" if self.mem is not None else None


def search_options(**given: Any) -> SearchOptions:
    """SearchOptions from keywords.

    Raises:
        InputError: an unknown keyword (names the nearest), or a value that makes no sense.
    """
    for name in given:
        if name not in SearchOptions.model_fields:
            raise unknown("option", name, SearchOptions.model_fields)
    try:
        return SearchOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "an option"
        raise InputError(f"{name} cannot be {first['input']!r}: {first['msg'].lower()}.") from error


def parse_settings(settings: list[str]) -> dict[str, tuple[Value, ...]]:
    """The `--set knob=value[,value...]` options as values of YAML.

    Raises:
        InputError: not of that form, or a knob given twice.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for setting in settings:
        knob, equals, values = setting.partition("=")
        if not equals or not knob.strip() or not values.strip():
            raise InputError(f"--set {setting!r} is not knob=value.", "For example --set precision=bf16,fp32.")
        if knob.strip() in found:
            raise InputError(f"--set {knob.strip()} is given twice.", "Write all its values in one, with commas.")
        found[knob.strip()] = tuple(parse(value, f"--set {setting}") for value in values.split(","))
    return found


def seconds_of(text: str) -> float:
    """Seconds of a time such as 90, 90s, 10m or 1.5h.

    Raises:
        InputError: not a time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match:
        raise InputError(f"a time cannot be {text!r}.", "For example 90s, 10m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]
