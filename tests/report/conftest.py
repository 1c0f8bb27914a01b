"""A small finished search to report on."""

import dataclasses
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.estimate import Timeline
from autofit.core.events import (
    Event,
    Note,
    PhaseStarted,
    ProbeFinished,
    ProbeStarted,
    SearchStarted,
)
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.pareto import Alternative, OtherBudget, Point
from autofit.core.record import Predicted, Record
from autofit.core.result import Result, tier

OFF = Config(
    precision="fp32",
    micro_batch_size=8,
    gradient_accumulation_steps=1,
    activation_checkpointing="none",
    lora_rank=0,
    lora_targets=None,
    optimizer="adamw",
    attention="sdpa",
)
HARDWARE = Hardware("cpu", "a test's CPU", 8 * GIB, 8 * GIB, 6 * GIB, 2)
BUDGET = Budget(2 * GIB, 6 * GIB)
SMALL = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}


def measurement(
    rate: float = 0.0, gib: float = 1.0, *, others: dict[str, Any] | None = None, **knobs: Any
) -> Measurement:
    """One that fits at `rate` samples a second; one out of memory where the rate is 0."""
    seen: dict[str, Any] = {
        "outcome": Outcome.OUT_OF_MEMORY,
        "reason": f"needs {gib:.2f} GiB of 2.00",
    }
    if rate:
        step = 8 / rate
        seen = {
            "outcome": Outcome.FITS,
            "step_seconds": StepSeconds(step, step * 0.98, step * 1.03),
            "samples_per_second": rate,
            "tokens_per_second": rate * 64,
        }
    return Measurement(
        **{
            "config": OFF.replace(**knobs),
            "peak_bytes": PeakBytes(int(gib * GIB)),
            **seen,
            **(others or {}),
        }
    )


def point_on_frontier(rate: float, gib: float, *, seen: bool = False, **knobs: Any) -> Point:
    """A predicted point, or a measured one, of that many samples a second and GiB."""
    return Point(OFF.replace(**knobs), int(gib * GIB), rate, rate * 64, seen)


def single_change(
    knob: str, value: Any, rate: float, gib: float | None, *, seen: bool = False
) -> Alternative:
    """The best config but for a knob; one that does not fit is larger than 2 GiB, or nobody knows how large."""
    config = OFF.replace(precision="bf16-mixed", **SMALL).replace(**{knob: value})
    outcome = Outcome.OUT_OF_MEMORY if gib is None or gib > 2 else Outcome.FITS
    return Alternative(
        knob, config, outcome, None if gib is None else int(gib * GIB), rate, rate * 64, seen
    )


def search_result(**changes: Any) -> Result:
    verified = {"verified": True}
    best = measurement(100, 1.5, others=verified, precision="bf16-mixed", **SMALL)
    runner_up = measurement(98, 1.4, others=verified, precision="bf16", **SMALL)
    lora = measurement(60, 0.9, precision="bf16-mixed", lora_rank=16, lora_targets="all-linear")
    trials = (
        measurement(0, 2.4),
        measurement(50, 1.9, **SMALL),
        measurement(102, 1.5, precision="bf16-mixed", **SMALL),
        measurement(99, 1.4, precision="bf16", **SMALL),
        measurement(101, 1.7, precision="bf16-mixed", optimizer="adamw-foreach", **SMALL),
        lora,
        measurement(0, 3.1, optimizer="adamw-foreach"),
        measurement(
            others={"outcome": Outcome.REFUSED, "peak_bytes": None, "reason": "no [eager] here"},
            attention="eager",
        ),
    )
    made: dict[str, Any] = {
        "model": "tiny-llama",
        "workload": {"task": "causal-lm", "sequence_length": 64, "effective_batch_size": 8},
        "source": {"kind": "preset", "model": "tiny-llama"},
        "hardware": HARDWARE,
        "budget": BUDGET,
        "versions": {},
        "best": best,
        "tiers": {"full": best, "lora": lora, "qlora": None},
        "trials": trials,
        "skipped": {"predicted": 0, "dominated": 12, "refused": 3},
        "stopped_by": "space",
        "space_size": 23,
        "search_seconds": 83.2,
        "runner_up": runner_up,
        "files": {"result": "runs/x/result.yaml", "script": "runs/x/train.py", "report": None},
    }
    return Result(**{**made, **changes})


