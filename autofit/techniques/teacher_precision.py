"""teacher_precision: the weights of models that are asked and never trained, in 8 or 4 bits.

A teacher is often many times larger than what learns from it, and its weights are most of the
memory. Quantised, it says something slightly different: a lossy value.
"""

from autofit.core.knobs.teacher_precision import KNOB
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload, requirements
from autofit.setup.quantised_layers import quantise, quantise_fake


class TeacherPrecision(Technique):
    """`int8`, `nf4`: frozen linear layers of every model that the workload brings beside the trained
    one, by bitsandbytes. `none`: in the format of frozen weights. A copy of the trained model is
    the knob `reference`'s."""

    record = KNOB
    stage = Stage.WEIGHTS
    library = "bitsandbytes"

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        return self.values if _teachers(workload) else (self.off,)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = config[self.name]
        if value == self.off:
            return None

        if not _teachers(workload):
            return "the loss asks no other model; use none."
        if lacking := requirements.missing("bitsandbytes"):
            return f"{value} needs {lacking}, or use none."
        if config.data_parallel == "fsdp":
            return "a quantised teacher was not tried beside FSDP; use none, or ddp."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        for name in _teachers(setup.workload):
            quantise(setup, setup.frozen[name], str(value), self.name)

    def trace(self, setup: Setup, value: Value) -> None:
        for name in _teachers(setup.workload):
            quantise_fake(setup, setup.frozen[name], str(value), self.name)


def _teachers(workload: Workload) -> list[str]:
    """The names of the models that the workload brings."""
    return [name for name, factory in workload.frozen.items() if factory is not None]
