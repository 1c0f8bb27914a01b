"""The whole space at once: a few shallow traces, put together for any number of Configs.

What a block does depends on the number formats, the adapters, the quantisation, the attention and whether it is
checkpointed; what the head does, on the loss; the optimizer needs the weights' shapes alone. So each is traced once,
with primes for the micro-batch and the LoRA rank, and every Config is arithmetic on the pieces.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.data.batch import tensors
from autofit.estimate.compiled import computed_again
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.operators import MEASURING_SECONDS, Calls
from autofit.estimate.optimizer_state import OptimizerCost, OptimizerCosts, OptimizerRow, scaled_shapes
from autofit.estimate.prediction_cache import keep_figures, key_of, read
from autofit.estimate.processes import Each, apart, spread
from autofit.estimate.rates import UNKNOWN, Rates, rates_for
from autofit.estimate.roofline import Speed, passes_of
from autofit.estimate.scaling import Floats, Grid, Symbols
from autofit.estimate.segments import (
    ADDED,
    ADDED_AWAY,
    FIRST,
    FIRST_AWAY,
    Pieces,
    Row,
    alternating,
    as_traced,
    cut_into_pieces,
    run_through,
    with_head,
)
from autofit.estimate.trace import Skeleton, trace
from autofit.estimate.trace_keys import BUDGET, ends_of, group_key, group_of, of_pass, other_keys, plain_key
from autofit.setup.saved_tensors import WINDOW
from autofit.training.meta_model import meta_model_from


@dataclass(frozen=True)
class Rough:
    """What is predicted of configs, in their order: bytes of tensors, and seconds of an optimizer step.

    NaN where nothing can be predicted.
    """

    allocated: Floats
    seconds: Floats


@dataclass(frozen=True)
class _Step:
    """Of one group of configs at each pair of the grid: bytes with and without accumulated gradients; seconds of a
    micro-batch, of the update, and of adding a micro-batch's gradients to those of earlier ones."""

    accumulating: Floats
    at_once: Floats
    micro: Floats
    update: Floats
    adding: Floats


def predict_all(
    workload: Workload,
    hardware: Hardware,
    configs: Sequence[Config],
    *,
    measuring: float = MEASURING_SECONDS,
    processes: int | None = 1,
) -> tuple[list[float], list[float]]:
    """Bytes of tensors and seconds of a step for each config, NaN where nothing can be predicted.

    Kept on disk: for the same workload, device, configs and versions they are read again.

    Args:
        measuring: seconds for calling operators for real, where the device is the one at hand.
        processes: how many trace at once, None: one a core; one where this process must not be forked (see `spread`).

    Raises:
        UntraceableError: the model cannot be followed.
    """
    # Measured elsewhere where this process is still to be forked: products of matrices start threads.
    rates = (rates_for(hardware) if processes == 1 else apart(lambda: rates_for(hardware))) or UNKNOWN
    key = key_of(workload, hardware, rates, configs)
    known = read(key) if key else None
    if known is None:
        rough = SpaceEstimator(workload, hardware, rates, configs, measuring=measuring, processes=processes).predict()
        known = (rough.allocated + workspace_bytes(hardware)).tolist(), rough.seconds.tolist()
        if key:
            keep_figures(key, *known)
    return known


@dataclass(frozen=True)
class _Pass:
    """A forward and backward put together from pieces, and what was computed of it already."""

    pieces: Pieces
    row: Row
    memory: dict[str, tuple[Floats, Floats]]
    seconds: dict[tuple[bool, bool], Floats]

    def run(self, way: str) -> tuple[Floats, Floats]:
        """(the most that was alive, what is alive in the end), parameters and state not counted."""
        if way not in self.memory:
            self.memory[way] = run_through(self.row, way, np.zeros_like(self.pieces.parameters))
        return self.memory[way]

    @cached_property
    def saved(self) -> tuple[Floats, Floats]:
        """(bytes that go to the host where saved tensors wait there, those of them that need not come back)."""
        total = newest = np.zeros_like(self.pieces.parameters)
        for run, repeats in self.row:
            for piece in run:
                total = total + repeats * piece.saved
                newest = np.where(piece.newest > 0.0, piece.newest, newest)
        return total, np.minimum(total, np.maximum(newest, WINDOW))

    def times(self, speed: Speed, config: Config) -> Floats:
        """Seconds of the operators."""
        key = (speed.tf32, speed.compiled)
        if key not in self.seconds:
            busy = np.zeros_like(self.pieces.parameters)
            for run, repeats in self.row:
                for piece in run:
                    passes = passes_of(config, piece.phase)
                    busy = busy + repeats * sum(piece.work.seconds(speed, passes=passes).values())
            self.seconds[key] = busy
        return self.seconds[key]


