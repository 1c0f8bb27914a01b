"""micro_batch_size: how many samples go through the model at once; gradients accumulate over the
effective batch."""

import math
from typing import Any

from torch import nn

from autofit.core.knobs.micro_batch_size import KNOB
from autofit.core.layout import dp_degree
from autofit.core.measurement import BATCH_NORM
from autofit.setup import Config, Hardware, RefusedError, Setup, Stage, Technique, Value, Workload


class MicroBatchSize(Technique):
    """A divisor of the effective batch; null stands for the whole of it."""

    record = KNOB
    stage = Stage.STEP
    always = True

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return tuple(2**power for power in range(11))

    def choices_for(self, workload: Workload, hardware: Hardware) -> tuple[Value, ...]:
        whole = workload.effective_batch_size
        return tuple(size for size in range(1, whole + 1) if whole % size == 0)

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        return config[self.name] or share_of(config, workload, hardware)

    def exact(self, value: Value, workload: Workload) -> bool:
        traits = workload.traits
        return traits is None or not (traits.batch_norm or traits.dropout)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        whole = share_of(config, workload, hardware)
        if workload.traits and not workload.traits.splits and config[self.name] != whole:
            return (
                f"this loss cannot be split into slices; set micro_batch_size to the whole {whole}."
            )
        return None

    def memory_order(self, value: Value) -> int | None:
        return value if isinstance(value, int) else None

    def apply(self, setup: Setup, value: Value) -> None:
        assert isinstance(value, int), "canonicalize() leaves no null"
        setup.micro_batch_size = value
        norms = [
            module
            for module in setup.model.modules()
            # others use the statistics that they have
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        ]
        for norm in norms:
            setup.on_close(norm.register_forward_pre_hook(_refuse_one_value).remove)

        whole = setup.workload.effective_batch_size
        if norms and value < whole:
            setup.warnings.append(
                f"{BATCH_NORM} takes its statistics over micro-batches of {value}, not over the "
                f"whole batch of {whole}."
            )


def share_of(config: Config, workload: Workload, hardware: Hardware) -> int:
    """The samples of an effective batch that one device sees."""
    return max(1, workload.effective_batch_size // dp_degree(config, hardware))


def _refuse_one_value(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise a RefusedError for an input without statistics, where torch would raise a
    ValueError."""
    shape: tuple[int, ...] = tuple(args[0].shape) if args else ()
    if module.training and len(shape) > 1 and shape[0] * math.prod(shape[2:]) == 1:
        raise RefusedError(
            f"BatchNorm cannot train on one value per channel, given an input of shape {shape}: "
            "use micro-batches of 2 or more, and avoid batches of one sample."
        )
