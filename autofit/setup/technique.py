"""The extension point: one Technique is one knob of the search, in one file."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup.state import Setup


class Stage(IntEnum):
    """The order in which techniques touch a run.

    WEIGHTS decides how weights are held, before any exist; ADAPT adds or freezes some; then `build` brings them into
    being. BLOCKS changes how the forward runs, STEP how gradients become updates, COMPILE wraps the lot.
    """

    WEIGHTS = 1
    ADAPT = 2
    BLOCKS = 3
    STEP = 4
    COMPILE = 5


class Technique:
    """One knob of the search: what it may be, when it cannot be, and what it does to a training run.

    What `canonicalize` and `refuse` say hangs on their arguments alone: a search asks about a few configs, and takes
    the
    answer to hold for all that agree with one of them on the knobs that were read.
    """

    name: ClassVar[str]  # file name = YAML key = CLI word
    stage: ClassVar[Stage]
    off: ClassVar[Value]  # the value that changes nothing
    values: ClassVar[tuple[Value, ...]] = ()  # all it may ever be; empty: what `choices` says
    takes: ClassVar[str] = ""  # in words, where `values` cannot list what `accepts` lets through
    always: ClassVar[bool] = (
        False  # whether `apply` is called with `off` too, by knobs that decide something at any value
    )

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        """The values worth searching on this hardware."""
        return self.values

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """`choices`, for the few knobs whose values depend on what is trained."""
        return self.choices(hardware)

    def accepts(self, value: Value, hardware: Hardware) -> bool:
        """Whether the value means anything at all; whether it *works* here is for `refuse`."""
        known = (self.off, *(self.values or self.choices(hardware)))
        return any(value == each and type(value) is type(each) for each in known)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """This knob's canonical value beside the others: null or `off` where it has no meaning."""
        return config[self.name]

    def package(self, value: Value) -> str:
        """The distribution that the real part of this value is made with, for `doctor` to tell its version."""
        return "torch"

    def compiles(self, value: Value) -> bool:
        """Whether parts of the run go through torch.compile, which nothing may watch by a dispatch mode then."""
        return False

    def keeps_on_host(self, value: Value) -> bool:
        """Whether the value keeps part of what a GPU trains in the host's memory."""
        return False

    def pages(self, value: Value) -> bool:
        """Whether the value takes memory that moves between GPU and host by itself, beside PyTorch's allocator."""
        return False

    def exact(self, value: Value, workload: Workload) -> bool:
        """Whether the value is the same mathematics as `off`, up to rounding and random draws."""
        return value == self.off

    def fidelity(self, value: Value) -> int:
        """For ties between equally fast configs: higher learns more faithfully."""
        return 0

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        """Why this config cannot be, with the remedy; None when it can. Sees the canonical Config."""
        return None

    def memory_order(self, value: Value) -> int | None:
        """A rank that never falls as memory grows, all other knobs equal; None where no order is proven."""
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        """Do it to the run; called with any value but `off`, or with every value when `always` is set."""

    def trace(self, setup: Setup, value: Value) -> None:
        """A stand-in for `apply` under fake tensors."""
        self.apply(setup, value)
