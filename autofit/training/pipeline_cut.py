"""Cutting a model into the stages of a pipeline, each of which one device holds.

Before there are any weights, so that no device ever holds those of another stage; what the user
gave stays where it is, and gets the trained values at the end.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from autofit.core.config import Config
from autofit.core.errors import RefusedError, pluralize
from autofit.core.layout import Layout, chunks_of
from autofit.data.batch import few_samples, sample_count
from autofit.distributed.ranks import group_of_ends
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks
from autofit.setup.model_part import Absent, Elsewhere, EndHere, ModelPart, StageEnd, passed
from autofit.setup.sharding import LOW_FORMATS
from autofit.training import random_state
from autofit.training.loss import loss_and_count
from autofit.training.stage_cuts import StageSizes, Weight

USES_ABSENT = "uses weights on a stage that does not hold them"


def cut_into_stages(setup: Setup) -> None:
    """Take from the model what other stages of the pipeline hold.

    Raises:
        RefusedError: for a model that is no row of blocks which each pass on one tensor.
    """
    if setup.ranks.layout.pipeline == 1:
        return

    if dist.get_backend() == "fake" and not setup.tracing.cuts:
        raise RefusedError(
            "pipeline_parallel: one device cannot be measured in place of several stages, which "
            "wait for one another; measure on as many devices."
        )

    part, outside, used_before = _planned(setup)
    part.index = setup.ranks.stage_index
    if setup.tracing.cuts:
        part.cuts = _without_left_out(setup.tracing.cuts, part)
    else:
        sizes = StageSizes.of(setup.model, part, outside, used_before)
        part.cuts = sizes.cuts(setup.config)

    part.start = part.cuts[part.index]
    part.names = list(setup.model.state_dict())
    part.buffers = {name for name, _ in setup.model.named_buffers()}
    setup.part = part

    if not setup.weights.are_random and not setup.tracing.cuts:
        _share_values(setup)

    _take_away(setup, part, outside, used_before)
    setup.step_contexts.append(partial(_failing_alone, setup, part))


@dataclass(frozen=True)
class StagePlan:
    """How a model would be cut for a config.

    Attributes:
        cuts: the number of each stage's first block, and that of all blocks.
        outside: every place of a weight outside blocks, with the stage that holds it.
        sizes: what decides about the cuts.
    """

    cuts: tuple[int, ...]
    outside: tuple[tuple[nn.Parameter, int], ...]
    sizes: StageSizes

    def of(self, config: Config) -> Self:
        """The plan for another config of as many stages."""
        return replace(self, cuts=tuple(self.sizes.cuts(config)))


def plan_of_stages(setup: Setup) -> StagePlan:
    """How a model would be cut.

    Raises:
        RefusedError: as `cut_into_stages`.
    """
    part, outside, used_before = _planned(setup)
    places = []
    for module, _, weight in outside:
        places.append((weight, 0 if module in used_before else part.count - 1))

    sizes = StageSizes.of(setup.model, part, outside, used_before)

    return StagePlan(
        tuple(sizes.cuts(setup.config)),
        tuple(places),
        sizes,
    )


def _planned(setup: Setup) -> tuple[ModelPart, list[Weight], set[nn.Module]]:
    """The model in parts; its weights outside blocks, and the modules that use some before them."""
    stages = Layout.of(setup.config).pipeline
    blocks = _row_of_blocks(setup.model)
    outside = _weights_outside(setup.model, blocks)
    scalars = [weight for weight in setup.model.parameters() if not weight.dim()]
    if setup.config.data_parallel == "fsdp" and any(weight.requires_grad for weight in scalars):
        raise refusal(setup, "trains a weight of one number, which no device can divide")
    chunks = chunks_of(setup.config)
    if len(blocks) < stages * chunks and not setup.tracing.cuts:
        raise refusal(
            setup,
            f"has {pluralize(len(blocks), 'repeated block')}, fewer than {stages * chunks} to divide",
        )

    part = ModelPart(
        index=0,
        count=stages,
        blocks=blocks,
        whole=list(blocks),
        chunks=chunks,
    )

    return part, outside, _used_before_blocks(setup, part, outside)


def _without_left_out(cuts: Sequence[int], part: ModelPart) -> list[int]:
    """The cuts of a model of which blocks of the followed stage were left out."""
    left_out = cuts[-1] - len(part.whole)
    start = cuts[part.index]

    return [cut - left_out if cut > start else cut for cut in cuts]


def _row_of_blocks(model: nn.Module) -> Any:
    """The one list that holds all blocks.

    Raises RefusedError where there is none, or several, or blocks share weights.
    """
    blocks = repeated_blocks(model)
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and list(module) == blocks
    ]
    name = type(model).__name__

    if not blocks or not lists:
        raise RefusedError(
            f"pipeline_parallel: {name} is not one row of blocks, and was not tried in stages; use "
            "data_parallel: fsdp."
        )

    seen: set[nn.Parameter] = set()
    for module in (*blocks, None):
        own = set(module.parameters()) if module else _parameters_outside(model, blocks)
        if own & seen:
            raise RefusedError(
                f"pipeline_parallel: blocks of {name} share weights, which one device cannot hold "
                "for another; use data_parallel: fsdp."
            )

        seen |= own

    return lists[0]


def _parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    return {weight for _, _, weight in _weights_outside(model, blocks)}


def _weights_outside(model: nn.Module, blocks: Any) -> list[Weight]:
    """Every place of a weight outside blocks; tied weights have several."""
    inside = {module for block in blocks for module in block.modules()}
    return [
        (module, name, weight)
        for module in model.modules()
        if module not in inside
        for name, weight in module._parameters.items()
        if weight is not None
    ]


def refusal(setup: Setup, why: str) -> RefusedError:
    """Why a model cannot be cut, and what to use instead."""
    name = type(setup.model).__name__
    return RefusedError(f"pipeline_parallel: {name} {why}; use data_parallel: fsdp.")


class _Gives(nn.Module):
    """In place of the first block: passes on what it was given, as a tensor or in a tuple."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        self.given: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = passed(args, kwargs)
        return (self.given,) if self.in_tuple else self.given


