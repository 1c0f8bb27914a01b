"""An optimizer's state and step for the weights of a whole model, from a step of the real one on
one of each shape. A model of billions of weights has a dozen shapes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.fake_device import fake_device
from autofit.estimate.operator_costs import Cost
from autofit.estimate.operators import Calls
from autofit.estimate.peak import in_blocks
from autofit.estimate.recorder import HOST, Recorder
from autofit.estimate.roofline import Speed, working_seconds
from autofit.estimate.skeleton_trace import fake_setup
from autofit.techniques import technique_named

Kind = tuple[torch.Size, torch.dtype, bool]  # whether it is in a block
Shapes = Mapping[Kind, int]


@dataclass(frozen=True)
class OptimizerCost:
    """One optimizer step over all weights."""

    weights: int  # bytes of what it steps, and of the gradients
    state: int  # bytes on the device
    paged: int  # bytes of it that the host holds
    temporary: int  # the most bytes needed meanwhile
    largest: int  # the same where each weight is stepped by itself
    operators: tuple[tuple[Cost, int], ...]  # each with the number of weights that it works on
    launches: int  # of all operators, fewer where all weights are stepped at once

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(cost.nbytes * count for cost, count in self.operators)

    def seconds(self, speed: Speed) -> float:
        """How long the step takes on the device."""
        working = sum(count * working_seconds(cost, speed) for cost, count in self.operators)
        launching = self.launches * speed.rates.launch_seconds

        return max(working, launching) if speed.asynchronous else working + launching


class _Step(NamedTuple):
    state: int
    paged: int
    temporary: int  # the most bytes needed besides weights, gradients and state
    costs: tuple[Cost, ...]


# By an optimizer and kinds of weights, the step of one of each kind, and of all together.
UpdateSteps = dict[tuple[Value, tuple[Kind, ...]], list[_Step]]


def cost_of_update(
    workload: Workload,
    hardware: Hardware,
    config: Config,
    shapes: Shapes,
    calls: Calls | None = None,
    traced: UpdateSteps | None = None,
) -> OptimizerCost:
    """The cost of a step of the config's optimizer for so many weights of each kind.

    Args:
        calls: gets its operators.
        traced: the steps that are known, whatever the number of weights; gets those that were not.
    """
    known = {} if traced is None else traced
    key = (config.optimizer, tuple(shapes))
    if key not in known:
        known[key] = _traced(
            workload,
            hardware,
            config,
            list(shapes),
            calls,
        )

    *steps, together = known[key]
    counted = list(zip(steps, shapes.values(), strict=True))
    most = max((step.temporary for step in steps), default=0)
    summed = sum(step.temporary for step in steps)

    # An optimizer that steps all weights at once needs temporaries for all of them at once.
    at_once = (
        len(steps) > 1 and together.temporary > most and 2 * together.temporary > most + summed
    )

    return OptimizerCost(
        weights=sum(
            shape.numel() * dtype.itemsize * count for (shape, dtype, _), count in shapes.items()
        ),
        state=sum(step.state * count for step, count in counted),
        paged=sum(step.paged * count for step, count in counted),
        temporary=sum(step.temporary * count for step, count in counted) if at_once else most,
        largest=most,
        operators=tuple((cost, count) for step, count in counted for cost in step.costs),
        launches=len(together.costs)
        if at_once
        else sum(len(step.costs) * count for step, count in counted),
    )


def _traced(
    workload: Workload,
    hardware: Hardware,
    config: Config,
    kinds: Sequence[Kind],
    calls: Calls | None,
) -> list[_Step]:
    """A step of one weight of each kind alone, then one of all of them together."""
    recorder = Recorder(hardware)
    steps = []
    recorder.called = calls.note if calls else None
    with fake_device(hardware), recorder:
        weights = nn.ParameterList(
            [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype, _ in kinds]
        )
        for weight, (_, _, of_block) in zip(weights, kinds, strict=True):
            weight.of_block = of_block

        setup = fake_setup(
            workload,
            config,
            hardware,
            weights,
            recorder,
        )
        technique_named("optimizer").trace(setup, config.optimizer)
        optimizer = setup.optimizer
        for stepped in [*([weight] for weight in weights), list(weights)]:
            for _ in range(2):  # in the first one the state is made
                optimizer.zero_grad(set_to_none=True)
                for weight in stepped:
                    weight.grad = torch.empty_like(weight)

                before = recorder.live
                first = len(recorder.costs)
                recorder.reset_peak()
                optimizer.step()

            temporary = recorder.peak - before
            costs = tuple(recorder.costs[first:])
            steps.append(
                _Step(
                    *_state_bytes(optimizer, stepped, recorder, hardware),
                    temporary,
                    costs,
                )
            )

    return steps


def scaled_shapes(shapes: Shapes, prime: int, rank: int) -> Counter[Kind]:
    """The shapes for another LoRA rank than the traced prime.

    Experts have a multiple of it in one matrix.
    """
    scaled: Counter[Kind] = Counter()
    for (shape, dtype, of_block), count in shapes.items():
        sizes = torch.Size(size // prime * rank if size % prime == 0 else size for size in shape)
        scaled[sizes, dtype, of_block] += count

    return scaled


def _state_bytes(
    optimizer: Optimizer,
    weights: Sequence[nn.Parameter],
    recorder: Recorder,
    hardware: Hardware,
) -> tuple[int, int]:
    """Bytes of the optimizer's state for these weights on the device and on the host."""
    states = [
        list(optimizer.state[weight].values()) for weight in weights if weight in optimizer.state
    ]
    recorder.label(states, "optimizer")
    sizes = {event.storage: in_blocks(event.nbytes, hardware) for event in recorder.events}
    storages = set(recorder.storages_of(states))
    on_device, paged = (
        sum(sizes[storage] for storage in storages if recorder.labels.get(storage) == label)
        for label in ("optimizer", HOST)
    )

    return on_device, paged
