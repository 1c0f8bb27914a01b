"""Searches whose probes are a formula: a fake executor, a run directory, and a few answers."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.events import Event, Note
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.links import Link
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.options import search_options
from autofit.core.result import Result
from autofit.core.workload import Traits, Workload
from autofit.estimate.timeline import timelines
from autofit.probe import Executor, Plan, Request
from autofit.tuning import measured as tune
from autofit.tuning import pipeline
from autofit.tuning.remedies import what_helps
from tests import tiny

TRAITS = Traits(
    parameters=1000,
    blocks=2,
    linears=4,
    attention=False,
    sdpa=False,
    batch_norm=False,
    dropout=False,
)
CARD = dataclasses.replace(
    tiny.CPU,
    device="cuda",
    name="NVIDIA H200",
    memory_bytes=140 * GIB,
    capability=(9, 0),
    context_bytes=GIB // 2,
)

Answer = Callable[[Config, bool], Measurement]


def fits(config: Config, rate: float, peak: int = MIB, **others: Any) -> Measurement:
    """A probe that saw so many samples a second, of batches of 8."""
    step = 8 / rate
    return Measurement(
        config=config,
        outcome=Outcome.FITS,
        step_seconds=StepSeconds(step, step * 0.99, step * 1.01),
        samples_per_second=rate,
        peak_bytes=PeakBytes(peak),
        **others,
    )


def missed(
    config: Config, outcome: Outcome = Outcome.OUT_OF_MEMORY, peak: int = MIB
) -> Measurement:
    return Measurement(
        config=config, outcome=outcome, peak_bytes=PeakBytes(peak), reason="Traceback:\nits reason"
    )


def by_micro_batch(
    explored: Mapping[int, float], verified: Mapping[int, float] | None = None
) -> Answer:
    """Rates by micro-batch, when exploring and when verifying; 0 is out of memory."""

    def answer(config: Config, verifying: bool) -> Measurement:
        micro = config["micro_batch_size"]
        assert isinstance(micro, int)
        rate = (verified or {}).get(micro, explored[micro]) if verifying else explored[micro]
        return fits(config, rate, micro * MIB) if rate else missed(config, peak=micro * MIB)

    return answer


def verifies(plan: Plan) -> bool:
    return dataclasses.replace(plan, seconds=math.inf) == tune.VERIFY_PLAN


class FakeExecutor(Executor):
    """Stands in for a LocalExecutor: looks at nothing and measures by a formula."""

    def __init__(self, answer: Answer, hardware: Hardware, traits: Traits) -> None:
        self.answer = answer
        self.hardware = hardware
        self.traits = traits
        self.asked: list[tuple[Config, Plan]] = []
        self.interrupt_at: int | None = None  # the probe, from 0, in which Ctrl-C is pressed

    def close(self) -> None:
        pass

    def inspect(
        self, workload: Workload, device: str | None, budget_bytes: int | None
    ) -> tuple[Hardware, Traits]:
        return self.hardware, self.traits

    def measure(self, workload: Workload, request: Request, *, number: int) -> Measurement:
        if len(self.asked) == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.asked.append((request.config, request.plan))
        seen = self.answer(request.config, verifies(request.plan))
        return dataclasses.replace(seen, number=number, seconds=seen.seconds or 1.0)

    def link(self, hardware: Hardware, budget: Budget) -> Link | None:
        return None

    def idle_cards_like(self, hardware: Hardware, usable_bytes: int) -> list[str]:
        return ["0"]

    def give_up(self) -> None:
        pass

    def run(
        self, function: Any, workload: Workload, *arguments: Any, log: str, timeout: float
    ) -> Any:
        """Asked to predict configs, or what would help, it knows nothing; asked to follow a step, it cannot."""
        if function is timelines or function is what_helps:
            return [] if function is timelines else None
        unknown = [math.nan] * len(arguments[1])
        return unknown, unknown

    @property
    def explored(self) -> list[Any]:
        """The micro-batches of the exploring probes, in order."""
        return [config["micro_batch_size"] for config, plan in self.asked if not verifies(plan)]

    @property
    def verified(self) -> list[Any]:
        return [config["micro_batch_size"] for config, plan in self.asked if verifies(plan)]


def notes_of(events: Sequence[Event]) -> list[str]:
    """What was told, but for that nothing is predicted here."""
    texts = [event.text for event in events if isinstance(event, Note)]
    return [text for text in texts if "configs are not predicted" not in text]


class Bench(SimpleNamespace):
    """A run directory, a space and a fake executor to search with."""

    folder: Path
    executor: FakeExecutor

    def search(self, answer: Answer | None = None, **options: Any) -> Result:
        if answer is not None:
            self.executor.answer = answer
        workload = options.pop("workload", None) or tiny.mlp_workload(8)
        listener = options.pop("listener", None)
        given = {
            "space": str(self.folder / "space.yaml"),
            "mem": 1,
            "out": self.folder / "run",
            "store": False,
            **options,
        }
        return pipeline.run_search(workload, search_options(**given), listener)

    def space(self, **knobs: Any) -> None:
        lines = [f"  {name}: {values}" for name, values in knobs.items()]
        (self.folder / "space.yaml").write_text(
            "\n".join(["description: for a test", "knobs:", *lines])
        )
