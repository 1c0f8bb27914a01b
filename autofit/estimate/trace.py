"""One training step of one Config on fake tensors: the same build and the same step as in a probe, with no arithmetic.

What two real steps of two micro-batches come to, at the price of one: optimizer state and, where gradients accumulate,
the gradients of earlier micro-batches are there before the traced micro-batch begins, as in any later step.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from autofit.core.config import Config
from autofit.core.errors import AutofitError, RefusedError, UntraceableError
from autofit.core.hardware import Hardware
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import map_tensors
from autofit.estimate.chunks import SampledChunks
from autofit.estimate.fake_device import fake_world
from autofit.estimate.kernels_cpu import bytes_inside
from autofit.estimate.library_kernels import library_kernels
from autofit.estimate.operator_costs import Cost
from autofit.estimate.operators import Calls
from autofit.estimate.recorder import Event, Mark, Recorder, on_real_tensors
from autofit.estimate.saved_activations import SavedTensors, Stay
from autofit.estimate.shallow_model import Depth, cut
from autofit.setup import Setup
from autofit.setup.blocks import repeated_blocks
from autofit.techniques import canonicalize, refuse
from autofit.training.build import adapt, finish
from autofit.training.meta_model import materialize, meta_model_from
from autofit.training.step import accumulate, update


@dataclass(frozen=True)
class Trace:
    """What a step does with memory, event by event, and what its operators cost.

    Attributes:
        events: from the making of the model to the end of the step.
        marks: where build, state, forward, backward, update and end begin, and blocks in forward and backward.
        labels: what a storage is, where it is known: parameters, gradients, optimizer, inputs.
        owners: the block that a storage of parameters, gradients or optimizer state belongs to.
        completed: the number of events before a gradient was complete.
        products: the number of events after which the first matrix product of a phase was made.
        trained: the storages of trained parameters.
        saved: the storages that wait for the backward in autograd's hands, where that was asked for.
        chunks: (tokens, features, vocabulary) of a loss that two chunks were looked at of.
        shapes: shape and dtype of every trained parameter, and its block.
        costs: of the operators.
        calls: what they were called with, where the CPU is what is traced for.
        depth: how the blocks stand for those of a deeper model; None where all are there.
        trainable, parameters: numbers of elements, as traced.
        assumptions: what stand-ins take for granted, in sentences.
    """

    config: Config
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    labels: dict[int, str]
    owners: dict[int, int]
    completed: dict[int, int]
    products: dict[str, int]
    trained: frozenset[int]
    saved: dict[int, Stay]
    chunks: tuple[int, int, int] | None
    shapes: tuple[tuple[torch.Size, torch.dtype, int | None], ...]
    costs: tuple[Cost, ...]
    calls: Calls
    depth: Depth | None
    trainable: int
    parameters: int
    assumptions: tuple[str, ...] = ()

    def phase_at(self, event: int) -> str:
        """The phase that an event belongs to."""
        return self.marks[bisect_right(self.marks, event, key=lambda mark: mark.events) - 1].phase

    def costs_of(self, phase: str) -> tuple[Cost, ...]:
        """The costs of one phase."""
        return tuple(cost for mark, after in self._spans(phase) for cost in self.costs[mark.costs : after.costs])

    def dispatched_in(self, phase: str) -> int:
        """How many operators were called in one phase, those that cost next to nothing too."""
        return sum(after.dispatched - mark.dispatched for mark, after in self._spans(phase))

    def _spans(self, phase: str) -> Iterator[tuple[Mark, Mark]]:
        return ((mark, after) for mark, after in zip(self.marks, self.marks[1:], strict=False) if mark.phase == phase)


@dataclass(frozen=True)
class Skeleton:
    """A model without weights, and how its blocks stand for those of a deeper one."""

    model: nn.Module
    depth: Depth | None = None

    @classmethod
    def whole(cls, workload: Workload) -> Skeleton:
        """The model as it is."""
        return cls(_on_meta(meta_model_from(workload.model)))

    @classmethod
    def cut_short(cls, workload: Workload, *, alternating: bool) -> Skeleton:
        """The model with its middle cut out, if it is one of many like blocks."""
        model = _on_meta(meta_model_from(workload.model))
        return cls(model, cut(model, alternating=alternating))


def trace(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    *,
    model: Skeleton | None = None,
    calls: Calls | None = None,
    rows: int | None = None,
) -> Trace:
    """Trace one step.

    Args:
        model: is used up; None: the whole one.
        calls: what operators were called with before, in other traces; this one's are added.
        rows: this is a trace to put others together from: also find out what activation_offload would move, and look
            at two chunks of so many tokens where the loss is made in chunks.

    Raises:
        RefusedError: the config cannot be, or not for this model; UntraceableError: the model's code needs numbers.
    """
    settled = canonicalize(config, workload, hardware)
    reason = refuse(settled, workload, hardware)
    if reason:
        raise RefusedError(reason)
    recorder = Recorder(library_kernels(hardware))
    calls = calls or Calls()
    skeleton = model or Skeleton.whole(workload)
    setup = Setup(
        workload=workload,
        config=settled,
        hardware=hardware,
        device=torch.device("cpu"),
        model=skeleton.model,
        hyperparameters=Hyperparameters(),
    )
    setup.note_host = recorder.note_host
    chunks = SampledChunks(rows, recorder, str(settled["loss"])) if rows else None
    setup.slices = chunks
    saved: SavedTensors | None = None
    try:
        adapt(setup, traced=True)
        with fake_world(hardware) as world, recorder, recorder.seeing_resizes(), _cpu(recorder, hardware):
            _build(setup, recorder, world)
            recorder.called = calls.note if hardware.device == "cpu" else None
            if rows:
                saved = SavedTensors(setup.model, recorder)
                setup.forward_contexts.append(saved.hooks)
            _step(setup, recorder, world)
    except AutofitError:
        raise
    except Exception as error:  # the model's own code, under conditions that it was not written for
        raise _untraceable(error) from error
    finally:
        setup.close()
    return Trace(
        config=settled,
        events=tuple(recorder.events),
        marks=tuple(recorder.marks),
        labels=recorder.labels,
        owners=recorder.owners,
        completed=recorder.completed,
        products=recorder.products,
        trained=frozenset(recorder.storages_of([parameter for _, parameter in setup.trainable()])),
        saved=saved.stays if saved else {},
        chunks=chunks.seen if chunks else None,
        shapes=_shapes(setup),
        costs=tuple(recorder.costs),
        calls=calls,
        depth=skeleton.depth,
        trainable=sum(parameter.numel() for _, parameter in setup.trainable()),
        parameters=sum(parameter.numel() for parameter in setup.model.parameters()),
        assumptions=tuple(setup.assumptions),
    )


def _shapes(setup: Setup) -> tuple[tuple[torch.Size, torch.dtype, int | None], ...]:
    blocks = repeated_blocks(setup.model)
    owner = {parameter: block for block, module in enumerate(blocks) for parameter in module.parameters()}
    return tuple((each.shape, each.dtype, owner.get(each)) for _, each in setup.trainable())


def _untraceable(error: Exception) -> UntraceableError:
    operator = getattr(error, "func", None)
    why = f"{operator} needs numbers" if operator else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return UntraceableError(
        f"a training step of this model cannot be followed on tensors without values ({why[:300]})."
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
    materialize(setup, values=False)
    finish(setup, traced=True)
    recorder.label([*setup.model.parameters(), *setup.model.buffers()], "parameters")
    for block, module in enumerate(repeated_blocks(setup.model)):
        recorder.label([*module.parameters(), *module.buffers()], "parameters", block)


def _step(setup: Setup, recorder: Recorder, world: Any) -> None:
    blocks = repeated_blocks(setup.model)
    owner = {parameter: block for block, module in enumerate(blocks) for parameter in module.parameters()}
    recorder.mark("state")
    _make_state(setup, recorder, owner)
    batch = _batch(setup, recorder, world)
    trained = [] if setup.stepped_in_backward else [parameter for _, parameter in setup.trainable()]
    if int(setup.config["gradient_accumulation_steps"] or 1) > 1:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            recorder.label(parameter.grad, "gradients", owner.get(parameter))
    with ExitStack() as hooks:
        for parameter in trained:
            note = functools.partial(_note_gradient, recorder=recorder, block=owner.get(parameter))
            hooks.callback(parameter.register_post_accumulate_grad_hook(note).remove)
        for number, block in enumerate(blocks):
            for handle in _marking(block, number, setup, recorder, last=number == len(blocks) - 1):
                hooks.callback(handle.remove)
        recorder.phase = lambda: setup.phase
        accumulate(setup, batch)
        update(setup)
        recorder.phase = None
        recorder.mark("end")


def _marking(block: nn.Module, number: int, setup: Setup, recorder: Recorder, *, last: bool) -> Iterator[Any]:
    """Hooks that mark where a block's forward begins, and the last one's ends, and where its backward begins."""

    def begin(*_: Any) -> None:
        if setup.phase == "forward":
            recorder.mark("forward", number)

    def begin_backward(gradient: torch.Tensor) -> None:
        recorder.mark("backward", number)

    def end(_: nn.Module, args: Any, output: Any) -> None:
        if setup.phase == "forward":
            if last:
                recorder.mark("forward")
            made = [each for each in tree_iter(output) if isinstance(each, torch.Tensor) and each.requires_grad]
            for tensor in made[:1]:
                tensor.register_hook(begin_backward)

    yield block.register_forward_pre_hook(begin)
    yield block.register_forward_hook(end)


def _note_gradient(parameter: nn.Parameter, *, recorder: Recorder, block: int | None) -> None:
    recorder.label(parameter.grad, "gradients", block)


def _make_state(setup: Setup, recorder: Recorder, owner: dict[nn.Parameter, int]) -> None:
    """Let the optimizer make its state, as in a first step."""
    assert setup.optimizer is not None, "build() sets the optimizer"
    for group in setup.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    states: dict[Any, dict[str, Any]] = setup.optimizer.state
    for parameter, state in states.items():
        recorder.label(list(state.values()), "optimizer", owner.get(parameter))


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
