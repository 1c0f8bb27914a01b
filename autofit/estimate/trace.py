"""One training step of one Config on fake tensors: the same build and the same step as in a probe, with no arithmetic.

What two real steps of two micro-batches come to, at the price of one: optimizer state and, where gradients accumulate,
the gradients of earlier micro-batches are there before the traced micro-batch begins, as in any later step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.core.config import Config
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.hyperparameters import Hyperparameters
from autofit.core.workload import Workload
from autofit.estimate.costs import Cost
from autofit.estimate.fake_world import fake_world
from autofit.estimate.kernels_cpu import bytes_inside
from autofit.estimate.recorder import Event, Recorder, on_real_tensors
from autofit.setup import Setup
from autofit.techniques import refuse, settle
from autofit.training.build import adapt, finish
from autofit.training.data import map_tensors
from autofit.training.loop import accumulate, update
from autofit.training.skeleton import materialize, skeleton_from


@dataclass(frozen=True)
class Trace:
    """What a step does with memory, event by event, and what its operators cost.

    Attributes:
        events: from the making of the model to the end of the step.
        marks: (number of events before it, what begins there): build, state, forward, backward, update, end.
        labels: what a storage is, where it is known: parameters, gradients, optimizer, inputs.
        costs: of the operators of a micro-batch (forward, backward) and of the update, by (phase, kind, dtype).
    """

    config: Config
    events: tuple[Event, ...]
    marks: tuple[tuple[int, str], ...]
    labels: dict[int, str]
    costs: dict[tuple[str, str, str], Cost]
    trainable: int
    parameters: int


def trace(workload: Workload, config: Config, hardware: Hardware) -> Trace:
    """Trace one step.

    Raises:
        RefusedError: the config cannot be, or not for this model; UntraceableError: the model's code needs numbers.
    """
    settled = settle(config, workload, hardware)
    reason = refuse(settled, workload, hardware)
    if reason:
        raise RefusedError(reason)
    recorder = Recorder()
    setup = _unbuilt(workload, settled, hardware)
    try:
        adapt(setup, traced=True)
        with fake_world(hardware) as world, recorder, _cpu(recorder, hardware):
            _build(setup, recorder, world)
            _step(setup, recorder, world)
    finally:
        setup.close()
    trained = sum(parameter.numel() for _, parameter in setup.trainable())
    every = sum(parameter.numel() for parameter in setup.model.parameters())
    return Trace(
        settled, tuple(recorder.events), tuple(recorder.marks), recorder.labels, recorder.costs, trained, every
    )


def _unbuilt(workload: Workload, config: Config, hardware: Hardware) -> Setup:
    return Setup(
        workload=workload,
        config=config,
        hardware=hardware,
        device=torch.device("cpu"),
        model=_on_meta(skeleton_from(workload.model)),
        hyperparameters=Hyperparameters(),
    )


@contextmanager
def _cpu(recorder: Recorder, hardware: Hardware) -> Iterator[None]:
    """What its memory holds beside the tensors of a step, where the CPU is what is traced for."""
    if hardware.device != "cpu":
        yield
        return
    recorder.inside = bytes_inside
    with recorder.watching_random_states():
        yield


def _on_meta(model: nn.Module) -> nn.Module:
    """The model without the weights of factories that insist on real ones."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = done.setdefault(parameter, meta)
    return model


def _build(setup: Setup, recorder: Recorder, world: Any) -> None:
    for module in setup.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = recorder.know(world.from_tensor(buffer), buffer)
    materialize(setup)
    recorder.label([*setup.model.parameters(), *setup.model.buffers()], "parameters")
    finish(setup, traced=True)
    recorder.label([*setup.model.parameters(), *setup.model.buffers()], "parameters")


def _step(setup: Setup, recorder: Recorder, world: Any) -> None:
    accumulating = int(setup.config["gradient_accumulation_steps"] or 1) > 1
    recorder.mark("state")
    _make_state(setup, recorder)
    batch = _batch(setup, recorder, world)
    if accumulating:
        for _, parameter in setup.trainable():
            parameter.grad = torch.empty_like(parameter)
            recorder.label(parameter.grad, "gradients")
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda each: recorder.label(each.grad, "gradients"))
        for _, parameter in setup.trainable()
        if not setup.stepped_in_backward
    ]
    recorder.phase = lambda: setup.phase
    accumulate(setup, batch)
    update(setup)
    recorder.phase = None
    recorder.mark("end")
    for handle in handles:
        handle.remove()


def _make_state(setup: Setup, recorder: Recorder) -> None:
    """Let the optimizer make its state, as in a first step."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    for group in setup.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    for state in setup.optimizer.state.values():
        recorder.label(list(state.values()), "optimizer")


def _batch(setup: Setup, recorder: Recorder, world: Any) -> Any:
    """A micro-batch on the device; on a CPU the rest of the batch is in the same memory."""
    samples = setup.workload.effective_batch_size if setup.hardware.device == "cpu" else setup.micro_batch_size
    with on_real_tensors():
        real = setup.workload.batch(samples)
    fake = functools.partial(_fake, recorder=recorder, world=world)
    whole = map_tensors(real, fake)
    recorder.label(_tensors(whole), "inputs")
    return map_tensors(whole, lambda tensor: tensor[: setup.micro_batch_size] if tensor.dim() else tensor)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _fake(tensor: torch.Tensor, *, recorder: Recorder, world: Any) -> torch.Tensor:
    return recorder.know(world.from_tensor(tensor), tensor)
