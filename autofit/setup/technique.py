"""The extension point: one Technique is one knob of the search, in one file."""

from enum import IntEnum
from typing import Any, ClassVar

from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.knobs import Knob
from autofit.core.layout import degrees, dp_degree
from autofit.core.some_blocks import SomeBlocks
from autofit.core.workload import Workload
from autofit.setup.state import Setup

# What a knob's record says that a technique has, too.
_FACTS = ("name", "off", "values", "nullable", "numbers", "pattern", "takes")


class Stage(IntEnum):
    """The order in which techniques touch a run; `build` materialises the weights after SHARD."""

    WEIGHTS = 1  # how weights are stored, before any exist
    ADAPT = 2  # adds or freezes some
    SHARD = 3  # how devices share them
    BLOCKS = 4  # how the forward runs
    STEP = 5  # how gradients become updates
    COMPILE = 6  # wraps the result


class Technique:
    """One knob of the search: its values, when it is refused, and what it does to a training run.

    `canonicalize` and `refuse` must depend on their arguments alone: a search evaluates them on a
    few configs and reuses the answer for every config that agrees on the knobs they read.
    """

    # What everyone may know of it. A technique without a record has its facts itself:
    record: ClassVar[Knob] = Knob("")
    name: ClassVar[str]  # file name = YAML key = CLI word
    off: ClassVar[Value]  # the value that changes nothing
    values: ClassVar[tuple[Value, ...]] = ()  # every possible value; empty: what `choices` returns
    nullable: ClassVar[bool] = False  # whether null is a value, too
    # From one number to below another; of ints whole ones.
    numbers: ClassVar[tuple[float, float] | None] = None
    pattern: ClassVar[str] = ""  # it also takes words of this form, whatever the hardware
    takes: ClassVar[str] = ""  # the accepted values in words, where `values` cannot list them

    stage: ClassVar[Stage]
    # Of the values, those that are not searched on a CPU; that store something in the host's
    # memory; for which the run calls torch.compile; and that use CUDA's managed memory.
    cuda_values: ClassVar[tuple[Value, ...]] = ()
    host_values: ClassVar[tuple[Value, ...]] = ()
    compiled_values: ClassVar[tuple[Value, ...]] = ()
    paged_values: ClassVar[tuple[Value, ...]] = ()

    library: ClassVar[str] = "torch"  # the distribution that implements every value but `off`
    all_exact: ClassVar[bool] = False  # whether every value is the same mathematics as `off`
    always: ClassVar[bool] = False  # whether `apply` is called with `off` too

    def __init_subclass__(cls, **options: Any) -> None:
        """The facts of a record are those of the class."""
        super().__init_subclass__(**options)

        if "record" in vars(cls):
            for fact in _FACTS:
                setattr(cls, fact, getattr(cls.record, fact))

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        """The values worth searching on this hardware."""
        if hardware.device == "cuda":
            return self.values
        return tuple(value for value in self.values if value not in self.cuda_values)

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        """`choices`, for the few knobs whose values depend on the workload."""
        return self.choices(hardware)

    def accepts(self, value: Value, hardware: Hardware) -> bool:
        """Whether the value is valid for this knob at all; whether it works here is for
        `refuse`."""
        return self.knob(hardware).accepts(value)

    def knob(self, hardware: Hardware) -> Knob:
        """What it takes, in a form that needs no torch."""
        facts = {fact: getattr(self, fact) for fact in _FACTS}
        facts["values"] = self.values or self.choices(hardware)
        return Knob(**facts)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """This knob's canonical value beside the others: null or `off` where it has no meaning."""
        return config[self.name]

    def package(self, value: Value) -> str:
        """The distribution that implements this value; `doctor` shows its version."""
        return "torch" if value == self.off else self.library

    def compiles(self, value: Value) -> bool:
        """Whether the run calls torch.compile, so that no dispatch mode may watch it."""
        return value in self.compiled_values

    def keeps_on_host(self, value: Value) -> bool:
        """Whether the value stores in host memory part of what a GPU trains."""
        some = SomeBlocks.of(value)
        return (some.value if some else value) in self.host_values

    def pages(self, value: Value) -> bool:
        """Whether the value uses managed memory, which moves between GPU and host outside PyTorch's
        allocator."""
        return value in self.paged_values

    def exact(self, value: Value, workload: Workload) -> bool:
        """Whether the value is the same mathematics as `off`, up to rounding and random draws."""
        return self.all_exact or value == self.off

    def fidelity(self, value: Value) -> int:
        """Breaks ties between equally fast configs: higher learns more faithfully."""
        return self.record.fidelity.get(value, 0)

    def in_one_word(self, config: Config, workload: Workload) -> Value:
        """The value of a knob that counts blocks: `full:32` of 32 blocks is `full`."""
        value = config[self.name]
        some = SomeBlocks.of(value)
        blocks = workload.traits.blocks if workload.traits else 0
        return some.canonical(blocks) if some else value

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        """Why this canonical config cannot run, with the remedy; None when it can."""
        return None

    def memory_order(self, value: Value) -> int | None:
        """A rank that never falls as memory grows, all other knobs equal; None where no order is
        proven."""
        return self.record.memory_order.get(value)

    def apply(self, setup: Setup, value: Value) -> None:
        """Change the run; called with any value but `off`, or with every value when `always` is
        set."""

    def trace(self, setup: Setup, value: Value) -> None:
        """A stand-in for `apply` under fake tensors."""
        self.apply(setup, value)


class Degree(Technique):
    """A knob that says among how many devices something is divided; null on one device."""

    stage = Stage.SHARD
    all_exact = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return degrees(hardware)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """Raises InputError for what does not divide the devices."""
        given = config[self.name] or 1
        possible = self.choices(hardware)

        if hardware.world == 1:
            dp_degree(config, hardware)
            return None

        if given not in possible:
            words = f"{self.name} {given} does not divide the {hardware.devices} devices of a node"
            raise InputError(f"{words}.", f"Try {', '.join(map(str, possible))}.")
        return given