def _used_before_blocks(setup: Setup, part: ModelPart, outside: list[Weight]) -> set[nn.Module]:
    """The modules outside blocks that a forward calls before it reaches the first one.

    Also notes how blocks give what they pass on. Both are found by a forward up to the second
    block, on the CPU, with zeros for weights.
    """
    batch = few_samples(setup.workload, 1)
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module))
        for module in dict.fromkeys(module for module, _, _ in outside)
    ]
    try:
        for in_tuple in (False, True):
            first = _Gives(in_tuple)
            called.clear()
            with _zeros_on_cpu(setup, outside), part.first_block_is(first, EndHere()):
                second = None
                # code that is given a tuple where it expects a tensor
                with suppress(TypeError, AttributeError) if in_tuple else nullcontext():
                    second = _reached(setup, batch)

            if second is not None and second is first.given:
                part.passed = second.numel() // sample_count(batch, setup.workload.split)
                part.in_tuple = in_tuple
                return set(called)
    finally:
        for hook in hooks:
            hook.remove()

    raise refusal(setup, "changes what one block passes on to the next")


def _reached(setup: Setup, batch: Any) -> Any:
    """What the block gets at which a forward ends."""
    try:
        with random_state.preserved(setup.device), torch.no_grad():
            loss_and_count(setup, batch)
    except StageEnd as end:
        return end.hidden

    raise refusal(setup, "calls its blocks in another order than it holds them")


@contextmanager
def _zeros_on_cpu(setup: Setup, outside: list[Weight]) -> Iterator[None]:
    """Zeros that take no memory in place of weights inside."""
    for module, name, weight in outside:
        dtype = setup.weights.dtype_of(weight)
        zeros = torch.zeros((), dtype=dtype, device="cpu").expand(weight.shape)
        module._parameters[name] = nn.Parameter(zeros, requires_grad=False)

    try:
        yield
    finally:
        for module, name, weight in outside:
            module._parameters[name] = weight


@torch.no_grad()
def _share_values(setup: Setup) -> None:
    """Give all ranks the first one's weights: each process may have drawn others."""
    for tensor in (*setup.model.parameters(), *setup.model.buffers()):
        values = tensor.detach().to(setup.device).contiguous()
        # As bytes: backends do not know every dtype.
        dist.broadcast(values.view(-1).view(torch.uint8), 0)
        tensor.copy_(values)


