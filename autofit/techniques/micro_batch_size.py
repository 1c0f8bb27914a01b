"""micro_batch_size: how many samples go through the model at once; the rest of the effective batch accumulates."""

from __future__ import annotations

from torch import nn

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique


class MicroBatchSize(Technique):
    """A divisor of the effective batch; null stands for the whole of it."""

    name = "micro_batch_size"
    stage = Stage.STEP
    off = None
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return tuple(2**power for power in range(11))

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        whole = workload.effective_batch_size // hardware.ranks
        return tuple(size for size in range(1, whole + 1) if whole % size == 0)

    def accepts(self, value: Value, hardware: Hardware) -> bool:
        return value is None or (type(value) is int and value > 0)

    def settle(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return config[self.name] or workload.effective_batch_size // hardware.ranks

    def exact(self, value: Value, workload: Workload) -> bool:
        return workload.traits is None or not (workload.traits.batch_norm or workload.traits.dropout)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        whole = workload.effective_batch_size // hardware.ranks
        if workload.traits and not workload.traits.splits and config[self.name] != whole:
            return f"this loss cannot be split into slices, so the micro-batch must be the whole {whole}."
        return None

    def memory_order(self, value: Value) -> int | None:
        return value if isinstance(value, int) else None

    def apply(self, setup: Setup, value: Value) -> None:
        assert isinstance(value, int), "settle() leaves no null"
        setup.micro_batch_size = value
        has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in setup.model.modules())
        if has_batch_norm and value < setup.workload.effective_batch_size:
            setup.warnings.append(
                f"BatchNorm takes its statistics over micro-batches of {value}, not over the whole batch of "
                f"{setup.workload.effective_batch_size}."
            )
