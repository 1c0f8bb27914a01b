"""One training step of a model without weights, recorded on fake tensors: the same build and the same
step as in a probe, without arithmetic.

Equals two real steps of two micro-batches at the price of one: optimizer state and, where gradients
accumulate, the gradients of earlier micro-batches exist before the traced micro-batch begins, as in
any later step.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autofit.core.config import Config
from autofit.core.errors import AutofitError, RefusedError, UntraceableError, describe_error
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import has_rows, map_tensors, samples_of, split, tensors
from autofit.estimate.between_steps import events_between_steps
from autofit.estimate.block_marks import (
    mark_block,
    mark_without_gradients,
    models_of_one_depth,
    without_gradients,
)
from autofit.estimate.earlier_micro_batches import (
    Turn,
    after_forwards,
    averages_last,
    leave_own_gradients,
)
from autofit.estimate.fake_device import fake_device
from autofit.estimate.fake_ranks import asked_before, fake_ranks
from autofit.estimate.gradient_buckets import in_large_buckets
from autofit.estimate.known_values import know, on_real_tensors
from autofit.estimate.library_kernels import notes_of_recurrent
from autofit.estimate.operators import Calls
from autofit.estimate.recorder import Event, Recorder
from autofit.estimate.saved_activations import SavedTensors
from autofit.estimate.shallow_model import SampledChunks
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.stages import FollowedStage
from autofit.estimate.step_trace import Trace
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import streamable_weights
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import adapt, finish
from autofit.training.meta_model import materialize
from autofit.training.pipeline import Pipeline
from autofit.training.replay import has_representations
from autofit.training.step import accumulate, update

_MAKING = 0  # in place of the number of a storage


def allowed(config: Mapping[str, Any], workload: Workload, hardware: Hardware) -> Config:
    """The config in full.

    Raises:
        RefusedError: it is impossible, or not for this model.
    """
    canonical = canonicalize(config, workload, hardware)
    if reason := refuse(canonical, workload, hardware):
        raise RefusedError(reason)
    return canonical


def trace_skeleton(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    skeleton: Skeleton,
    *,
    calls: Calls | None = None,
    rows: int | None = None,
    whole_batch: int | None = None,
    between: bool = False,
    stage: FollowedStage | None = None,
    turn: Turn = Turn.LATER,
    micro_batches: int = 1,
) -> Trace:
    """Trace one step of a model, which is used up.

    Args:
        calls: the operators called in other traces, to add this one's to.
        rows: the trace is one to put others together from: note what activation_offload would move,
            and of a chunked loss trace two chunks of so many tokens.
        whole_batch: the samples that this device sees in a step, for losses that need all at once;
            default: as the workload says.
        between: follow an evaluation and a saving, too.
        stage: the skeleton has the blocks of this stage of a pipeline, and one in place of each
            row of others.
        turn: of the micro-batch, where gradients accumulate.
        micro_batches: that are followed, as a step goes through them.

    Raises:
        RefusedError: the config is impossible, or not for this model.
        UntraceableError: the model's code needs values.
    """
    canonical = allowed(config, workload, hardware)
    layout = Layout.of(canonical)
    recorder = Recorder(hardware)
    calls = calls or Calls()
    if skeleton.made_with:
        recorder.events += [Event(_MAKING, skeleton.made_with), Event(_MAKING, 0)]

    setup = fake_setup(workload, canonical, hardware, skeleton.model, recorder)
    chunks = None
    if rows:
        recorder.alike = setup.micro_batch_size
        chunks = SampledChunks(rows, recorder, canonical.loss)
    setup.tracing.slices = chunks
    setup.tracing.is_sampled = rows is not None or skeleton.depth is not None
    whole_batch = whole_batch or workload.effective_batch_size // layout.dp_degree
    if has_representations(workload.loss) and canonical.micro_batch_size != whole_batch:
        setup.tracing.whole_batch = whole_batch

    saved: SavedTensors | None = None
    ranks = ExitStack()
    try:
        # Blocks that a config compiles run as they are: the compiler would look into our modes.
        ranks.enter_context(torch.compiler.set_stance("force_eager"))
        number = stage.number if stage else 0
        setup.ranks = ranks.enter_context(fake_ranks(layout, recorder, number))
        setup.tracing.cuts = stage.cuts if stage else ()
        adapt(setup, traced=True)
        # First imported among fake tensors, it would keep fake ones.
        import_module(technique_named("optimizer").package(canonical.optimizer))

        with fake_device(hardware) as fake_mode, recorder:
            _build(setup, recorder, fake_mode)
            if hardware.device == "cpu":
                recorder.called = calls.note
            if rows:
                saved = SavedTensors(setup.model, recorder)
                setup.forward_contexts.append(saved.hooks)

            owners = _owners(setup)
            counted = without_gradients(setup, skeleton.depth if rows else None)
            packed, reached = _step(
                setup,
                recorder,
                fake_mode,
                owners,
                counted,
                turn=turn,
                followed=micro_batches,
            )
            followed = {}
            if between:
                make = partial(_batch, setup, recorder, fake_mode)
                followed = events_between_steps(setup, hardware, recorder, make)

        passed_bytes = 0 if setup.part is None else setup.part.passed_bytes
        # Closing the setup gives the model back.
        trainable = [parameter for _, parameter in setup.trainable() if parameter in reached]
        trained_model, *copies = models_of_one_depth(setup)
        streamable = streamable_weights(trained_model, setup.config)
        copied = [weight for model in copies for weight in streamable_weights(model, setup.config)]
    except (AutofitError, KeyboardInterrupt):
        raise
    # The model's own code, under conditions that it was not written for.
    except BaseException as error:
        operator = getattr(error, "func", None)
        why = f"{operator} needs numbers"
        if not operator:
            why = describe_error(error)
        message = (
            f"a training step of this model cannot be followed on tensors without values ({why})."
        )
        raise UntraceableError(message) from error
    finally:
        setup.close()
        ranks.close()

    shapes = [
        (shape_here(parameter), parameter.dtype, owners.get(parameter)) for parameter in trainable
    ]
    found = Trace(
        config=canonical,
        events=tuple(recorder.events),
        marks=tuple(recorder.marks),
        labels=recorder.labels,
        owners=recorder.owners,
        kin=recorder.kin,
        streams=recorder.streams,
        joined=recorder.joined,
        completed=recorder.completed,
        products=recorder.products,
        trained=frozenset(recorder.storages_of(trainable)),
        streamable=frozenset(recorder.storages_of(streamable)),
        copied=frozenset(recorder.storages_of(copied)),
        saved=saved.stays if saved else {},
        chunks=chunks.sizes if chunks else None,
        shapes=tuple(shapes),
        costs=tuple(recorder.costs),
        collectives=tuple(recorder.collectives),
        between=followed,
        calls=calls,
        depth=skeleton.depth,
        parameters=sum(parameter.numel() for parameter in trainable),
        passed_bytes=passed_bytes,
        packed=packed,
        assumptions=(
            *setup.tracing.assumptions,
            *recorder.assumptions,
            *notes_of_recurrent(setup.model, hardware),
        ),
    )
    if canonical.data_parallel == "ddp" and skeleton.depth and not rows:
        return in_large_buckets(found)
    return found


def fake_setup(
    workload: Workload, config: Config, hardware: Hardware, model: nn.Module, recorder: Recorder
) -> Setup:
    """The setup of a step that is recorded."""
    setup = Setup(workload, config, hardware, torch.device("cpu"), model, Hyperparameters())
    setup.tracing.note_host = recorder.note_host
    return setup


def _owners(setup: Setup) -> dict[nn.Parameter, int]:
    """The number of the block that a parameter belongs to."""
    owners = {}
    for model in models_of_one_depth(setup):
        for number, block in enumerate(repeated_blocks(model)):
            owners.update(dict.fromkeys(block.parameters(), number))
    return owners


def _build(setup: Setup, recorder: Recorder, fake_mode: Any) -> None:
    for model in setup.all_models():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = know(fake_mode.from_tensor(buffer), buffer)
        recorder.see(list(model.buffers()))  # they are there before any weight

    materialize(setup, values=False)
    _label_weights(setup, recorder)

    finish(setup, traced=True)
    if setup.config.fsdp_offload == "cpu" and setup.hardware.device == "cuda":
        recorder.note_host(list(setup.model.parameters()))
    _label_weights(setup, recorder)


def _label_weights(setup: Setup, recorder: Recorder) -> None:
    for model in setup.all_models():
        recorder.label([*model.parameters(), *model.buffers()], "parameters")
        recorder.label(_constants(model), "parameters")
    for model in models_of_one_depth(setup):
        for number, block in enumerate(repeated_blocks(model)):
            of_block = [*block.parameters(), *block.buffers(), *_constants(block)]
            recorder.label(of_block, "parameters", number)


def _constants(module: nn.Module) -> list[Any]:
    """What quantised weights need beside what is divided over ranks."""
    return [getattr(layer, "constants", []) for layer in module.modules()]


def _step(
    setup: Setup,
    recorder: Recorder,
    fake_mode: Any,
    owners: Mapping[nn.Parameter, int],
    counted: Sequence[tuple[nn.Module, int | None]],
    *,
    turn: Turn,
    followed: int,
) -> tuple[bool, set[nn.Parameter]]:
    """Record a step; whether its batch is packed, and the parameters that its backward reaches.

    Args:
        counted: blocks that run without gradients, and whether each stands for others: FROZEN.
        turn: of the micro-batch, where gradients accumulate.
        followed: how many micro-batches are.
    """
    blocks = repeated_blocks(setup.model)
    recorder.mark("state")
    reached: set[nn.Parameter] = set()
    made = _make_state(setup, recorder, owners)
    batch, *beside = _batch(setup, recorder, fake_mode, followed)
    trained: list[nn.Parameter] = []
    if not setup.stepped_in_backward:
        trained = [parameter for _, parameter in setup.trainable()]
    offloaded = setup.config.fsdp_offload == "cpu" and setup.hardware.device == "cuda"

    def label_gradient(parameter: nn.Parameter) -> None:
        if not offloaded:
            recorder.label(parameter.grad, "gradients", owners.get(parameter))
        elif parameter.grad is not None and not recorder.is_on_host(parameter.grad):
            parameter.grad = recorder.to_host(parameter.grad)

    # Gradients of earlier micro-batches that are views of something larger, by its storage, which
    # they keep. Autograd copies only those whose layout is not the parameter's (accumulate_grad.h).
    views: dict[int, dict[int, int]] = {}

    def note_view(earlier: torch.Tensor, gradient: torch.Tensor) -> None:
        nbytes = gradient.untyped_storage().nbytes()
        if nbytes > earlier.untyped_storage().nbytes() and _layout(gradient) == _layout(earlier):
            of_view, of_earlier = recorder.storages_of([gradient, earlier])
            shared = views.setdefault(of_view, {})
            shared[of_earlier] = 0 if shared else nbytes

    micro_batches = setup.config.gradient_accumulation_steps or 1
    accumulating = micro_batches > 1 and turn is not Turn.FIRST
    layout = setup.ranks.layout
    waits = accumulating and layout.dp_degree > 1 and averages_last(setup.config)
    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            is_last = number == len(blocks) - 1
            for handle in mark_block(block, number, setup, recorder, last=is_last):
                hooks.callback(handle.remove)

        if waits:
            leave_own_gradients(setup, batch, recorder)
            setup.ranks = asked_before(setup.ranks)
        if accumulating and not waits:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
                label_gradient(parameter)
                setup.value_of(parameter)
                made[parameter].update(recorder.storages_of(parameter.grad))
                hooks.callback(parameter.register_hook(partial(note_view, parameter.grad)).remove)

        for _, parameter in list(setup.trainable()):
            hooks.callback(parameter.register_post_accumulate_grad_hook(reached.add).remove)
        for parameter in trained:
            hooks.callback(parameter.register_post_accumulate_grad_hook(label_gradient).remove)
        for block, mark in counted:
            handle = mark_without_gradients(block, mark, setup, recorder)
            hooks.callback(handle.remove)

        if setup.part is not None:
            Pipeline(setup).prepare(batch)
            recorder.mark("state")
        recorder.phase = lambda: setup.progress.phase
        if turn is not Turn.LATER and followed == 1 and setup.config.data_parallel == "fsdp":
            # Those of all micro-batches, or none since another backward.
            forwards = 0 if turn is Turn.DRAIN else min(micro_batches, 2)
            hooks.enter_context(after_forwards(setup, forwards))
        loss = accumulate(setup, batch)

        unreached = made.keys() - reached
        for parameter in unreached:  # it would have neither gradient nor state
            parameter.grad = None
        recorder.resize({number: 0 for parameter in unreached for number in made[parameter]})
        for shared in views.values():
            recorder.resize(shared)

        update(setup)
        del loss  # which a step returns
        recorder.phase = None
        recorder.mark("end")
    return bool(beside), reached


def shape_here(parameter: nn.Parameter) -> torch.Size:
    """The shape of this rank's part."""
    data = parameter.data
    if isinstance(data, DTensor):
        data = data.to_local()
    return data.shape


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides of dims of more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _make_state(
    setup: Setup, recorder: Recorder, owners: Mapping[nn.Parameter, int]
) -> dict[nn.Parameter, set[int]]:
    """Let the optimizer make its state, as in a first step; returns the storages of gradients and
    state."""
    made: dict[nn.Parameter, set[int]] = {}
    for group in setup.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
            made[parameter] = set(recorder.storages_of(parameter.grad))
            setup.value_of(parameter)  # gradients that rest on the host leave the device

    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    setup.trained_values()  # weights that rest on the host leave the device again

    states: dict[Any, dict[str, Any]] = setup.optimizer.state
    for parameter, state in states.items():
        recorder.label(list(state.values()), "optimizer", owners.get(parameter))
        made[parameter].update(recorder.storages_of(list(state.values())))
    return made


def _batch(setup: Setup, recorder: Recorder, fake_mode: Any, followed: int = 1) -> list[Any]:
    """A micro-batch on the device, or so many; on a CPU the rest of the batch is in the same memory.

    Of a packed batch also the whole and the other micro-batches, which may be copies.
    """
    of_rank = setup.workload.effective_batch_size // setup.ranks.layout.dp_degree
    several = followed * setup.micro_batch_size
    samples = several
    if setup.hardware.device == "cpu":
        samples = of_rank
    with on_real_tensors():
        real = setup.workload.batch(samples)
    whole = map_tensors(real, lambda tensor: know(fake_mode.from_tensor(tensor), tensor))
    recorder.label(list(tensors(whole)), "inputs")
    if has_rows(whole, setup.workload.split):
        return [samples_of(whole, 0, min(several, samples))]

    parts = list(split(whole, several, setup.workload.split))
    recorder.label(list(tensors(parts)), "inputs")
    return [*parts, whole]
