"""SearchOptions: everything a user may say about a search besides the workload, checked on entry."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autofit.core.budget import gib_to_bytes
from autofit.core.config import Value
from autofit.core.errors import InputError, is_whole, require, shown, unknown
from autofit.core.files import expanded
from autofit.core.strict_yaml import parse
from autofit.core.workload import check_seed

DEVICES = ("cpu", "cuda")
EXECUTORS = ("local", "ray")
_MOST = 2**31  # of probes, and of seconds for one
MOST_DEVICES = 1024  # of one machine, and machines
ALL = "all"  # every card like the first
_SIZES = {"gpu_mem": "the GPU memory", "mem": "the memory", "host_mem": "the host memory"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}


class SearchOptions(BaseModel):
    """Where to search and for how long. Sizes in GiB, times in seconds (or text such as "10m")."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True)

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
    fast: bool = False  # few probes, and one longer run of the winner alone
    seed: int = 0
    executor: str = "local"  # where probes run
    workers: int | None = None
    devices: int | str = 1  # that a config trains on, of each node; "all" cards like the first
    nodes: int = 1
    link: str | None = None  # between devices, by its name in the catalogue
    out: Path | None = None
    resume: bool = False
    store: bool = True  # start from the measurements of earlier searches, and store this one's
    memory_snapshot: bool = False  # record PyTorch's memory history of one step of the best config
    probe_timeout: float = 600.0

    @field_validator("gpu_mem", "mem", "host_mem", "time_limit", "set", "space", "out", "devices", mode="before")
    @classmethod
    def _read(cls, value: Any, info: Any) -> Any:
        name: str = info.field_name
        if name in _SIZES and value is not None:
            gib_to_bytes(value, _SIZES[name])
            return float(value)
        if name in ("space", "out") and value is not None:
            path = expanded(value, name)
            return path if name == "out" else str(value)
        if name == "set" and isinstance(value, Mapping):
            require(all(isinstance(knob, str) for knob in value), "set must map names of knobs to values", value)
            return {knob: tuple(v) if isinstance(v, list | tuple) else (v,) for knob, v in value.items()}
        if name == "devices" and isinstance(value, str) and value.isdecimal():
            return int(value[:9])
        return seconds_of(value) if name == "time_limit" and isinstance(value, str) else value

    @model_validator(mode="after")
    def _sense(self) -> "SearchOptions":
        gpu_mem, gpu, mem = (value is not None for value in (self.gpu_mem, self.gpu, self.mem))
        cpu, cuda = self.device == "cpu", self.device == "cuda"
        one = "Use --gpu-mem for a GPU, or --device cpu --mem."
        _refuse(self.device not in (None, *DEVICES), f"the device must be cpu or cuda, not {self.device!r}.")
        _refuse(self.executor not in EXECUTORS, f"the executor must be local or ray, not {self.executor!r}.")
        _refuse(gpu_mem and mem, "--gpu-mem and --mem name two budgets.", one)
        _refuse(gpu and gpu_mem, "--gpu and --gpu-mem name two budgets.", one)
        _refuse(cpu and gpu_mem, "--gpu-mem is a GPU's memory, but the device is the CPU.", one)
        _refuse(cpu and gpu, "--gpu names a card, but the device is the CPU.", one)
        _refuse(cuda and mem, "--mem is the CPU's budget, but the device is CUDA.", one)
        _refuse(gpu and mem, "--mem is the CPU's budget, but --gpu names a card.", one)
        for name, value, remedy in ("margin", self.margin, "For example 0.05."), ("tolerance", self.tolerance, ""):
            message = f"the {name} must be a fraction from 0 to below 1, not {value}."
            _refuse(not 0 <= value < 1, message, remedy)
        for name, count in ("trials", self.trials), ("workers", self.workers):
            require(count is None or count >= 1, f"the number of {name} must be at least 1", count)
            require(count is None or count <= _MOST, f"the number of {name} must be at most {_MOST:,}", count)
        check_devices(None if self.devices == ALL else self.devices, self.nodes)
        check_seed(self.seed)
        require(0 < self.probe_timeout <= _MOST, "probe_timeout must be seconds, more than 0", self.probe_timeout)
        limit, unnamed = self.time_limit, self.resume and self.out is None
        is_short = limit is not None and not limit > 0
        _refuse(is_short, f"the time limit must be more than 0 s, not {limit}.", "For example 10m.")
        _refuse(unnamed, "to resume, the run directory must be named.", "Add --out DIR.")
        return self

    @property
    def names_a_card(self) -> bool:
        """Whether the search is for a card that may be predicted for where it is absent. A search that is resumed has
        measured on its device, and only continues there. What is here says nothing of a cluster."""
        here = self.executor == "local" and not self.resume
        return here and (self.gpu_mem is not None or self.gpu is not None)

    @property
    def wanted_device(self) -> str | None:
        """The device asked for, named or implied by the budget; None: whatever is there."""
        is_card = self.gpu_mem is not None or self.gpu is not None
        return self.device or ("cuda" if is_card else "cpu" if self.mem is not None else None)


def check_devices(devices: Any, nodes: Any) -> None:
    """Raise an InputError for what is no number of devices (None: not given) or nodes."""
    for name, number in ("devices", 1 if devices is None else devices), ("nodes", nodes):
        fine = is_whole(number, 1) and number <= MOST_DEVICES
        require(fine, f"{name} must be a whole number from 1 to {MOST_DEVICES}", number)


def _refuse(wrong: bool, message: str, remedy: str = "") -> None:
    if wrong:
        raise InputError(message, remedy)


def search_options(**given: Any) -> SearchOptions:
    """SearchOptions from keywords; raises InputError for unknown ones, and for values that make no sense."""
    for name in given:
        if name not in SearchOptions.model_fields:
            raise unknown("option", name, SearchOptions.model_fields)
    try:
        return SearchOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "an option"
        raise InputError(f"{name} cannot be {shown(first['input'])}: {first['msg'].lower()}.") from error


def parse_settings(settings: list[str]) -> dict[str, tuple[Value, ...]]:
    """The `--set knob=value[,value...]` options as values of YAML; raises InputError also for a knob given twice."""
    values: dict[str, tuple[Value, ...]] = {}
    for setting in settings:
        knob, _, text = map(str.strip, setting.partition("="))
        if not knob or not text:
            raise InputError(f"--set {setting!r} is not knob=value.", "For example --set precision=bf16,fp32.")
        if knob in values:
            raise InputError(f"--set {knob} is given twice.", "Write all its values in one, with commas.")
        values[knob] = tuple(parse(value, f"--set {setting}") for value in text.split(","))
    return values


def single_values(settings: Mapping[str, tuple[Value, ...]]) -> dict[str, Value]:
    """The settings of one config; raises InputError for a knob with several values."""
    for knob, values in settings.items():
        if len(values) != 1:
            message = f"{knob} is set to {len(values)} values, and a config has one."
            raise InputError(message, "Give one; autofit search takes several.")
    return {knob: values[0] for knob, values in settings.items()}


def seconds_of(text: str) -> float:
    """Seconds of a time such as 90, 90s, 10m or 1.5h; raises InputError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match:
        raise InputError(f"a time cannot be {text!r}.", "For example 90s, 10m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]
