"""Executors: a measurement request goes in, a Measurement comes out. One executor a file, one
conformance test for all.

Which processes, devices and machines serve a request is the executor's own business.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import ProbeError
from autofit.core.hardware import Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement
from autofit.core.workload import Traits, Workload
from autofit.probe.measure import detect_hardware, detect_idle_card, inspect, list_cards, trace_step
from autofit.probe.placement import Place
from autofit.probe.steps import Request
from autofit.probe.timing import Plan

LOOK_SECONDS = 600.0
LEAST_SECONDS = 1e-3  # that anything is given, also where no time is left
Work = Callable[..., Any]  # of a workload and arguments, which are sent between processes


class Executor(ABC):
    """Measures configs, and runs other functions where configs are measured.

    A context manager; leaving it ends all. Its methods may be called from several threads.

    Attributes:
        places: how many configs are measured at once.
        devices: how many train one config together.
        timeout: seconds a probe may take.
        own_ranks: where these devices are, if not on this machine; None if it is to be divided.
        sharing: how many devices then share a node's processors and memory at once.
        until: when all that is run must have ended, by time.monotonic().
    """

    places: int = 1
    devices: int = 1
    timeout: float = 600.0
    own_ranks: tuple[Place, ...] | None = None
    sharing: int = 1
    until: float = math.inf

    @abstractmethod
    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        """Measure one Config in processes of its own; however they end, the Measurement says so.

        Raises:
            InputError: the workload cannot be sent, or not be opened there; ProbeError: the
            executor has ended, the device cannot be used, or it ran out of memory because others
            use it.
        """

    @abstractmethod
    def run(
        self,
        function: Work,
        workload: Workload | None,
        *arguments: Any,
        log: str,
        timeout: float,
        task: str = "it",
    ) -> Any:
        """The result of `function(workload, *arguments)` in a process of its own.

        Args:
            log: the name of the log that the process writes to.
            timeout: seconds.
            task: what it does, for messages.

        Raises:
            As `measure`, and errors of autofit's that the function raises; ProbeError: the process
            died or took too long.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Make every waiting call, and every later one, raise a ProbeError soon."""

    @abstractmethod
    def close(self) -> None:
        """End all processes; safe to call twice."""

    def free_slots(self) -> int:
        """How many configs can be measured at once now."""
        return self.places

    def explorer(self) -> contextlib.AbstractContextManager["Executor"]:
        """Enters the executor that explores, several at once; giving it up leaves this one."""
        return contextlib.nullcontext(self)

    def end_by(self, until: float) -> None:
        """End whatever `run`, `trace` and `link` still do at that time, of time.monotonic()."""
        self.until = until

    def seconds_within(self, timeout: float) -> float:
        """A timeout, cut where time ends."""
        return min(timeout, max(self.until - time.monotonic(), LEAST_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def detect(self, device: str | None) -> Hardware:
        """The hardware where probes run; a ProbeError where the device is missing."""
        hardware: Hardware = self._look(detect_hardware, None, device)
        return hardware

    def inspect(
        self, workload: Workload, device: str | None, budget_bytes: int | None
    ) -> tuple[Hardware, Traits]:
        """The hardware, and the workload's traits on it.

        Raises:
            InputError: the workload is wrong; ProbeError: the device is missing.
        """
        hardware, traits = self._look(inspect, workload, device, budget_bytes)
        return hardware, traits

    def idle_cards_like(self, hardware: Hardware, usable_bytes: int) -> list[str]:
        """Card 0 and its idle equals with so much free, by CUDA_VISIBLE_DEVICES' names.

        Raises ProbeError where there is no card.
        """
        first, *others = self._look(list_cards, None)
        alike = [first]
        for card in others:
            with contextlib.suppress(ProbeError):  # others use it, or it is broken
                found: Hardware = self._look(detect_idle_card, None, card)
                same = (found.name, found.memory_bytes) == (hardware.name, hardware.memory_bytes)
                if same and found.memory_bytes - found.used_bytes >= usable_bytes:
                    alike.append(card)
        return alike

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        """The link between the devices that train one config together, measured in a few seconds.

        None for one device, and where it could not be measured.
        """
        return None

    def trace(
        self,
        workload: Workload,
        config: Config,
        hardware: Hardware,
        budget: Budget,
        *,
        directory: Path,
    ) -> dict[str, str]:
        """Record one step of a Config; the paths by what they hold (see `StepTrace`).

        Raises as `measure`.
        """
        request = Request(config, hardware, budget, Plan())
        written: dict[str, str] = self._record(trace_step, workload, request, directory)
        return written

    def _record(self, function: Work, workload: Workload, *arguments: Any) -> Any:
        return self.run(function, workload, *arguments, log="step-trace.log", timeout=self.timeout)

    def _look(self, function: Work, workload: Workload | None, *arguments: Any) -> Any:
        return self.run(
            function,
            workload,
            *arguments,
            log="look.log",
            timeout=LOOK_SECONDS,
            task="looking at the model",
        )