def step_timeline(gib: float = 1.5, **knobs: Any) -> Timeline:
    """A step that rises to so many GiB and falls again."""
    shares = (
        (3, 2, 0, 1, 0, 0, 0),
        (3, 2, 0, 6, 0, 0, 1),
        (3, 2, 3, 4, 0, 0, 8),
        (3, 2, 3, 1, 0, 0, 1),
    )
    moments = tuple(tuple(int(gib * GIB * share / 20) for share in moment) for moment in shares)
    phases = (("forward", 0.0), ("backward", 0.33), ("update", 0.95))
    return Timeline(
        OFF.replace(**knobs),
        moments,
        (0.0, 0.3, 0.6, 1.0),
        phases,
        True,
        int(gib * GIB),
        "backward",
        4,
    )


def search_record(**changes: Any) -> Record:
    """That search with all that a report needs."""
    best = {"precision": "bf16-mixed", **SMALL}
    frontier = {
        "full": (
            point_on_frontier(98, 1.4, seen=True, precision="bf16", **SMALL),
            point_on_frontier(130, 2.9, **best),
        ),
        "lora": (
            point_on_frontier(
                60, 0.9, seen=True, precision="bf16-mixed", lora_rank=16, lora_targets="all-linear"
            ),
        ),
        "qlora": (),
    }
    alternatives = (
        single_change("precision", "bf16", 98, 1.4, seen=True),
        single_change("precision", "fp32", 50, 1.9, seen=True),
        single_change("activation_checkpointing", "full", 80, 1.1),
        single_change("optimizer", "adamw-foreach", 101, 1.7, seen=True),
        single_change("micro_batch_size", 8, 120, 3.1),
    )
    found = search_result(
        frontier=frontier,
        alternatives=alternatives,
        predicted=True,
        bound=0.04,
        other_budgets=(OtherBudget("twice as much", 4 * GIB),),
        versions={"autofit": "0.1.0", "torch": "2.13.0"},
        trials=tuple(
            dataclasses.replace(each, number=place)
            for place, each in enumerate(search_result().trials)
        ),
    )
    found = dataclasses.replace(found, **changes)
    seen = [each for each in found.tiers.values() if each is not None]
    return Record(
        found,
        {"seed": 3, "tolerance": 0.03, "space": "full", "set": {"attention": ["sdpa", "eager"]}},
        tuple(Predicted(1.1 * GIB * (2 + place) / 2, 0.1) for place in range(len(found.trials))),
        {tier(each.config): step_timeline(**dict(each.config)) for each in seen},
        finished="2026-01-02T03:04:05+00:00",
    )


@pytest.fixture
def events() -> list[Event]:
    """A short search: one that fits, one that does not, a better one, and its verification."""
    first = dataclasses.replace(measurement(50, 1.9), number=0)
    miss = dataclasses.replace(measurement(0, 2.4, precision="bf16"), number=1)
    better = dataclasses.replace(measurement(100, 1.5, precision="bf16-mixed"), number=2)
    return [
        PhaseStarted("looking at the model"),
        SearchStarted("tiny-llama", HARDWARE, BUDGET, space_size=23, trials=4, time_limit=600.0),
        Note("a note about [this]"),
        PhaseStarted("predicting 23 configs"),
        ProbeStarted(0, first.config, expected_bytes=GIB),
        ProbeFinished(first, first),
        ProbeStarted(1, miss.config),
        ProbeFinished(miss, first),
        ProbeStarted(2, better.config),
        ProbeFinished(better, better),
        ProbeStarted(2, better.config, verifying=True),
        ProbeFinished(dataclasses.replace(better, verified=True), None),
        PhaseStarted("writing the result"),
    ]


@pytest.fixture(scope="session")
def record() -> Callable[..., Record]:
    """The record of a finished search, with some fields of its result changed."""
    return search_record


@pytest.fixture(scope="session")
def result() -> Callable[..., Result]:
    """A finished search, with some fields changed."""
    return search_result


@pytest.fixture(scope="session")
def measured() -> Callable[..., Measurement]:
    """A measurement by samples per second, peak in GiB and knobs."""
    return measurement


@pytest.fixture(scope="session")
def point() -> Callable[..., Point]:
    """A point of a frontier by samples per second, GiB and knobs."""
    return point_on_frontier


@pytest.fixture(scope="session")
def change() -> Callable[..., Alternative]:
    """The best config with one knob changed."""
    return single_change


@pytest.fixture(scope="session")
def shown() -> Callable[..., str]:
    """What a renderable looks like on a console of some width, as plain text."""

    def render(renderable: RenderableType, width: int = 80) -> str:
        console = Console(file=StringIO(), width=width, color_system=None)
        console.print(renderable)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(line) <= width for line in text.splitlines())
        return str(text)

    return render