class SpaceEstimator:
    """Predicts many Configs of one workload on one device, for the micro-batches and ranks that these have.

    Args:
        rates: how fast the device is.
        measuring: seconds for calling operators for real, where the rates were measured here.
        processes: how many trace at once, None: one a core; one where this process must not be forked (see `spread`).
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        rates: Rates,
        configs: Sequence[Config],
        *,
        measuring: float = MEASURING_SECONDS,
        processes: int | None = 1,
    ) -> None:
        self._workload, self._hardware, self._rates = workload, hardware, rates
        self._configs, self._measuring, self._processes = configs, measuring, processes
        samples = sorted({int(config["micro_batch_size"] or 1) for config in configs})
        ranks = sorted({int(config["lora_rank"] or 0) for config in configs})
        self._grid = Grid.of(samples, ranks)
        self._places = {pair: place for place, pair in enumerate((b, r) for b in samples for r in ranks)}
        self._symbols = Symbols.for_sizes(_sizes(workload))
        self._small = dataclasses.replace(workload, effective_batch_size=self._symbols.samples)
        self._skeletons: dict[bool, Skeleton] = {}
        self._pieces: dict[Config, Pieces | None] = {}
        self._calls = Calls(self._symbols) if rates.here and rates.operators is None else None
        self._optimizer_costs = OptimizerCosts(workload, hardware, self._calls)
        self._optimizers: dict[tuple[Any, int], OptimizerRow] = {}  # by value of the knob and id of the pieces
        self._updates: dict[OptimizerCost, float] = {}
        self._passes: dict[Config, _Pass | None] = {}

    @property
    def rates(self) -> Rates:
        """How fast the device is; after a prediction with what was measured for it."""
        return self._rates

    def predict(self) -> Rough:
        """Predict all of them."""
        allocated, seconds = np.full(len(self._configs), np.nan), np.full(len(self._configs), np.nan)
        keys = [group_key(config) for config in self._configs]
        groups = {key: group_of(config) for key, config in dict(zip(keys, self._configs, strict=True)).items()}
        self._trace_all(list(groups.values()))
        if self._calls:  # of all operators that were seen
            self._rates = dataclasses.replace(self._rates, operators=self._calls.measured(self._rates, self._measuring))
        steps = {key: self._step(group) for key, group in groups.items()}
        for number, (config, key) in enumerate(zip(self._configs, keys, strict=True)):
            step = steps[key]
            if step is None:
                continue
            place = self._places[int(config["micro_batch_size"] or 1), int(config["lora_rank"] or 0)]
            accumulation = int(config["gradient_accumulation_steps"] or 1)
            allocated[number] = (step.accumulating if accumulation > 1 else step.at_once)[place]
            seconds[number] = accumulation * step.micro[place] + step.update[place]
            seconds[number] += accumulation * step.adding[place] if accumulation > 1 else 0.0
        return Rough(allocated, seconds)

    def _trace_all(self, groups: Sequence[Config]) -> None:
        """Everything that has to be traced for these configs, on as many cores as there may be."""
        ends = [each for group in groups for each in ends_of(group)]
        passes = {of_pass(each): None for each in ends}
        for each in passes:
            self._skeleton(each)  # once, for all processes
        with spread(self._trace, self._processes) as trace_each:
            self._trace_these([plain_key(each, self._symbols) for each in passes], trace_each)
            self._trace_these([key for each in passes for key in self._keys(each)], trace_each)
        for each in ends:
            passed = self._passed(each)
            if passed:
                self._optimizer(each, passed.pieces)

    def _trace_these(
        self, keys: Sequence[Config], trace_each: Each[Config, tuple[Pieces | None, Calls | None]]
    ) -> None:
        missing = list(dict.fromkeys(key for key in keys if key not in self._pieces))
        for key, (pieces, calls) in zip(missing, trace_each(missing), strict=True):
            self._pieces[key] = pieces
            if self._calls and calls:
                self._calls.add(calls)

    def _step(self, config: Config) -> _Step | None:
        found = [(self._passed(each), each) for each in ends_of(config)]
        # Asked of the config itself: where it recomputes within a budget, no rule is known, though of its ends one is.
        again = computed_again(config, self._workload, self._hardware) or 0.0
        steps = [self._put_together(each, passed, again) for passed, each in found if passed]
        if len(steps) < len(found):
            return None
        if len(steps) == 1:
            return steps[0]
        share = float(str(config["activation_checkpointing"]).removeprefix(BUDGET))
        pairs = zip(*map(dataclasses.astuple, steps), strict=True)
        return _Step(*(full + share * (none - full) for full, none in pairs))

    def _passed(self, config: Config) -> _Pass | None:
        key = of_pass(config)
        if key not in self._passes:
            self._passes[key] = self._pass(key)
        return self._passes[key]

    def _pass(self, config: Config) -> _Pass | None:
        plain, found = self._pieces[plain_key(config, self._symbols)], [self._pieces[key] for key in self._keys(config)]
        known = [each for each in found if each]
        if len(known) < len(found):
            return None
        if plain is None or plain.depth is None:
            return _Pass(known[0], as_traced(known[0]), {}, {})
        head, *blocks = known
        row = alternating(*blocks) if len(blocks) == 2 else as_traced(blocks[0])
        return _Pass(plain, with_head(row, head), {}, {})

    def _keys(self, config: Config) -> tuple[Config, ...]:
        """What is traced for a pass beside its plain blocks, once those are."""
        plain = self._pieces[plain_key(config, self._symbols)]
        depth, by_flash = (plain.depth, plain.by_flash) if plain else (None, False)
        return other_keys(config, self._symbols, depth, by_flash=by_flash)

    def _trace(self, config: Config) -> tuple[Pieces | None, Calls | None]:
        """The pieces of a trace, and what operators were called with in it, if that matters."""
        calls = Calls(self._symbols) if self._calls else None
        try:
            skeleton = copy.deepcopy(self._skeleton(config))
            traced = trace(self._small, config, self._hardware, model=skeleton, calls=calls, rows=self._symbols.rows)
        except AutofitError:
            return None, calls
        return cut_into_pieces(traced, self._grid, self._symbols, self._hardware), calls

    def _skeleton(self, config: Config) -> Skeleton:
        alternating = config["activation_checkpointing"] == "alternate"
        if alternating not in self._skeletons:
            self._skeletons[alternating] = Skeleton.cut_short(self._workload, alternating=alternating)
        return self._skeletons[alternating]

    def _put_together(self, config: Config, passed: _Pass, again: float) -> _Step:
        """A step; `again`: the share of its activations that compiled code computes again."""
        pieces = passed.pieces
        away = config["activation_offload"] == "cpu"
        optimizer = self._optimizer(config, pieces)
        on_host = config["optimizer_offload"] == "cpu"
        held = pieces.parameters + pieces.others + (0.0 if on_host else optimizer.state)
        held = held - pieces.streamed if config["parameter_offload"] == "cpu" else held
        first, left = passed.run(FIRST_AWAY if away else FIRST)
        added, _ = passed.run(ADDED_AWAY if away else ADDED)
        first, added = first - again * passed.saved[0], added - again * passed.saved[0]
        window = np.minimum(WINDOW, passed.saved[0]) if away else 0.0
        update = held + pieces.gradients + np.maximum(left - pieces.gradients, 0.0) + optimizer.temporary
        stepped = held + added + optimizer.largest + window
        at_once = bool(config["optimizer_in_backward"])
        return _Step(
            accumulating=np.maximum(held + pieces.gradients + added + window, update),
            at_once=stepped if at_once else np.maximum(held + first + window, update),
            micro=self._micro_seconds(config, passed, away=away),
            update=self._update_seconds(pieces, optimizer, on_host=on_host),
            adding=3 * pieces.gradients / self._rates.bandwidth,  # both are read, the sum is written
        )

    def _micro_seconds(self, config: Config, passed: _Pass, *, away: bool) -> Floats:
        """Of forward and backward of one micro-batch; copies to and from the host run beside the computation."""
        tf32, compiled = config["precision"] == "tf32", config["compile"] != "none"
        busy = passed.times(self._speed(tf32=tf32, compiled=compiled), config)
        gone, stayed = passed.saved
        copied = 2 * gone - stayed if away else 0.0 * gone
        if config["parameter_offload"] == "cpu":
            copied = copied + 2 * passed.pieces.streamed
        if config["optimizer_offload"] == "cpu":
            copied = copied + passed.pieces.gradients
        return np.maximum(busy, copied / self._rates.link)

    def _update_seconds(self, pieces: Pieces, optimizer: OptimizerRow, *, on_host: bool) -> Floats:
        if on_host:  # the host's memory is read and written, and weights come back
            return (optimizer.moved + pieces.gradients) / self._rates.link
        return optimizer.seconds(self._speed(), self._updates)

    def _speed(self, **given: bool) -> Speed:
        return Speed(self._rates, asynchronous=self._hardware.device == "cuda", **given)

    def _optimizer(self, config: Config, pieces: Pieces) -> OptimizerRow:
        """What the optimizer costs at each pair of the grid."""
        of_pieces = (config["optimizer"], id(pieces))
        if of_pieces not in self._optimizers:
            shapes, prime = pieces.shapes, self._symbols.rank
            ranks = [int(rank) if config["lora_rank"] else 0 for rank in self._grid.ranks.tolist()]
            scaled = [scaled_shapes(shapes, prime, rank) if rank else shapes for rank in ranks]
            self._optimizers[of_pieces] = OptimizerRow([self._optimizer_costs.of(config, each) for each in scaled])
        return self._optimizers[of_pieces]


def _sizes(workload: Workload) -> set[int]:
    """Every size that the primes of a trace must not divide."""
    model = meta_model_from(workload.model)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {size for tensor in tensors(workload.batch(1)) for size in tensor.shape}
    return sizes | {workload.sequence_length or 1}
