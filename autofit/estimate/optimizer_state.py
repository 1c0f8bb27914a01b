"""What an optimizer keeps and needs for the weights of a whole model, from a step of the real one on a few of them.

Weights of one shape are treated alike, and a model of billions of weights has a dozen shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.hyperparameters import Hyperparameters
from autofit.core.workload import Workload
from autofit.estimate.fake_world import fake_world
from autofit.estimate.library_kernels import library_kernels
from autofit.estimate.memory import in_blocks
from autofit.estimate.recorder import Recorder
from autofit.setup import Setup
from autofit.techniques import technique_named

Kind = tuple[torch.Size, torch.dtype]
Shapes = Mapping[Kind, int]


@dataclass(frozen=True)
class OptimizerCost:
    """Of one optimizer step over all weights: bytes of state, the most bytes needed meanwhile, bytes moved, operators.

    `largest` is the most needed for a single weight, where each is stepped by itself.
    """

    state: int
    temporary: int
    largest: int
    moved: int
    calls: int


@dataclass(frozen=True)
class _Step:
    state: int
    temporary: int
    moved: int
    calls: int


def optimizer_cost(workload: Workload, config: Config, hardware: Hardware, shapes: Shapes) -> OptimizerCost:
    """What the config's optimizer costs for so many weights of each shape and dtype."""
    steps = {kind: _step(workload, config, hardware, [kind]) for kind in shapes}
    together = _step(workload, config, hardware, list(shapes))
    most = max((step.temporary for step in steps.values()), default=0)
    summed = sum(step.temporary for step in steps.values())
    # An optimizer that steps all weights at once needs temporaries for all of them at once.
    at_once = len(steps) > 1 and together.temporary > most and 2 * together.temporary > most + summed
    total = sum(step.temporary * shapes[kind] for kind, step in steps.items())
    return OptimizerCost(
        state=sum(step.state * shapes[kind] for kind, step in steps.items()),
        temporary=total if at_once else most,
        largest=most,
        moved=sum(step.moved * shapes[kind] for kind, step in steps.items()),
        calls=together.calls if at_once or len(steps) == 1 else sum(s.calls * shapes[k] for k, s in steps.items()),
    )


def scaled_shapes(shapes: Shapes, prime: int, rank: int) -> Counter[Kind]:
    """The shapes for another LoRA rank than the prime that they were traced with."""
    scaled: Counter[Kind] = Counter()
    for (shape, dtype), count in shapes.items():
        scaled[torch.Size(rank if size == prime else size for size in shape), dtype] += count
    return scaled


def _step(workload: Workload, config: Config, hardware: Hardware, kinds: list[Kind]) -> _Step:
    recorder = Recorder(library_kernels(hardware))
    with fake_world(hardware), recorder:
        weights = nn.ParameterList([nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in kinds])
        setup = Setup(
            workload=workload,
            config=config,
            hardware=hardware,
            device=torch.device("cpu"),
            model=weights,
            hyperparameters=Hyperparameters(),
        )
        setup.note_host = recorder.note_host
        technique_named("optimizer").trace(setup, config["optimizer"])
        optimizer = setup.optimizer
        assert optimizer is not None, "the technique makes one"
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            before, first = recorder.live, len(recorder.costs)
            recorder.reset_peak()
            optimizer.step()
            temporary = recorder.peak - before
        for state in optimizer.state.values():
            recorder.label(list(state.values()), "optimizer")
    sizes = {event.storage: event.nbytes for event in recorder.events}
    held = sum(
        in_blocks(sizes[storage], hardware) for storage, label in recorder.labels.items() if label == "optimizer"
    )
    costs = recorder.costs[first:]
    return _Step(held, temporary, sum(cost.nbytes for cost in costs), len(costs))
