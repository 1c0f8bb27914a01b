"""SearchOptions: all that a user may say about a search besides the workload, checked on entry."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from autofit.core.budget import gib_to_bytes
from autofit.core.config import Value
from autofit.core.errors import InputError, is_whole, require, shown, unknown
from autofit.core.files import expanded
from autofit.core.strict_yaml import parse
from autofit.core.workload import check_seed

DEVICES = ("cpu", "cuda")
EXECUTORS = ("local", "ray")
FAITHFUL = "faithful"  # by tier, then by lossy values, then by speed
BALANCED = "balanced"  # by speed that is discounted for both
FAST = "fast"  # by speed alone
PREFERENCES = (FAITHFUL, BALANCED, FAST)
_MOST = 2**31  # of probes, and of seconds for one
MOST_DEVICES = 1024  # of one machine, and machines
ALL = "all"  # every card like the first
_SIZES = {"gpu_mem": "the GPU memory", "mem": "the memory", "host_mem": "the host memory"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}


class SearchOptions(BaseModel):
    """Where to search and for how long. Sizes in GiB, times in seconds (or text such as "10m")."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        arbitrary_types_allowed=True,
    )

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
    prefer: str = BALANCED  # what one answer must have over another
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

    @field_validator("gpu_mem", "mem", "host_mem", mode="before")
    @classmethod
    def _read_size(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return None
        gib_to_bytes(value, _SIZES[str(info.field_name)])
        return float(value)

    @field_validator("time_limit", mode="before")
    @classmethod
    def _read_time(cls, value: Any) -> Any:
        if isinstance(value, str):
            return seconds_of(value)
        return value

    @field_validator("set", mode="before")
    @classmethod
    def _read_settings(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        named = all(isinstance(knob, str) for knob in value)
        require(named, "set must map names of knobs to values", value)

        settings = {}
        for knob, values in value.items():
            settings[knob] = tuple(values) if isinstance(values, list | tuple) else (values,)
        return settings

    @field_validator("space", mode="before")
    @classmethod
    def _read_space(cls, value: Any) -> Any:
        if value is None:
            return None
        expanded(value, "space")  # raises InputError for what can be no path
        return str(value)

    @field_validator("out", mode="before")
    @classmethod
    def _read_out(cls, value: Any) -> Any:
        if value is None:
            return None
        return expanded(value, "out")

    @field_validator("devices", mode="before")
    @classmethod
    def _read_devices(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal():
            return int(value[:9])
        return value

    @model_validator(mode="after")
    def _check(self) -> "SearchOptions":
        """Raise an InputError for what contradicts itself or makes no sense."""
        if self.device not in (None, *DEVICES):
            raise InputError(f"the device must be cpu or cuda, not {self.device!r}.")
        if self.executor not in EXECUTORS:
            raise InputError(f"the executor must be local or ray, not {self.executor!r}.")

        gpu_mem = self.gpu_mem is not None
        gpu = self.gpu is not None
        mem = self.mem is not None
        cpu = self.device == "cpu"
        cuda = self.device == "cuda"
        if self.prefer not in PREFERENCES:
            raise unknown("preference", self.prefer, PREFERENCES)

        contradictions = {
            "--gpu-mem and --mem name two budgets.": gpu_mem and mem,
            "--gpu and --gpu-mem name two budgets.": gpu and gpu_mem,
            "--gpu-mem is a GPU's memory, but the device is the CPU.": cpu and gpu_mem,
            "--gpu names a card, but the device is the CPU.": cpu and gpu,
            "--mem is the CPU's budget, but the device is CUDA.": cuda and mem,
            "--mem is the CPU's budget, but --gpu names a card.": gpu and mem,
        }
        for message, is_given in contradictions.items():
            if is_given:
                raise InputError(message, "Use --gpu-mem for a GPU, or --device cpu --mem.")

        rule = "must be a fraction from 0 to below 1, not"
        if not 0 <= self.margin < 1:
            raise InputError(f"the margin {rule} {self.margin}.", "For example 0.05.")
        if not 0 <= self.tolerance < 1:
            raise InputError(f"the tolerance {rule} {self.tolerance}.")

        for name in ("trials", "workers"):
            count = getattr(self, name)
            if count is not None:
                require(count >= 1, f"the number of {name} must be at least 1", count)
                require(count <= _MOST, f"the number of {name} must be at most {_MOST:,}", count)

        if self.devices == ALL:
            check_devices(None, self.nodes)
        else:
            check_devices(self.devices, self.nodes)
        check_seed(self.seed)
        is_timeout = 0 < self.probe_timeout <= _MOST
        require(is_timeout, "probe_timeout must be seconds, more than 0", self.probe_timeout)

        limit = self.time_limit
        if limit is not None and not limit > 0:
            message = f"the time limit must be more than 0 s, not {limit}."
            raise InputError(message, "For example 10m.")
        if self.resume and self.out is None:
            raise InputError("to resume, the run directory must be named.", "Add --out DIR.")
        return self

    @property
    def names_a_card(self) -> bool:
        """Whether the search is for a card that may be predicted for where it is absent.

        A search that is resumed has measured on its device, and only continues there. In a cluster,
        this machine's lack of the card says nothing.
        """
        if self.executor != "local" or self.resume:
            return False
        return self.gpu_mem is not None or self.gpu is not None

    @property
    def wanted_device(self) -> str | None:
        """The device asked for, named or implied by the budget; None: whatever is there."""
        if self.device:
            return self.device
        if self.gpu_mem is not None or self.gpu is not None:
            return "cuda"
        if self.mem is not None:
            return "cpu"
        return None


def check_devices(devices: Any, nodes: Any) -> None:
    """Raise an InputError for what is no number of devices (None: not given) or nodes."""
    if devices is None:
        devices = 1
    for name, number in {"devices": devices, "nodes": nodes}.items():
        fine = is_whole(number, 1) and number <= MOST_DEVICES
        require(fine, f"{name} must be a whole number from 1 to {MOST_DEVICES}", number)


def search_options(**given: Any) -> SearchOptions:
    """SearchOptions from keywords; raises InputError for unknown ones and for impossible values."""
    for name in given:
        if name not in SearchOptions.model_fields:
            raise unknown("option", name, SearchOptions.model_fields)

    try:
        return SearchOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "an option"
        value = shown(first["input"])
        raise InputError(f"{name} cannot be {value}: {first['msg'].lower()}.") from error


# an option of the command line -> what it must look like, and one that does
_FORMS = {
    "--set": ("knob=value", "--set precision=bf16,fp32"),
    "--loss-option": ("name=value", "--loss-option beta=0.2"),
}


def parse_settings(settings: list[str], option: str = "--set") -> dict[str, tuple[Value, ...]]:
    """The `--set knob=value[,value...]` options, or those of another name, as values of YAML.

    Raises InputError for another form, and for a name given twice.
    """
    parsed: dict[str, tuple[Value, ...]] = {}
    for setting in settings:
        knob, _, text = map(str.strip, setting.partition("="))
        if not knob or not text:
            form, example = _FORMS[option]
            raise InputError(f"{option} {setting!r} is not {form}.", f"For example {example}.")
        if knob in parsed:
            message = f"{option} {knob} is given twice."
            raise InputError(message, "Write all its values in one, with commas.")

        parsed[knob] = tuple(parse(value, f"{option} {setting}") for value in text.split(","))
    return parsed


def loss_options_of(given: list[str] | None) -> dict[str, Value] | None:
    """The `--loss-option name=value` options; None where there are none."""
    return single_values(parse_settings(given or [], "--loss-option")) or None


def single_values(settings: Mapping[str, tuple[Value, ...]]) -> dict[str, Value]:
    """The settings of one config; raises InputError for a knob with several values."""
    single = {}
    for knob, values in settings.items():
        if len(values) != 1:
            message = f"{knob} is set to {len(values)} values, and a config has one."
            raise InputError(message, "Give one; autofit search takes several.")
        single[knob] = values[0]
    return single


def seconds_of(text: str) -> float:
    """Seconds of a time such as 90, 90s, 10m or 1.5h; raises InputError for other text."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", text)
    if not match:
        raise InputError(f"a time cannot be {text!r}.", "For example 90s, 10m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]
