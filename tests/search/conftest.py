"""A formula in the place of a machine: memory and speed of a config from a few random constants, like real ones."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.knobs import Knob
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.workload import Workload
from autofit.search.pareto import Evidence
from autofit.search.predictions import Predictions
from autofit.search.ranking import fastest
from autofit.search.space import KnobChoices, Space
from autofit.search.study import Limits, SearchProblem, search

EFFECTIVE_BATCH = 32
KNOBS: dict[str, tuple[Value, ...]] = {
    "precision": ("bf16", "bf16-mixed", "fp32"),
    "micro_batch_size": (1, 2, 4, 8, 16, 32),
    "activation_checkpointing": ("full", "none"),
    "lora_rank": (8, 16, 64, 0),
    "lora_targets": ("all-linear",),
    "optimizer": ("adamw-8bit", "adamw", "adamw-foreach"),
    "attention": ("sdpa", "eager"),
}
RANKS: dict[str, dict[Value, int]] = {
    "activation_checkpointing": {"full": 0, "none": 1},
    "lora_rank": {8: 8, 16: 16, 64: 64},
    "optimizer": {"adamw": 1, "adamw-foreach": 2},
}


def accumulation_steps(config: Config) -> Value:
    micro = int(str(config["micro_batch_size"]))
    if EFFECTIVE_BATCH % micro:
        raise InputError(
            f"micro_batch_size {micro} does not divide the effective batch of {EFFECTIVE_BATCH}."
        )
    return EFFECTIVE_BATCH // micro


# What the techniques say, of the knobs above.
RULES = Constraints(
    off={"lora_rank": 0, "lora_targets": None, "gradient_accumulation_steps": None},
    canonicalize={
        "gradient_accumulation_steps": accumulation_steps,
        "lora_targets": lambda config: config["lora_targets"] if config["lora_rank"] else None,
    },
)


def memory_order(knob: str, value: Value) -> int | None:
    if knob == "micro_batch_size":
        return int(str(value))
    return RANKS.get(knob, {}).get(value)


class Formula:
    """Memory rises with every `memory_order`, as real memory is proven to; the rest is chance, drawn from `seed`."""

    def __init__(self, seed: int = 0, *, share: float = 0.3, noise: float = 0.0) -> None:
        draw = random.Random(seed)
        self.space = Space("formula", "for tests", dict(KNOBS))
        self.configs = self.space.configs(RULES)
        self.weights = 10 ** draw.uniform(8, 10)
        self.activations = self.weights * 10 ** draw.uniform(-1.2, 0.5)
        self.kept = draw.uniform(0.05, 0.3)
        self.scores = draw.uniform(0.1, 1.5)
        self.rate = {"fp32": 1.0, "bf16": draw.uniform(0.7, 6), "bf16-mixed": draw.uniform(0.6, 5)}
        self.half = draw.uniform(0.2, 6)
        self.again = draw.uniform(0.15, 0.4)
        self.eager = draw.uniform(0.0, 0.6)
        self.update = {
            "adamw": 0.1,
            "adamw-foreach": draw.uniform(0.09, 0.2),
            "adamw-8bit": draw.uniform(0.05, 0.4),
        }
        self.adapters = draw.uniform(0.05, 0.4)
        # As much memory as lets this share of the space fit.
        self.budget = sorted(map(self.memory, self.configs))[int(share * len(self.configs))]
        self.noise = noise
        self.probed: list[Config] = []
        self.bests: list[float | None] = []
        self.before: Callable[[int, Config], None] = lambda number, config: None
        self.refuse: Callable[[Config], str | None] = lambda config: None
        self.finished: list[tuple[Measurement, Measurement | None]] = []

    def memory(self, config: Mapping[str, Any]) -> float:
        rank, low = config["lora_rank"], config["precision"] == "bf16"
        trained = self.weights * (0.0006 * rank if rank else 1.0)
        held = self.weights * (4 if config["precision"] == "fp32" or (not rank and not low) else 2)
        state = {"adamw": 8, "adamw-foreach": 10, "adamw-8bit": 2.1}[config["optimizer"]] / (
            2 if low else 1
        )
        sample = self.activations * (2 if config["precision"] == "fp32" else 1)
        sample *= 1 + self.scores * (config["attention"] == "eager")
        sample *= self.kept if config["activation_checkpointing"] == "full" else 1
        return held + trained * (4 + state) + sample * config["micro_batch_size"]

    def speed(self, config: Mapping[str, Any]) -> float:
        micro, rank = config["micro_batch_size"], config["lora_rank"]
        seconds = (1 + self.half / micro) / self.rate[config["precision"]]
        seconds *= 1 + self.again * (config["activation_checkpointing"] == "full")
        seconds *= 1 + self.eager * (config["attention"] == "eager")
        if rank:
            seconds *= 0.72 + self.adapters * (1 + rank / 200)
        return 1 / (seconds + self.update[config["optimizer"]] * (0.1 if rank else 1.0))

    def best(self) -> float:
        """The highest speed in the space that fits."""
        return max(self.speed(config) for config in self.configs if self.fits(config))

    def fits(self, config: Mapping[str, Any]) -> bool:
        return self.memory(config) <= self.budget

    def probe(self, number: int, config: Config, best: float | None = None) -> Measurement:
        self.before(number, config)
        self.probed.append(config)
        self.bests.append(best)
        peak = PeakBytes(int(min(self.memory(config), 1.05 * self.budget)))
        if not self.fits(config):
            return Measurement(
                config, Outcome.OUT_OF_MEMORY, number=number, peak_bytes=peak, reason="too large"
            )
        # The same config gives the same figure, in whatever order and process it is measured.
        speed = self.speed(config) * math.exp(random.Random(config.key).gauss(0, self.noise))
        seconds = EFFECTIVE_BATCH / speed
        return Measurement(
            config,
            Outcome.FITS,
            number=number,
            step_seconds=StepSeconds(seconds, seconds, seconds),
            samples_per_second=speed,
            peak_bytes=peak,
        )

    def problem(self) -> SearchProblem:
        return SearchProblem(
            probe=self.probe,
            constraints=dataclasses.replace(
                RULES, refuse={"formula": lambda config: self.refuse(config)}
            ),
            memory_order=memory_order,
            on_finished=lambda measurement, best: self.finished.append((measurement, best)),
        )


def gather(
    problem: Formula, *, trials: int = 12, memory_off: float = 1.0, speed_off: float = 1.0
) -> Evidence:
    """A search with predictions that are all off by the same, and what there is to say after it."""

    def expect(configs: Sequence[Config]) -> Predictions:
        nbytes = [problem.memory(config) / memory_off for config in configs]
        return Predictions.of(
            configs,
            nbytes,
            [EFFECTIVE_BATCH / problem.speed(config) * speed_off for config in configs],
        )

    budget = Budget(int(problem.budget), GIB)
    asked = dataclasses.replace(problem.problem(), predict=expect)
    found = search(
        problem.space, asked, limits=Limits(trials=trials, memory_bytes=budget.device_bytes)
    )
    return Evidence(
        best=fastest(found.measurements),
        measurements=found.measurements,
        failed=(),
        surrogate=found.surrogate,
        predictions=expect(problem.configs),
        budget=budget,
        hardware=Hardware("cpu", "a CPU", 8 * GIB, 8 * GIB, 8 * GIB, 2),
        workload=Workload(
            model=dict,
            batch=lambda n: n,
            effective_batch_size=EFFECTIVE_BATCH,
            unit="tokens",
            sequence_length=64,
        ),
    )


@pytest.fixture
def searched() -> Callable[..., Evidence]:
    """What a search of a formula saw, predictions being off by some factors."""
    return gather


@pytest.fixture
def formula() -> type[Formula]:
    return Formula


@pytest.fixture
def offer() -> KnobChoices:
    """All knobs above, as a GPU would offer them; two values are known that it does not offer."""
    unoffered = {
        "precision": ("fp8", "fp16-mixed"),
        "attention": ("flash",),
        "optimizer": ("sgd",),
        "lora_rank": (4, 32),
    }

    knobs = {
        name: Knob(name, values[0], values + unoffered.get(name, ()))
        for name, values in KNOBS.items()
    }
    return KnobChoices(
        tuple(KNOBS), KNOBS.__getitem__, lambda name, value: knobs[name].check(value)
    )
