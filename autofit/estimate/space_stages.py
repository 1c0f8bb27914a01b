"""The stages of pipelines in predictions of a whole space: parts of a step on one device.

The segments of a model's blocks, embedding and head are those of a config without stages; a stage
has some of them, and what it holds is counted by its share of the weights.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from autofit.core.config import Config
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.knobs import KNOBS
from autofit.core.layout import Layout, chunks_of
from autofit.core.workload import Workload
from autofit.estimate.optimizer_state import Kind, Shapes
from autofit.estimate.passes import Pass
from autofit.estimate.recorder import Recorder
from autofit.estimate.scaling import Floats
from autofit.estimate.schedules import Schedule, run_schedule
from autofit.estimate.segments import Segment, Segments
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import fake_setup
from autofit.estimate.trace_keys import pass_of
from autofit.training.pipeline_cut import StagePlan, plan_of_stages

_WIDE = ("fp32", "tf32")  # what is computed in 32 bits
_GRADIENT_BUFFERS = 2


class StagePlans:
    """How a model is cut for each config of a space: the model is looked at once for a number of
    stages."""

    def __init__(self, workload: Workload, hardware: Hardware) -> None:
        self._workload = workload
        self._hardware = hardware
        self._by_count: dict[int, StagePlan | None] = {}  # of some config
        self._known: dict[tuple[Any, ...], StagePlan] = {}

    def of(self, config: Config) -> StagePlan | None:
        """The plan; None where a config has no stages, or the model cannot be cut."""
        stages = Layout.of(config).pipeline
        if stages == 1:
            return None

        if stages not in self._by_count:
            self._by_count[stages] = self._some(config)
        plan = self._by_count[stages]
        if plan is None:
            return None

        key = (stages, config.pipeline_schedule, pass_of(config))
        if key not in self._known:
            self._known[key] = plan.of(config)
        return self._known[key]

    def _some(self, config: Config) -> StagePlan | None:
        skeleton = Skeleton.whole(self._workload, self._hardware)
        setup = fake_setup(
            self._workload,
            config,
            self._hardware,
            skeleton.model,
            Recorder(self._hardware),
        )
        with contextlib.suppress(RefusedError):
            return plan_of_stages(setup)
        return None


def without_stages(config: Config) -> Config:
    """The config of the devices that hold one stage, as if that were the whole model."""
    layout = Layout.of(config)
    if layout.pipeline == 1:
        return config
    if layout.stage_world == 1:
        alone = {name: None for name, knob in KNOBS.items() if knob.of_devices and name in config}
        return config.replace(**alone)

    return config.replace(pipeline_parallel=1, pipeline_schedule=None)


@dataclass(frozen=True)
class StageOfSpace:
    """One stage, at each pair of a grid.

    Attributes:
        whole: a forward and backward of the whole model.
        base: the config without stages.
        number: of the stage, from 0.
    """

    whole: Pass
    base: Config
    plan: StagePlan
    number: int

    @property
    def count(self) -> int:
        """The number of stages."""
        return self.plan.sizes.count

    @cached_property
    def blocks(self) -> list[int]:
        """The numbers of this stage's blocks."""
        return [
            block
            for chunk, (start, stop) in enumerate(pairwise(self.plan.cuts))
            if chunk % self.count == self.number
            for block in range(start, stop)
        ]

    @property
    def is_last(self) -> bool:
        """Whether it has the loss."""
        return self.number == self.count - 1

    @cached_property
    def own(self) -> Pass | None:
        """The forward and backward of this stage; None where blocks are not told apart."""
        forward = [item for item in self.whole.schedule if item[0][0].phase == "forward"]
        backward = self.whole.schedule[len(forward) :]
        ahead, blocks, behind = _around_blocks(forward)
        back_ahead, back_blocks, back_behind = _around_blocks(backward)
        whole = self.plan.cuts[-1]
        if len(blocks) != whole or len(back_blocks) != whole:
            return None

        schedule: Schedule = []
        if self.number == 0:
            schedule += ahead

        schedule += _in_runs(blocks[number] for number in self.blocks)
        if self.is_last:
            schedule += [*behind, *back_ahead]

        schedule += _in_runs(back_blocks[whole - 1 - number] for number in reversed(self.blocks))
        if self.number == 0:
            schedule += back_behind

        return Pass(
            self._segments,
            schedule,
            self.whole.computed,
        )

    @cached_property
    def _segments(self) -> Segments:
        """What this stage holds."""
        segments = self.whole.segments
        share = len(self.blocks) / self.plan.cuts[-1]

        shapes = self._shapes(share)
        trained = _elements(shapes) / max(_elements(segments.shapes), 1)
        shards = Layout.of(self.base).shard
        of_all = self._bytes_outside(None) / shards
        of_stage = self._bytes_outside(self.number) / shards
        parameters = (segments.parameters - of_all) * share + of_stage

        depth = segments.depth
        if depth is not None:
            depth = replace(depth, whole=len(self.blocks))

        return replace(
            segments,
            depth=depth,
            shapes=shapes,
            parameters=parameters,
            gradients=segments.gradients * trained,
            streamed=segments.streamed * share,
            streamed_weights=round(segments.streamed_weights * share),
        )

    def _shapes(self, share: float) -> Counter[Kind]:
        """How many trained weights of each kind this stage has."""
        held = Counter(tuple(weight.shape) for weight, stage in self._places(self.number))
        of_all = Counter(tuple(weight.shape) for weight, _ in self._places(None))

        shapes: Counter[Kind] = Counter()
        for kind, count in self.whole.segments.shapes.items():
            shape, _, in_block = kind
            if in_block:
                shapes[kind] = max(1, round(count * share))
            elif tuple(shape) in of_all:
                shapes[kind] = min(count, held[tuple(shape)])
            else:  # shards of weights
                part = self._bytes_outside(self.number) / self._bytes_outside(None)
                shapes[kind] = math.ceil(count * part)

        return Counter({kind: count for kind, count in shapes.items() if count})

    def _places(self, stage: int | None) -> Iterator[tuple[nn.Parameter, int]]:
        """The weights outside blocks, of one stage or of all, each once."""
        seen = set()
        for weight, held_by in self.plan.outside:
            if stage in (None, held_by) and weight not in seen:
                seen.add(weight)
                yield weight, held_by

    def _bytes_outside(self, stage: int | None) -> int:
        weights = [weight for weight, _ in self._places(stage)]
        return self.width * sum(weight.numel() for weight in weights)

    @property
    def width(self) -> int:
        """The bytes of a number outside blocks, and of what is passed on."""
        precision = self.base.precision
        if precision in _WIDE:
            return 4

        is_trained = not self.base.lora_rank and precision.endswith("-mixed")

        return 4 if is_trained and self.base.data_parallel != "fsdp" else 2

    def beside(self, config: Config, samples: Floats, micro_batches: Floats) -> Floats:
        """Bytes that other micro-batches hold that are under way, and of buffers."""
        assert self.own is not None, "it is of a stage"
        forward = [item for item in self.own.schedule if item[0][0].phase == "forward"]
        _, held = run_schedule(
            forward,
            np.zeros_like(samples),
            offloaded=self.own.offloaded(config),
            resting={},
        )

        chunks = chunks_of(config)
        most = np.inf
        if config.pipeline_schedule == "1f1b":
            most = self.count - self.number
        elif chunks > 1:  # of which each holds a part of a micro-batch
            most = (chunks * self.count + self.count - 1 - 2 * self.number) / chunks

        under_way = np.minimum(micro_batches, most)
        passed = self.plan.sizes.passed * samples * self.width
        received = under_way * (chunks - (self.number == 0))
        sent = (_GRADIENT_BUFFERS + 1) * (not self.is_last)

        return (under_way - 1) * held + (received + sent) * passed


def _around_blocks(schedule: Schedule) -> tuple[Schedule, list[Segment], Schedule]:
    """What comes before the blocks, each block, and what comes behind them."""
    blocks: list[Segment] = []
    ahead: Schedule = []
    behind: Schedule = []
    for run, repeats in schedule:
        if not any(segment.of_block for segment in run):
            (behind if blocks else ahead).append((run, repeats))
            continue

        assert isinstance(repeats, int), "chunks are no blocks"
        for _ in range(repeats):
            for segment in run:
                if segment.of_block:
                    blocks.append(segment)
                else:
                    (behind if blocks else ahead).append(([segment], 1))

    return ahead, blocks, behind


def _in_runs(blocks: Iterable[Segment]) -> Schedule:
    """Blocks one after the other, equal ones in a row together."""
    schedule: Schedule = []
    for block in blocks:
        if schedule and schedule[-1][0][0] is block:
            run, repeats = schedule.pop()
            assert isinstance(repeats, int), "of blocks"
            schedule.append((run, repeats + 1))
        else:
            schedule.append(([block], 1))

    return schedule


def _elements(shapes: Shapes) -> int:
    """How many numbers weights have."""
    return sum(count * math.prod(shape) for (shape, _, _), count in shapes.items())
