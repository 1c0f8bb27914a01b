"""A forward and backward of the whole model, put together from segments: memory and seconds at each
pair of a grid."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.knobs.parameter_offload import blocks_streamed
from autofit.core.knobs.reference import OFFLOADED
from autofit.core.layout import Layout
from autofit.core.some_blocks import SomeBlocks, offloaded_of, offloads
from autofit.estimate.layouts import Exchanges
from autofit.estimate.overlap import Unit, micro_batch, one_after_another
from autofit.estimate.roofline import LAUNCHES_OF_COPY, Speed, passes_of
from autofit.estimate.scaling import Floats
from autofit.estimate.schedules import Place, Schedule, Shares, blocks_at, run_schedule
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
    """A forward and backward.

    Attributes:
        segments: of its trace.
        schedule: the segments in their order, those of blocks as often as the model has blocks.
        computed: seconds that are known already, also of other passes that share segments.
    """

    segments: Segments
    schedule: Schedule
    computed: Computed = field(default_factory=dict)
    _memory: dict[tuple[Any, ...], tuple[Floats, Floats]] = field(default_factory=dict)
    _saved: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], Floats] = field(default_factory=dict)

    def memory(self, config: Config, *, added: bool) -> tuple[Floats, Floats]:
        """(the peak, what is alive at the end) in bytes, without parameters and state.

        Args:
            added: gradients are added to those of earlier micro-batches, or applied, as soon as
                they are there.
        """
        rests = rest_on_host(config)
        # Of each streamed block either its weights or its gradients do.
        leaves = offloads(config.parameter_offload) and updated_on(config) is not None

        key = added, leaves, rests and config.parameter_offload, config.activation_offload
        if key not in self._memory:
            resting: Shares = {}
            if rests:
                streamed = blocks_streamed(config.parameter_offload, self._blocks)
                resting = self._shares(streamed)

            before = np.zeros_like(self.segments.parameters)
            self._memory[key] = run_schedule(
                self.schedule,
                before,
                added=added,
                offloaded=self.offloaded(config),
                resting=resting,
                leaving=leaves * self.segments.streamed_block,
            )

        return self._memory[key]

    @property
    def _blocks(self) -> int:
        """How many the model has; 0 where they are not told apart."""
        return self.segments.depth.whole if self.segments.depth else 0

    @cached_property
    def _blocks_at(self) -> dict[Place, range]:
        return blocks_at(self.schedule, self._blocks)

    def offloaded(self, config: Config) -> Shares:
        """Of which blocks a config sends to the host what they save."""
        value = config.activation_offload
        if SomeBlocks.of(value):
            return self._shares(range(offloaded_of(value, self._blocks)))
        if not offloads(value):
            return {}

        return {
            (at, number): 1.0
            for at, (run, _) in enumerate(self.schedule)
            for number in range(len(run))
        }

    def _shares(self, chosen: Collection[int]) -> Shares:
        """At each place, the share of the blocks there that are chosen."""
        return {
            place: sum(number in chosen for number in numbers) / len(numbers)
            for place, numbers in self._blocks_at.items()
        }

    def saved(self, config: Config) -> tuple[Floats, Floats]:
        """(bytes of saved tensors that go to the host, those of them that need not come back)."""
        value = config.activation_offload
        if value not in self._saved:
            self._saved[value] = self._saved_of(self.offloaded(config))
        return self._saved[value]

    def _saved_of(self, offloaded: Shares) -> tuple[Floats, Floats]:
        total = np.zeros_like(self.segments.parameters)
        newest = total
        for at, (run, repeats) in enumerate(self.schedule):
            for number, segment in enumerate(run):
                share = offloaded.get((at, number), 0.0)
                total = total + share * repeats * segment.saved
                newest = np.where(share * segment.newest > 0.0, segment.newest, newest)

        return total, np.minimum(total, np.maximum(newest, WINDOW))

    @cached_property
    def saved_everywhere(self) -> Floats:
        """Bytes of all large saved tensors."""
        total: Floats = np.zeros_like(self.segments.parameters)
        for run, repeats in self.schedule:
            for segment in run:
                total = total + repeats * segment.saved

        return total

    def seconds(
        self,
        speed: Speed,
        config: Config,
        exchanges: Exchanges,
        *,
        last: bool = False,
        adding: bool = False,
    ) -> Floats:
        """The seconds of a micro-batch, beside which bytes are copied to and from the host.

        Args:
            last: it is the last one of a step.
            adding: gradients that rest on the host come to be added to.
        """
        several = exchanges.hardware.world > 1
        adding = adding and rest_on_host(config)
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
        if key in self._seconds:
            return self._seconds[key]

        computing = self._computing(speed, config)
        copied = self._copied(config, adding)
        if several:
            moving = sum(copied.values()) / speed.rates.link
            seconds = np.maximum(
                self._of_several(computing, speed, exchanges, last),
                moving,
            )
        else:
            seconds = self._alone(
                computing,
                speed,
                copied,
                self._copies(config, adding),
            )

        self._seconds[key] = seconds

        return seconds

    def _copied(self, config: Config, adding: bool) -> dict[str, Floats]:
        """Bytes that go to or come from the host during each phase."""
        none = np.zeros_like(self.segments.parameters)
        moved, resident = self.saved(config)
        streamed = self.segments.streamed * share_streamed(config, self.segments)
        gradients = none
        if rest_on_host(config):
            gradients = self.segments.gradients

        gradients = gradients + adding * streamed

        return {
            "forward": moved + streamed + self._of_copy(config, self.segments.copied),
            "backward": moved - resident + _ways(config) * streamed + gradients,
        }

    def _copies(self, config: Config, adding: bool) -> dict[str, Floats]:
        """How many copies those are."""
        moved: Floats = np.zeros_like(self.segments.parameters)
        offloaded = self.offloaded(config)
        for at, (run, repeats) in enumerate(self.schedule):
            for number, segment in enumerate(run):
                share = offloaded.get((at, number), 0.0)
                moved = moved + share * repeats * segment.moved

        nbytes, resident = self.saved(config)
        returned = moved * (1 - resident / np.maximum(nbytes, 1))  # as if all were equally large

        share = share_streamed(config, self.segments)
        weights = self.segments.streamed_weights * share
        streamed = weights
        if config.quantization != "int8" and self.segments.depth:
            streamed = (self.segments.depth.whole - 2) * share  # blocks, of which each is one copy

        gradients = adding * weights
        if rest_on_host(config):
            gradients += sum(self.segments.shapes.values())

        return {
            "forward": moved + streamed + self._of_copy(config, self.segments.copied_weights),
            "backward": returned + _ways(config) * streamed + gradients,
        }

    def _of_copy(self, config: Config, amount: Floats | int) -> Floats | int:
        """What comes for the forward of a copy of the model that rests on the host."""
        if config.reference == OFFLOADED:
            return amount
        return 0

    def _computing(self, speed: Speed, config: Config) -> Computing:
        found = {}
        for run, _ in self.schedule:
            for segment in run:
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
        working: dict[str, Floats] = {}
        launching: dict[str, Floats] = {}
        for phase, count in copies.items():
            working[phase] = 0.0 * count
            launching[phase] = of_copy * count

        for run, repeats in self.schedule:
            for segment in run:
                works, launches = computing[id(segment)]
                working[segment.phase] = working[segment.phase] + repeats * works
                launching[segment.phase] = launching[segment.phase] + repeats * launches

        phases = []
        for phase, nbytes in copied.items():
            busy = _together(speed, working[phase], launching[phase])
            phases.append(np.maximum(busy, nbytes / speed.rates.link))

        forward, backward = phases

        return forward + backward

    def _of_several(
        self,
        computing: Computing,
        speed: Speed,
        exchanges: Exchanges,
        last: bool,
    ) -> Floats:
        """Beside what its ranks exchange."""

        def unit(segment: Segment, times: Repeats) -> Unit:
            waited, gathered, reduced = exchanges.seconds(segment, speed, last=last)
            busy = _together(speed, *computing[id(segment)])

            return Unit(
                times * busy,
                times * waited,
                times * gathered,
                times * reduced,
            )

        phases: dict[str, list[tuple[Sequence[Unit], int]]] = {"forward": [], "backward": []}
        for run, repeats in self.schedule:
            rounds = 1
            times: Repeats = 1
            if isinstance(repeats, int):
                rounds = repeats
            else:  # chunks of a loss, which have another number at each pair
                times = repeats

            units = [unit(segment, times) for segment in run]
            phases[run[0].phase].append((units, rounds))

        together = micro_batch if speed.asynchronous else one_after_another
        of_all = together(phases["forward"], phases["backward"])
        seconds: Floats = np.zeros_like(self.segments.parameters) + of_all

        return seconds


def _computing(segment: Segment, speed: Speed, passes: int) -> tuple[Floats, Floats]:
    """The seconds that the device works for a segment, and that the host takes to launch that."""
    seconds = segment.work.seconds(speed, passes=passes)
    launching = seconds.pop("launch")

    return sum(seconds.values(), np.zeros_like(launching)), launching


def _together(speed: Speed, working: Floats, launching: Floats) -> Floats:
    """Seconds of a device that works while its host launches, or of one that does both."""
    if speed.asynchronous:
        return np.maximum(working, launching)
    return working + launching


def rest_on_host(config: Config) -> bool:
    """Whether the gradients of streamed weights rest on the host, as these do."""
    return offloads(config.parameter_offload) and updated_on(config) == "host"


def share_streamed(config: Config, segments: Segments) -> float:
    """How much of `segments.streamed` is on the host at any time: two blocks never are."""
    whole = segments.depth.whole if segments.depth else 0
    number = offloaded_of(config.parameter_offload, whole)
    return max(0, number - 2) / max(1, whole - 2)


def _ways(config: Config) -> int:
    """How often a backward copies streamed weights: to the device, and what it has updated back."""
    return 1 + (updated_on(config) == "device")
