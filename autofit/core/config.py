"""Config: one plain value for every knob.

The techniques say which knobs and values exist (`techniques.canonicalize` makes a Config canonical); here it is only
something to hash, compare, write to YAML and send to another process.
"""

import hashlib
import json
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from autofit.core.errors import InputError, printable, require, shown
from autofit.core.knobs import KNOBS, Knob
from autofit.core.knobs import Value as Value

_PLAIN = (str, int, float, bool)  # a union would be made anew for every value of every Config


class Config(Mapping[str, Value]):
    """A frozen mapping of knob names to scalars; two Configs with the same items are equal and hash alike. Each knob
    that ships with autofit is an attribute, too, which is off where the config lacks it."""

    __slots__ = ("_hash", "_values")

    # For type checkers.
    precision: str
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    activation_checkpointing: str
    activation_offload: str
    lora_rank: int
    lora_targets: str | None
    lora_alpha: float | None
    lora_dropout: float | None
    lora_plus: float | None
    lora_dora: bool
    lora_rslora: bool
    head_only: bool
    reference: str | None
    teacher_precision: str
    quantization: str
    optimizer: str | None
    optimizer_offload: str
    optimizer_in_backward: bool
    parameter_offload: str
    compile: str
    attention: str | None
    loss: str
    kernels: str
    data_parallel: str | None
    data_parallel_replicate: int | None
    data_parallel_shard: int | None
    reshard_after_forward: bool | int | None
    fsdp_offload: str | None
    tensor_parallel: int | None
    context_parallel: int | None
    pipeline_parallel: int | None
    pipeline_schedule: str | None

    def __init__(self, values: Mapping[str, Any] | None = None, **knobs: Any) -> None:
        require(
            values is None or isinstance(values, Mapping), "a config is a mapping of knobs", values
        )
        merged = {**(values or {}), **knobs}
        for name, value in merged.items():
            if not isinstance(name, str):
                raise InputError(f"a knob's name must be text, not {shown(name)}.")
            if value is not None and not isinstance(value, _PLAIN):
                remedy = "Give a word, a number or null."
                raise InputError(
                    f"{printable(name)} must be one plain value, not {shown(value)}.", remedy
                )
        self._values: dict[str, Value] = merged
        self._hash: int | None = None  # made when it is asked for, as few are

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def get(self, name: str, default: Value = None) -> Value:  # type: ignore[override]
        """The value of a knob; the default where there is no such knob."""
        return self._values.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Value]:
        """The dict's own view: Mapping's looks up each value by its name."""
        return self._values.items()

    def values(self) -> ValuesView[Value]:
        """The values, in the order of the knobs."""
        return self._values.values()

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(_typed(self._values).items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Mapping) and _typed(self) == _typed(other)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __reduce__(self) -> tuple[type["Config"], tuple[dict[str, Value]]]:
        return Config, (dict(self._values),)

    def replace(self, **knobs: Value) -> "Config":
        """The same Config with some knobs changed."""
        return Config({**self._values, **knobs})

    def differences(self, other: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
        """The knobs whose values differ: name -> (mine, other's)."""
        names = [*self, *(name for name in other if name not in self)]
        return {
            name: (self.get(name), other.get(name))
            for name in names
            if self.get(name) != other.get(name)
        }

    @property
    def key(self) -> str:
        """A short digest, the same in every process (Python's own hash of text is not)."""
        text = json.dumps(dict(sorted(self.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _attribute(knob: Knob) -> property:
    def value(config: Config) -> Value:
        return config.get(knob.name, knob.off)

    return property(value, doc=f"The value of {knob.name}.")


for _knob in KNOBS.values():
    setattr(Config, _knob.name, _attribute(_knob))


def _typed(values: Mapping[str, Any]) -> dict[str, tuple[type, Any]]:
    """The values with their types: Python's 1, 1.0 and True are equal, values of a knob are not."""
    return {name: (type(value), value) for name, value in values.items()}
