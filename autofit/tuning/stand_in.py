"""Adds predicted communication to measurements of the first of several ranks, which stands for
all."""

import dataclasses
import functools

from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.estimate.estimator import COMMUNICATOR_BYTES
from autofit.estimate.ranks import Exchanges, exchanges_of
from autofit.probe import Executor

_SECONDS = 120.0  # for following a step of one config
_UNKNOWN = (
    "what ranks exchange cannot be predicted of this model, so that its speed is that of the "
    "computation alone"
)


def with_communicators(hardware: Hardware, config: Config) -> Hardware:
    """The hardware on which the first rank is measured.

    The other ranks are not there, so what NCCL keeps for each group counts as part of the context.
    """
    if hardware.device != "cuda":
        return hardware

    held = COMMUNICATOR_BYTES * Layout.of(config).groups
    return dataclasses.replace(hardware, context_bytes=hardware.context_bytes + held)


class Communication:
    """Adds what the first rank waits for to what it computes, by a step of it that is followed on
    fake tensors."""

    def __init__(self, workload: Workload, hardware: Hardware, executor: Executor) -> None:
        self._exchanges = functools.cache(
            functools.partial(_followed, executor, workload, hardware)
        )

    def added_to(self, measurement: Measurement) -> Measurement:
        """The measurement at the speed of all ranks together; unchanged where no step was timed."""
        if not (measurement.is_of_one_rank and measurement.step_seconds):
            return measurement

        exchanges = self._exchanges(measurement.config)
        if exchanges is None:
            return dataclasses.replace(measurement, warnings=(*measurement.warnings, _UNKNOWN))
        return measurement.waiting(exchanges.waiting(measurement.step_seconds.median))


def _followed(
    executor: Executor, workload: Workload, hardware: Hardware, config: Config
) -> Exchanges | None:
    try:
        found: Exchanges = executor.run(
            exchanges_of,
            workload,
            hardware,
            config,
            log="exchanges.log",
            timeout=_SECONDS,
            task="following a step",
        )
    except AutofitError:
        return None

    return found
