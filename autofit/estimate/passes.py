"""A forward and backward of the whole model, put together from segments: memory and seconds at each
pair of a grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.knobs.reference import OFFLOADED
from autofit.core.layout import Layout
from autofit.estimate.layouts import Exchanges
from autofit.estimate.overlap import Unit, micro_batch, one_after_another
from autofit.estimate.roofline import LAUNCHES_OF_COPY, Speed, passes_of
from autofit.estimate.scaling import Floats
from autofit.estimate.schedules import Schedule, run_schedule
from autofit.estimate.segments import Repeats, Segment, Segments
from autofit.setup.saved_tensors import WINDOW
from autofit.setup.streamed_blocks import updated_on

# By the id of a segment, the seconds that the device works and that the host launches.
Computing = Mapping[int, tuple[Floats, Floats]]
# The same by all that they depend on: the id of a segment, tf32, compiling, and how often a
# dispatch mode is passed.
Computed = dict[tuple[int, bool, bool, int], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Pass:
    """A forward and backward, and what was computed of it already; `computed` also of others that
    share segments."""

    segments: Segments
    schedule: Schedule
    computed: Computed = field(default_factory=dict)
    _memory: dict[tuple[bool, ...], tuple[Floats, Floats]] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], Floats] = field(default_factory=dict)

    def memory(self, config: Config, *, added: bool) -> tuple[Floats, Floats]:
        """(the peak, what is alive at the end), without parameters and state; `added`: gradients
        are added to those of earlier micro-batches, or applied, as soon as they are there."""
        mode, resting = (added, config.activation_offload == "cpu"), rest_on_host(config)
        # by its weights or gradients
        leaves = config.parameter_offload == "cpu" and updated_on(config) is not None
        key = *mode, resting, leaves
        if key not in self._memory:
            before, leaving = (
                np.zeros_like(self.segments.parameters),
                leaves * self.segments.streamed_block,
            )
            self._memory[key] = run_schedule(
                self.schedule, mode, before, resting=resting, leaving=leaving
            )
        return self._memory[key]

    @cached_property
    def saved(self) -> tuple[Floats, Floats]:
        """(bytes that go to the host if saved tensors are offloaded, those of them that need not
        come back)."""
        total = newest = np.zeros_like(self.segments.parameters)
        for run, repeats in self.schedule:
            for segment in run:
                total = total + repeats * segment.saved
                newest = np.where(segment.newest > 0.0, segment.newest, newest)
        return total, np.minimum(total, np.maximum(newest, WINDOW))

    def seconds(
        self,
        speed: Speed,
        config: Config,
        exchanges: Exchanges,
        *,
        last: bool = False,
        adding: bool = False,
    ) -> Floats:
        """The seconds of a micro-batch, beside which bytes are copied to and from the host; `last`:
        of the last one of a step; `adding`: gradients that rest on the host come to be added to."""
        several, adding = exchanges.hardware.world > 1, adding and rest_on_host(config)
        offloaded = (
            config.activation_offload,
            config.parameter_offload,
            config.optimizer_offload,
            config.reference == OFFLOADED,
        )
        key = (
            speed.tf32,
            speed.compiled,
            offloaded,
            adding,
            several and (Layout.of(exchanges.config), last),
        )
        if key not in self._seconds:
            computing, copied = self._computing(speed, config), self._copied(config, adding)
            if several:
                moving = sum(copied.values()) / speed.rates.link
                self._seconds[key] = np.maximum(
                    self._of_several(computing, speed, exchanges, last), moving
                )
            else:
                self._seconds[key] = self._alone(
                    computing, speed, copied, self._copies(config, adding)
                )
        return self._seconds[key]

    def _copied(self, config: Config, adding: bool) -> dict[str, Floats]:
        """Bytes that go to or come from the host during each phase."""
        none = np.zeros_like(self.segments.parameters)
        moved, resident = self.saved if config.activation_offload == "cpu" else (none, none)
        streamed = self.segments.streamed if config.parameter_offload == "cpu" else none
        gradients = self.segments.gradients if config.optimizer_offload == "cpu" else none
        gradients = gradients + adding * streamed
        return {
            "forward": moved + streamed + self._of_copy(config, self.segments.copied),
            "backward": moved - resident + _ways(config) * streamed + gradients,
        }

    def _copies(self, config: Config, adding: bool) -> dict[str, Floats]:
        """How many copies those are."""
        moved: Floats = np.zeros_like(self.segments.parameters)
        if config.activation_offload == "cpu":
            moved = sum(
                (repeats * each.moved for run, repeats in self.schedule for each in run), moved
            )
        nbytes, resident = self.saved
        returned = moved * (1 - resident / np.maximum(nbytes, 1))  # as if all were equally large
        streamed = self.segments.streamed_weights if config.parameter_offload == "cpu" else 0
        gradients = sum(self.segments.shapes.values()) if config.optimizer_offload == "cpu" else 0
        gradients += adding * streamed
        return {
            "forward": moved + streamed + self._of_copy(config, self.segments.copied_weights),
            "backward": returned + _ways(config) * streamed + gradients,
        }

    def _of_copy(self, config: Config, amount: Floats | int) -> Floats | int:
        """What comes for the forward of a copy of the model that rests on the host."""
        return amount if config.reference == OFFLOADED else 0

    def _computing(self, speed: Speed, config: Config) -> Computing:
        found = {}
        for segment in (segment for run, _ in self.schedule for segment in run):
            passes = passes_of(config, segment.phase)
            key = id(segment), speed.tf32, speed.compiled, passes
            if key not in self.computed:
                self.computed[key] = _computing(segment, speed, passes)
            found[id(segment)] = self.computed[key]
        return found

    def _alone(
        self,
        computing: Computing,
        speed: Speed,
        copied: Mapping[str, Floats],
        copies: Mapping[str, Floats],
    ) -> Floats:
        """On one device, whose host may run ahead in one block and be late in another."""
        of_copy = LAUNCHES_OF_COPY * speed.rates.launch_seconds
        totals: dict[str, tuple[Floats, Floats]] = {
            phase: (0.0 * count, of_copy * count) for phase, count in copies.items()
        }
        for run, repeats in self.schedule:
            for segment in run:
                (working, launching), (more, launched) = (
                    totals[segment.phase],
                    computing[id(segment)],
                )
                totals[segment.phase] = working + repeats * more, launching + repeats * launched
        busy = {phase: _together(speed, *each) for phase, each in totals.items()}
        forward, backward = (
            np.maximum(busy[phase], nbytes / speed.rates.link) for phase, nbytes in copied.items()
        )
        return forward + backward

    def _of_several(
        self, computing: Computing, speed: Speed, exchanges: Exchanges, last: bool
    ) -> Floats:
        """Beside what its ranks exchange."""

        def unit(segment: Segment, times: Repeats) -> Unit:
            waited, gathered, reduced = (
                times * each for each in exchanges.seconds(segment, speed, last=last)
            )
            busy = times * _together(speed, *computing[id(segment)])
            return Unit(busy, waited, gathered, reduced)

        phases: dict[str, list[tuple[Sequence[Unit], int]]] = {"forward": [], "backward": []}
        for run, repeats in self.schedule:
            # chunks of a loss have a number at each pair
            rounds = repeats if isinstance(repeats, int) else 1
            times = 1 if isinstance(repeats, int) else repeats
            phases[run[0].phase].append(([unit(segment, times) for segment in run], rounds))
        together = micro_batch if speed.asynchronous else one_after_another
        seconds: Floats = np.zeros_like(self.segments.parameters) + together(
            phases["forward"], phases["backward"]
        )
        return seconds


def _computing(segment: Segment, speed: Speed, passes: int) -> tuple[Floats, Floats]:
    """The seconds that the device works for a segment, and that the host takes to launch that."""
    seconds = segment.work.seconds(speed, passes=passes)
    launching = seconds.pop("launch")
    return sum(seconds.values(), np.zeros_like(launching)), launching


def _together(speed: Speed, working: Floats, launching: Floats) -> Floats:
    return np.maximum(working, launching) if speed.asynchronous else working + launching


def rest_on_host(config: Config) -> bool:
    """Whether the gradients of streamed weights rest on the host, as these do."""
    return config.parameter_offload == "cpu" and updated_on(config) == "host"


def _ways(config: Config) -> int:
    """How often a backward copies streamed weights: to the device, and what it has updated back."""
    return 1 + (updated_on(config) == "device")
