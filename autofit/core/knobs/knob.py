"""Knob: what everyone may know of a knob without torch.

Its Technique says what it does, and when it cannot be.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from autofit.core.errors import InputError, shown, unknown
from autofit.core.some_blocks import SomeBlocks

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
    short: str = ""  # in a list of knobs; `{value}` and `{name of another}` are replaced by values
    short_off: str = ""  # in a list of knobs, where it is off and another config has it on
    words: Mapping[Value, str] = field(default_factory=dict)  # what each value does
    of_blocks: str = ""  # which ones a value for some blocks is for; `{}` is their number
    has_row: bool = True  # whether a table of a config in words has a row of it

    # How it stands to others.
    part_of: str = ""  # the knob whose words name its value, too
    beside: str = ""  # the knob that must be on for it to mean anything
    derived: bool = False  # it follows from others, and is never set
    follows: bool = False  # where it is not set it follows from others
    fidelity: Mapping[Value, int] = field(default_factory=dict)  # higher learns more faithfully
    fidelity_order: int = (
        0  # its place, from 1, among those that break a tie of equally fast configs
    )
    losses: Mapping[Value, int] = field(default_factory=dict)  # how lossy a value is, if it is

    # Several devices.
    of_devices: bool = False  # null on one device
    divides: bool = False  # it is one of the ways to divide a training among devices
    degree: str = ""  # the degree of the Layout that it says
    same_samples: bool = False  # the devices among which it divides see the same samples

    # What a prediction traces.
    trace: Trace = Trace.OWN
    of_head: bool = False  # it changes the output head alone, whose trace costs little
    traced_as: Value = None  # traced in place of every value of an UNTRACED knob; None: `off`
    # Values that take the same memory and work as others; and the same but for the bytes of weights.
    same_trace: Mapping[Value, Value] = field(default_factory=dict)
    same_work: Mapping[Value, Value] = field(default_factory=dict)

    # What a search takes for the same until it compares the best: values that stand for others, and
    # whether all sizes but `off` are one.
    relatives: Mapping[Value, Value] = field(default_factory=dict)
    sizes_alike: bool = False

    # What a first look at a space tries: all `usual` values, or the first `preferred` one, or `off`.
    usual: tuple[Value, ...] = ()
    preferred: tuple[Value, ...] = ()
    quick: bool = False  # a quick search looks at all of its values
    saves_memory: bool = False  # at the cost of time, and nothing else

    # Ranks that never fall as memory grows, all other knobs equal; of values for which that is shown.
    memory_order: Mapping[Value, int] = field(default_factory=dict)
    lays_out_state: bool = (
        False  # a checkpoint's optimizer state has another form with another value
    )

    @property
    def description(self) -> str:
        """What it takes, in one line."""
        return self.takes or ", ".join(map(yaml_word, self.values))

    def relative(self, value: Value) -> Value:
        """The value that stands for this one and its relatives."""
        if self.sizes_alike and value not in (None, self.off):
            return True
        some = SomeBlocks.of(value)
        if some is not None:  # whatever the number
            return f"{some.value}+{some.rest}"
        return self.relatives.get(value, value)

    def accepts(self, value: object) -> bool:
        """Whether it takes a value, of that very type: 1 is not True."""
        if value is None and self.nullable:
            return True
        for listed in (self.off, *self.values):
            if value == listed and type(value) is type(listed):
                return True

        if self.pattern and isinstance(value, str):
            return re.fullmatch(self.pattern, value) is not None
        if self.numbers is None or not isinstance(value, int | float) or isinstance(value, bool):
            return False
        least, end = self.numbers
        is_whole_enough = isinstance(value, int) or isinstance(least, float)
        return is_whole_enough and least <= value < end

    def check(self, value: object) -> None:
        """Raise an InputError for a value that it does not take."""
        if not self.accepts(value):
            raise self.refusal(value)

    def refusal(self, value: object) -> InputError:
        """The error for a value that it does not take."""
        if isinstance(value, str) and not self.takes:
            return unknown(f"value for {self.name}", value, map(yaml_word, self.values))
        remedy = f"Choose from: {self.description}." if self.values else ""
        if self.takes:
            remedy = f"It takes {self.takes}."
        given = "null" if value is None else shown(value)
        return InputError(f"{self.name} cannot be {given}.", remedy)


def is_off(value: object) -> bool:
    """Whether a value is one of those that stand for "off", whatever the knob."""
    return value in (None, False, 0, "none", "standard")


def yaml_word(value: object) -> str:
    """A knob's value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
