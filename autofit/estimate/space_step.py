"""A step of one config at each pair of a grid, put together from its pass and what its optimizer
costs."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.knobs.reference import OFFLOADED
from autofit.core.layout import Layout
from autofit.core.some_blocks import offloaded_of, offloads
from autofit.core.workload import Workload
from autofit.estimate.layouts import Exchanges
from autofit.estimate.passes import Pass, rest_on_host, share_streamed
from autofit.estimate.rates import Rates
from autofit.estimate.roofline import Speed
from autofit.estimate.scaling import Floats, Grid
from autofit.estimate.segments import Segments
from autofit.setup.saved_tensors import WINDOW


class Step(NamedTuple):
    """One group of configs at each pair of the grid.

    Attributes:
        accumulating: bytes of a step of several micro-batches, whose gradients are added up.
        at_once: bytes of a step of one micro-batch.
        micro: seconds of a micro-batch.
        update: seconds of the optimizer's update.
        adding: seconds of adding a micro-batch's gradients to those of earlier ones.
        on_host: bytes that the host holds.
    """

    accumulating: Floats
    at_once: Floats
    micro: Floats
    update: Floats
    adding: Floats
    on_host: Floats


class OptimizerRow(NamedTuple):
    """What an optimizer costs at each pair of the grid: bytes, and seconds of an update."""

    weights: Floats
    state: Floats
    paged: Floats
    temporary: Floats
    largest: Floats
    moved: Floats
    seconds: Floats


@dataclass(frozen=True)
class Where:
    """What is trained on what, at which pairs.

    Attributes:
        made_with: bytes that making the model takes, where it is made in the same memory.
    """

    workload: Workload
    hardware: Hardware
    rates: Rates
    grid: Grid
    made_with: int


def combined(
    where: Where,
    config: Config,
    step_pass: Pass,
    optimizer: OptimizerRow,
    *,
    recomputed: float,
    exchanges: Exchanges,
) -> Step:
    """A step.

    Args:
        recomputed: the share of its activations that compiled code recomputes.
    """
    segments = step_pass.segments
    layout = Layout.of(exchanges.config)
    on_host = _stepped_on_host(config, segments)

    # What is there during the whole step.
    held = segments.parameters + segments.others + (1 - on_host) * optimizer.state
    if where.hardware.device == "cpu":  # the rest of the batch is in the same memory
        of_rank = where.workload.effective_batch_size / layout.dp_degree
        held = held + segments.inputs * (of_rank / where.grid.samples - 1)

    held = held - segments.streamed * share_streamed(config, segments)
    if config.reference == OFFLOADED:
        held = held - segments.copied

    buckets = config.data_parallel == "ddp"  # gradients are in them at last, and nowhere else
    held = held + buckets * segments.gradients

    # The peaks of a forward and backward.
    saved = step_pass.saved_everywhere
    first, left = step_pass.memory(config, added=False)
    added, _ = step_pass.memory(config, added=True)
    first = first - recomputed * saved
    added = added - recomputed * saved
    moved, _ = step_pass.saved(config)
    window = np.minimum(WINDOW, moved)

    # Gradients after a backward, and those of earlier micro-batches during one.
    gradients = segments.gradients
    earlier = segments.gradients
    rests = rest_on_host(config)

    if rests:  # those of blocks, which are there two blocks at a time
        if segments.depth:
            blocks = offloaded_of(config.parameter_offload, segments.depth.whole)
            gradients = gradients - segments.streamed_block * blocks

        earlier = gradients + 2 * segments.streamed_block

    update = held + np.maximum(left, 0.0 * left if buckets else gradients) + optimizer.temporary
    at_once = np.maximum(held + first + window, update)
    if config.optimizer_in_backward:
        at_once = held + added + optimizer.largest + window

    # Before the last micro-batch, adapters' gradients are not divided yet.
    whole = 1
    if config.lora_rank:
        whole = layout.shard * layout.context

    accumulating = np.maximum(held + whole * earlier + added + window, update)

    speed = Speed.of(where.rates, where.hardware, config)
    micro = step_pass.seconds(speed, config, exchanges)
    last = step_pass.seconds(speed, config, exchanges, last=True)
    updating = optimizer.seconds
    if on_host:  # its own traffic, and weights come back; gradients go there first
        go = gradients * (offloads(config.optimizer_offload) and not rests)
        there = on_host * (optimizer.moved + gradients + go) / where.rates.link
        updating = np.maximum(there, (1 - on_host) * optimizer.seconds)

    # Both are read, the sum is written.
    adding = 3 * (segments.gradients / where.rates.bandwidth)
    if config.fsdp_offload == "cpu":  # gradients are on the host, too
        adding = 3 * (optimizer.weights / where.rates.link)
    if rests:
        more = step_pass.seconds(speed, config, exchanges, adding=True) - micro
        adding = adding + more

    return Step(
        accumulating=np.maximum(accumulating, where.made_with),
        at_once=np.maximum(at_once, where.made_with),
        micro=micro,
        update=updating + last - micro,
        adding=adding,
        on_host=where.hardware.devices * _on_host(config, step_pass, optimizer),
    )


def _on_host(config: Config, step_pass: Pass, optimizer: OptimizerRow) -> Floats:
    """Bytes that the host holds for one device."""
    segments = step_pass.segments
    # Copies of weights, and their gradients.
    stepped = 2 * optimizer.weights + optimizer.state
    total = optimizer.paged + _stepped_on_host(config, segments) * stepped

    blocks = 0
    if segments.depth and not rest_on_host(config):
        blocks = offloaded_of(config.parameter_offload, segments.depth.whole)
    if blocks:
        # While a block is put together its weights are there twice.
        blocks += config.quantization != "int8"
        total = total + segments.streamed_block * blocks

    if config.reference == OFFLOADED and segments.depth:
        whole = segments.depth.whole
        total = total + segments.copied * ((whole + 1) / (whole - 2))

    moved, _ = step_pass.saved(config)

    return total + moved


def _stepped_on_host(config: Config, segments: Segments) -> float:
    """The share of the trained weights that the host updates."""
    if "cpu" in (config.optimizer_offload, config.fsdp_offload):
        return 1.0
    if segments.depth is None or not offloads(config.optimizer_offload):
        return 0.0

    elements = Counter[bool]()
    for (shape, _, in_block), count in segments.shapes.items():
        elements[in_block] += count * math.prod(shape)

    blocks = segments.depth.whole
    number = offloaded_of(config.optimizer_offload, blocks)
    return number / blocks * elements[True] / max(elements.total(), 1)
