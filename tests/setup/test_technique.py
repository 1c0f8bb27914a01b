"""The protocol's defaults: a technique that says only its name, stage, off and values is complete."""

from autofit.core.config import Config
from autofit.setup import Setup, Stage, Technique
from tests import tiny


class Minimal(Technique):
    """A knob with nothing but the four facts."""

    name = "minimal"
    stage = Stage.STEP
    off = 0
    values = (0, 1, 2)


class Called(Minimal):
    """Notes what it is applied with."""

    applied: list[object]

    def apply(self, setup: Setup, value: object) -> None:
        self.applied = [*getattr(self, "applied", []), value]


def test_the_stages_are_in_the_order_of_the_house() -> None:
    assert list(Stage) == [
        Stage.WEIGHTS,
        Stage.ADAPT,
        Stage.SHARD,
        Stage.BLOCKS,
        Stage.STEP,
        Stage.COMPILE,
    ]
    assert sorted(Stage) == list(Stage)


def test_the_defaults() -> None:
    technique, workload = Minimal(), tiny.mlp_workload()
    assert technique.choices(tiny.CPU) == technique.choices_for(workload, tiny.CPU) == (0, 1, 2)
    assert [technique.exact(value, workload) for value in (0, 1)] == [True, False]
    assert technique.fidelity(1) == 0
    assert technique.memory_order(1) is None
    assert technique.refuse(Config(minimal=1), workload, tiny.CPU) is None
    assert technique.canonicalize(Config(minimal=1), workload, tiny.CPU) == 1
    assert not technique.always


def test_a_value_is_accepted_by_its_type_too() -> None:
    technique = Minimal()
    assert all(technique.accepts(value, tiny.CPU) for value in (0, 1, 2))
    assert not any(technique.accepts(value, tiny.CPU) for value in (3, True, False, 1.0, "1", None))


def test_off_is_accepted_though_it_is_not_among_the_values() -> None:
    class Nullable(Minimal):
        off = None

    assert Nullable().accepts(None, tiny.CPU)


def test_values_that_depend_on_the_hardware() -> None:
    class Cores(Minimal):
        values = ()

        def choices(self, hardware: object) -> tuple[int, ...]:
            return (1, hardware.cores)

    assert Cores().accepts(tiny.CPU.cores, tiny.CPU)
    assert not Cores().accepts(tiny.CPU.cores + 1, tiny.CPU)


def test_tracing_is_applying_unless_said_otherwise() -> None:
    technique = Called()
    technique.trace(None, 2)
    assert technique.applied == [2]