def _take_away(
    setup: Setup,
    part: ModelPart,
    outside: list[Weight],
    used_before: set[nn.Module],
) -> None:
    """Put stand-ins in place of what other stages hold, until the setup is closed."""
    for number, block in enumerate(part.whole):
        if not part.holds(number):
            part.blocks[number] = Elsewhere(number, block, part)

    name_of = {weight: name for name, weight in setup.model.named_parameters()}
    stages: dict[nn.Parameter, set[int]] = {}
    for module, name, weight in outside:
        is_before = module in used_before
        stage = 0 if is_before else part.count - 1
        part.outside.append((weight, stage))
        stages.setdefault(weight, set()).add(stage)
        if stage == part.index:
            continue

        zeros = None
        if is_before:
            zeros = torch.zeros(
                (),
                dtype=_dtype_seen(setup, weight),
                device=setup.device,
            )
            zeros = zeros.expand(weight.shape)

        del module._parameters[name]
        part.absent.append(Absent(module, name, weight, zeros))

    part.begin(None)

    tied = {weight for weight, of in stages.items() if len(of) > 1 and weight.requires_grad}
    if tied:
        group = group_of_ends(setup.ranks.layout)  # which all stages make
        if part.is_first or part.is_last:
            names = {weight: name_of[weight] for weight in tied}
            setup.when_built.append(partial(_note_tied, part, outside, names))
            setup.exchange.after_backward.append(partial(_add_up_tied, part, group))

    setup.on_close(partial(_put_back, setup, part))


def _dtype_seen(setup: Setup, weight: nn.Parameter) -> torch.dtype:
    """What a forward sees of a weight: FSDP gathers in low precision what it stores in 32 bits."""
    if setup.config.data_parallel == "fsdp" and weight.is_floating_point():
        gathered = LOW_FORMATS.get(setup.config.precision)
        if gathered is not None:
            return gathered

    return setup.weights.dtype_of(weight)


def _note_tied(part: ModelPart, outside: list[Weight], names: dict[nn.Parameter, str]) -> None:
    """Note the parameters that hold tied weights, now that there are any."""
    for module, name, weight in outside:
        parameter = module._parameters.get(name)
        if weight in names and parameter is not None:
            part.tied[parameter] = names[weight]


def _add_up_tied(part: ModelPart, group: Any) -> None:
    """Add the gradients of tied weights that the first stage found to those of the last one."""
    for parameter in part.tied:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)

        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        dist.all_reduce(local, group=group)


def _put_back(setup: Setup, part: ModelPart) -> None:
    """Make the model whole again; of what was trained every rank gets all values."""
    part.schedule = None
    for number, block in enumerate(part.whole):
        part.blocks[number] = block

    for absent in part.absent:
        delattr(absent.module, absent.name)
        absent.module._parameters[absent.name] = absent.weight

    if setup.weights.are_random:  # nobody needs them
        return
    if not part.is_together:  # all are as they were, or another stage does not answer
        return

    for chunk in range(part.all_chunks):
        for number in part.blocks_of(chunk):
            for weight in part.whole[number].parameters():
                _fetch(setup, weight, chunk % part.count)

    for weight, stage in part.outside:
        _fetch(setup, weight, stage)


def _fetch(setup: Setup, weight: nn.Parameter, stage: int) -> None:
    """Give the values of a trained weight from one stage to all others of the same samples."""
    if not weight.requires_grad:
        return

    assert setup.ranks.mesh is not None, "stages are on several devices"
    group = setup.ranks.mesh.get_group("pipeline")
    values = weight.data.to(setup.device)
    dist.broadcast(values, group=group, group_src=stage)
    weight.data = values


@contextmanager
def _failing_alone(setup: Setup, part: ModelPart) -> Iterator[None]:
    """Note a step that fails, in which other stages may wait for this one.

    Raises:
        RefusedError: where code used a weight that another stage holds.
    """
    try:
        yield
    except BaseException as error:
        part.is_together = False

        is_absent = re.search(r"\bmeta\b", str(error))
        if isinstance(error, RuntimeError | NotImplementedError) and is_absent:
            raise refusal(setup, USES_ABSENT) from error

        raise
