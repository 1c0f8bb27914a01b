"""Knob: what everyone may know of a knob without torch. Its Technique says what it does, and when it cannot be."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from autofit.core.errors import InputError, shown, unknown

Value = str | int | float | bool | None


class Trace(Enum):
    """What a trace of a forward and backward has to do with a knob."""

    OWN = auto()  # every value is traced
    SCALED = auto()  # a few sizes are traced, all others follow from them
    UNTRACED = auto()  # it changes no forward or backward: what it changes is added


@dataclass(frozen=True)
class Knob:
    """The facts of a knob, whatever the model and the hardware."""

    name: str
    off: Value = None  # the value that changes nothing

    # What it takes: `off`, and
    values: tuple[Value, ...] = ()
    nullable: bool = False  # whether null is a value, too
    numbers: tuple[float, float] | None = None  # from one to below another; of ints whole ones
    pattern: str = ""  # of further words
    takes: str = ""  # all of that in words, where `values` cannot list it

    # How it reads.
    title: str = ""  # of its row in a table
    short: str = ""  # in a list of knobs; `{value}` and the names of other knobs are replaced by their values
    short_off: str = ""  # in a list of knobs, where it is off and another config has it on
    words: Mapping[Value, str] = field(default_factory=dict)  # what each value does
    has_row: bool = True  # whether a table of a config in words has a row of it

    # How it stands to others.
    part_of: str = ""  # the knob whose words name its value, too
    beside: str = ""  # the knob that must be on for it to mean anything
    derived: bool = False  # it follows from others, and is never set
    follows: bool = False  # where it is not set it follows from others
    fidelity_order: int = 0  # its place, from 1, among the knobs that break a tie between equally fast configs

    # Several devices.
    of_devices: bool = False  # null on one device
    divides: bool = False  # it is one of the ways to divide a training among devices
    degree: str = ""  # the degree of the Layout that it says
    same_samples: bool = False  # the devices among which it divides see the same samples

    # What a prediction traces.
    trace: Trace = Trace.OWN
    traced_as: Value = None  # traced in place of every value of an UNTRACED knob; None: `off`
    same_trace: Mapping[Value, Value] = field(default_factory=dict)  # values of the same memory and work as others
    same_work: Mapping[Value, Value] = field(default_factory=dict)  # the same but for the bytes of weights

    # What a first look at a space tries of it: `usual` values, the first of `preferred` ones that there is, or `off`.
    usual: tuple[Value, ...] = ()
    preferred: tuple[Value, ...] = ()
    quick: bool = False  # a quick search looks at all of its values
    saves_memory: bool = False  # at the cost of time, and nothing else

    lays_out_state: bool = False  # a checkpoint's optimizer state has another form with another value

    @property
    def description(self) -> str:
        """What it takes, in one line."""
        return self.takes or ", ".join(map(yaml_word, self.values))

    def accepts(self, value: object) -> bool:
        """Whether it takes a value, of that very type: 1 is not True."""
        listed = (self.off, *self.values, *((None,) if self.nullable else ()))
        if any(value == each and type(value) is type(each) for each in listed):
            return True
        if self.pattern and isinstance(value, str):
            return re.fullmatch(self.pattern, value) is not None
        if self.numbers is None or not isinstance(value, int | float) or isinstance(value, bool):
            return False
        least, end = self.numbers
        return least <= value < end and (isinstance(value, int) or isinstance(least, float))

    def check(self, value: object) -> None:
        """Raise an InputError for a value that it does not take."""
        if not self.accepts(value):
            raise self.refusal(value)

    def refusal(self, value: object) -> InputError:
        """The error for a value that it does not take."""
        if isinstance(value, str) and not self.takes:
            return unknown(f"value for {self.name}", value, map(yaml_word, self.values))
        remedy = f"It takes {self.takes}." if self.takes else f"Choose from: {self.description}." if self.values else ""
        return InputError(f"{self.name} cannot be {'null' if value is None else shown(value)}.", remedy)


def is_off(value: object) -> bool:
    """Whether a value is one of those that stand for "off", whatever the knob."""
    return value in (None, False, 0, "none", "standard")


def yaml_word(value: object) -> str:
    """A knob's value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
