"""The whole space at once: a few shallow traces, combined for any number of Configs.

A block depends on number formats, adapters, quantisation, attention and checkpointing; the head on
the loss; the optimizer on the weights' shapes alone. So each is traced once, with primes for
micro-batch and LoRA rank, and every Config is arithmetic on their segments.
"""

import copy
import dataclasses
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.core.config import Config, Value
from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware
from autofit.core.knobs.activation_checkpointing import BUDGET
from autofit.core.layout import Layout, chunks_of
from autofit.core.workload import Workload
from autofit.data.batch import tensors
from autofit.distributed.collectives import seconds as collective_seconds
from autofit.estimate.derived_traces import derived_trace, segments_like
from autofit.estimate.layouts import Exchanges, have_few_shards, standing_for
from autofit.estimate.operators import MEASURING_SECONDS, Calls
from autofit.estimate.optimizer_state import (
    Kind,
    OptimizerCost,
    UpdateSteps,
    cost_of_update,
    scaled_shapes,
)
from autofit.estimate.passes import Computed, Pass
from autofit.estimate.peak import recomputed_share
from autofit.estimate.processes import Workers
from autofit.estimate.ranks import group_of as group_of_ranks
from autofit.estimate.rates import Rates
from autofit.estimate.roofline import Speed
from autofit.estimate.scaling import Floats, Grid, Symbols
from autofit.estimate.schedules import as_traced, mixed, with_head
from autofit.estimate.segments import Segments, segments_of
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import trace_skeleton
from autofit.estimate.space_stages import StageOfSpace, StagePlans, without_stages
from autofit.estimate.space_step import OptimizerRow, Step, Where, combined
from autofit.estimate.trace_keys import (
    TraceKeys,
    group_key,
    group_of,
    interpolation_endpoints,
    kinds_of_blocks,
    pass_key,
    pass_of,
)
from autofit.hardware.catalogue import links_of
from autofit.training.meta_model import meta_model_from
from autofit.training.replay import has_representations

_Traced = tuple[Segments | None, Calls | None]  # Calls where they are to be measured
# An optimizer, and how many weights of each kind it steps.
_Update = tuple[Value, tuple[tuple[Kind, int], ...]]

_PART = 2000  # groups that one process puts together in one go


@dataclass(frozen=True)
class SpacePredictions:
    """Predictions for configs, in their order; NaN where impossible.

    Attributes:
        allocated: bytes of tensors on a device.
        seconds: of an optimizer step.
        on_host: bytes that the host of a node holds of what is offloaded.
    """

    allocated: Floats
    seconds: Floats
    on_host: Floats


class SpaceEstimator:
    """Predicts many Configs of one workload on one device, for the micro-batches and ranks that
    they have.

    What was traced for some is not traced again for others.

    Args:
        configs: to predict, of every micro-batch, rank and layout that will be asked for.
        rates: how fast the device is; an attribute, after `predict` with the operators measured for
            it.
        measuring: seconds for timing real operators, where the rates were measured on this machine.
        within: seconds for tracing, what most configs need first; configs that need more stay
            unknown.
        workers: the processes that trace; None: this one.
        notify: hears how many traces are left of those that what is asked for needs.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        rates: Rates,
        configs: Sequence[Config],
        *,
        measuring: float = MEASURING_SECONDS,
        within: float = math.inf,
        workers: Workers | None = None,
        notify: Callable[[int], None] = lambda left: None,
    ) -> None:
        self._notify = notify
        self._left = 0
        self.complete = True  # whether all was traced that there was to trace
        self._end = time.monotonic() + within
        self._workload = workload
        self._hardware = hardware
        self.rates = rates
        self._configs = configs
        self._measuring = measuring
        self._workers = workers or Workers(1)
        self._workers.functions += [self._trace, self._cost_of_update, self._steps_of]

        samples = sorted({config.micro_batch_size or 1 for config in configs})
        ranks = sorted({config.lora_rank for config in configs})
        self._grid = Grid.of(samples, ranks)
        pairs = itertools.product(samples, ranks)
        self._indices = {pair: index for index, pair in enumerate(pairs)}
        self._symbols = Symbols.for_sizes(_sizes(workload))
        self._trace_keys = TraceKeys.on(hardware, self._symbols)
        self._links = links_of(hardware)
        self._few = hardware.world == 1 or have_few_shards(configs)

        self._skeletons: dict[Cut, Skeleton] = {}
        self._segments: dict[Config, Segments | None] = {}
        self._calls: Calls | None = None
        if rates.measured_here and rates.operators is None:
            self._calls = Calls(self._symbols)
        self._update_costs: dict[_Update, OptimizerCost] = {}
        self._update_steps: UpdateSteps = {}
        # By value of the knob and id of the segments.
        self._optimizers: dict[tuple[Any, int], OptimizerRow] = {}
        self._updates: dict[OptimizerCost, float] = {}
        self._passes: dict[tuple[Value, ...], Pass | None] = {}
        self._computed: Computed = {}  # shared by passes
        self._plans = StagePlans(workload, hardware)
        self._stages: dict[tuple[Any, ...], StageOfSpace] = {}

        # Of losses that couple a batch, for configs on one device that see all of it at once.
        self._at_once: SpaceEstimator | None = None
        if has_representations(workload.loss) and hardware.world == 1:
            loss: Any = workload.loss
            plain = dataclasses.replace(workload, loss=loss.__call__)
            self._at_once = SpaceEstimator(
                plain,
                hardware,
                rates,
                configs,
                measuring=measuring,
                within=within,
                notify=notify,
            )

    def trace_until(self, end: float) -> None:
        """Set until when more may be traced, by `time.monotonic`."""
        if end != self._end:
            self._end = end
            self._workers.close()  # others will know of it
        if self._at_once is not None:
            self._at_once.trace_until(end)

    def predict(self, configs: Sequence[Config] | None = None) -> SpacePredictions:
        """Predict some configs, or all that were given."""
        if configs is None:
            configs = self._configs
        if self._at_once is not None:
            return self._by_batch(configs, self._at_once)

        allocated, seconds, on_host = (np.full(len(configs), np.nan) for _ in range(3))
        keys = [group_key(config) for config in configs]
        one_of_each = dict(zip(keys, configs, strict=True))
        groups = {key: group_of(config) for key, config in one_of_each.items()}

        self._trace_all(list(groups.values()))
        if self._calls:  # of all traced operators
            operators = self._calls.measured(self.rates, self._measuring)
            self.rates = dataclasses.replace(self.rates, operators=operators)

        steps = self._steps(groups)
        for number, (config, key) in enumerate(zip(configs, keys, strict=True)):
            step = steps[key]
            if step is None:
                continue

            index = self._indices[config.micro_batch_size or 1, config.lora_rank]
            accumulation = config.gradient_accumulation_steps or 1
            allocated[number] = step.at_once[index]
            seconds[number] = accumulation * step.micro[index] + step.update[index]

            if accumulation > 1:
                allocated[number] = step.accumulating[index]
                seconds[number] += accumulation * step.adding[index]

            on_host[number] = step.on_host[index]

        return SpacePredictions(allocated, seconds, on_host)

    def _by_batch(self, configs: Sequence[Config], at_once: "SpaceEstimator") -> SpacePredictions:
        """The predictions of configs that see a batch at once by another estimator than those that
        replay it."""
        is_whole = np.array([config.gradient_accumulation_steps in (None, 1) for config in configs])
        found = [np.full(len(configs), np.nan) for _ in range(3)]
        for estimator, wanted in ((at_once, is_whole), (self._replaying(), ~is_whole)):
            chosen = [config for config, fits in zip(configs, wanted, strict=True) if fits]
            if not chosen:
                continue

            predicted = estimator.predict(chosen)
            of_chosen = (predicted.allocated, predicted.seconds, predicted.on_host)
            for figures, of_some in zip(found, of_chosen, strict=True):
                figures[wanted] = of_some

            self.rates = estimator.rates

        return SpacePredictions(*found)

    def _replaying(self) -> "SpaceEstimator":
        """This estimator, for configs that replay each batch."""
        estimator = copy.copy(self)
        estimator._at_once = None
        return estimator

    def _trace_all(self, groups: Sequence[Config]) -> None:
        """Trace what these configs need, on as many cores as allowed."""
        ends: list[Config] = []
        for group in groups:
            self._plans.of(group)
            for config, _ in self._standing_for(without_stages(group)):
                ends += interpolation_endpoints(config)

        # What most configs need first.
        once = {pass_of(end): end for end in ends}
        needed = Counter(map(pass_of, ends))
        passes = [pass_key(once[key]) for key, _ in needed.most_common()]
        for config in passes:
            self._skeleton(config)  # once, for all processes

        before = dict.fromkeys(self._segments)
        self._trace_missing([self._trace_keys.plain(config) for config in passes])

        keys = dict.fromkeys(key for config in passes for key in self._keys(config))
        derivable = {}
        for key in keys:
            sources = None if key in before else derived_trace(key, before | keys)
            if sources:
                derivable[key] = sources
        self._trace_missing([key for key in keys if key not in derivable])

        # Where nothing can be derived after all, a trace is made.
        derived = {
            key: segments_like(*map(self._segments.get, sources))
            for key, sources in derivable.items()
        }
        self._segments |= {key: segments for key, segments in derived.items() if segments}
        self._trace_missing(list(keys))

        self.complete = time.monotonic() <= self._end
        self._cost_updates(ends)

    def _cost_updates(self, ends: Sequence[Config]) -> None:
        """Find what the optimizers of these configs cost, as far as it is not known."""
        each_once = {}
        for end in ends:
            step_pass = self._pass(end)
            if step_pass:
                segments = step_pass.segments
                each_once[end.optimizer, id(segments)] = (end, segments)

        self._cost_updates_of(each_once)

    def _cost_updates_of(self, each_once: Mapping[Any, tuple[Config, Segments]]) -> None:
        """Find what the optimizers of configs cost that step these weights."""
        updates = {}
        for end, segments in each_once.values():
            for update in self._updates_of(end, segments):
                if update not in self._update_costs:
                    updates[update] = end

        tasks = [(end, update) for update, end in updates.items()]
        costs = self._workers.map(self._cost_of_update, tasks)
        for update, (cost, calls) in zip(updates, costs, strict=True):
            self._update_costs[update] = cost
            self._note(calls)

    def _steps(
        self, groups: Mapping[tuple[Value, ...], Config]
    ) -> dict[tuple[Value, ...], Step | None]:
        """The step of each group, on as many cores as allowed: those of one pass together, which is
        computed once."""
        of_passes: dict[tuple[Value, ...], list[tuple[Value, ...]]] = {}
        for key, group in groups.items():
            of_passes.setdefault(pass_of(group), []).append(key)

        together = list(itertools.chain.from_iterable(of_passes.values()))

        parts = []
        for start in range(0, len(together), _PART):
            part = together[start : start + _PART]
            parts.append([groups[key] for key in part])

        if len(parts) > 1:
            self._workers.close()  # others will know what was traced
            found = self._workers.map(self._steps_of, parts)
        else:
            found = list(map(self._steps_of, parts))

        return dict(zip(together, itertools.chain.from_iterable(found), strict=True))

    def _steps_of(self, groups: Sequence[Config]) -> list[Step | None]:
        return [self._step(group) for group in groups]

    def _standing_for(self, config: Config) -> Sequence[tuple[Config, float]]:
        return standing_for(config, self._hardware, few=self._few)

    def _trace_missing(self, keys: Sequence[Config]) -> None:
        missing = list(dict.fromkeys(key for key in keys if key not in self._segments))

        self._left = len(missing) + 1
        self._one_less()
        traces = self._workers.map(self._trace, missing, self._one_less)
        for key, (segments, calls) in zip(missing, traces, strict=True):
            self._segments[key] = segments
            self._note(calls)

    def _one_less(self) -> None:
        """Tell how many traces are left."""
        self._left -= 1
        self._notify(self._left)

    def _note(self, calls: Calls | None) -> None:
        if self._calls and calls:
            self._calls.add(calls)

    def _step(self, config: Config) -> Step | None:
        """The step of a group, each figure the weighted sum of those of the configs that stand for
        it; None where one of them cannot be traced."""
        if Layout.of(config).pipeline > 1:
            return self._step_of_stages(config)

        exchanges = Exchanges(config, self._hardware, self._links)
        steps = []
        shares = []
        for end, share in self._standing_for(config):
            steps.append(self._step_of(end, exchanges))
            shares.append(share)

        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return None
        if len(known) == 1:
            return known[0]
        figures = zip(*known, strict=True)
        return Step(*(sum(map(operator.mul, values, shares)) for values in figures))

    def _step_of_stages(self, config: Config) -> Step | None:
        """The step of a pipeline: the most memory of any stage, and the time of all."""
        plan = self._plans.of(config)
        base = without_stages(config)
        (end, *others) = interpolation_endpoints(base)
        step_pass = None if others or plan is None else self._pass(end)
        if plan is None or step_pass is None:
            return None

        hardware = self._hardware.of_several(Layout.of(config).stage_world)
        exchanges = Exchanges(base, hardware, self._links)
        recomputed = recomputed_share(base, self._workload, self._hardware) or 0.0
        samples = self._grid.samples
        of_rank = self._workload.effective_batch_size / Layout.of(config).dp_degree
        steps = []
        for number in range(Layout.of(config).pipeline):
            key = (pass_of(base), plan.cuts, number)
            stage = self._stages.setdefault(key, StageOfSpace(step_pass, base, plan, number))
            if stage.own is None:
                return None
            self._cost_updates_of(
                {(base.optimizer, id(stage.own.segments)): (base, stage.own.segments)}
            )
            step = self._combined(base, stage.own, recomputed, exchanges)
            beside = stage.beside(config, samples, of_rank / samples)
            steps.append(
                step._replace(
                    accumulating=step.accumulating + beside, at_once=step.at_once + beside
                )
            )

        passed = plan.sizes.passed * samples * StageOfSpace(step_pass, base, plan, 0).width
        ranks = group_of_ranks(2, Layout.of(config).stage_world, self._hardware)
        passing = 2 * collective_seconds("send", passed, ranks, self._links)
        of_stages = np.array([step.micro + step.adding for step in steps])
        slowest = of_stages.max(axis=0)
        chunks = chunks_of(config)
        return Step(
            accumulating=np.max([step.accumulating for step in steps], axis=0),
            at_once=np.max([step.at_once for step in steps], axis=0),
            micro=slowest + chunks * passing,
            # other stages work while the first and the last micro-batch are elsewhere
            update=np.max([step.update for step in steps], axis=0)
            + (of_stages.sum(axis=0) - slowest) / chunks
            + (len(steps) * chunks - 1) * passing,
            adding=0.0 * slowest,
            on_host=np.sum([step.on_host for step in steps], axis=0),
        )

    def _step_of(self, config: Config, exchanges: Exchanges) -> Step | None:
        """The step of one config, between two others where it recomputes within a budget."""
        ends = [(end, self._pass(end)) for end in interpolation_endpoints(config)]
        # Asked of the config itself: where it recomputes within a budget no rule is known, though
        # one is for its ends.
        recomputed = recomputed_share(config, self._workload, self._hardware) or 0.0
        steps = [
            self._combined(end, step_pass, recomputed, exchanges)
            for end, step_pass in ends
            if step_pass
        ]
        if len(steps) < len(ends):
            return None
        if len(steps) == 1:
            return steps[0]

        share = float(config.activation_checkpointing.removeprefix(BUDGET))
        return Step(*(full + share * (none - full) for full, none in zip(*steps, strict=True)))

    def _pass(self, config: Config) -> Pass | None:
        """The forward and backward of a config; None where one of its traces failed."""
        key = pass_of(config)
        if key not in self._passes:
            self._passes[key] = self._new_pass(pass_key(config))
        return self._passes[key]

    def _new_pass(self, config: Config) -> Pass | None:
        plain = self._segments[self._trace_keys.plain(config)]
        traces = [self._segments[key] for key in self._keys(config)]
        complete = [segments for segments in traces if segments]
        if len(complete) < len(traces):
            return None

        if plain is None or plain.depth is None:
            return Pass(complete[0], as_traced(complete[0]), self._computed)

        head, *blocks = complete
        schedule = as_traced(blocks[0])
        if len(blocks) > 1:
            ways = kinds_of_blocks(config, plain.depth)
            of_way = dict(zip(dict.fromkeys(ways), blocks, strict=True))
            schedule = mixed([of_way[way] for way in reversed(ways)])

        schedule = with_head(schedule, head, blocks[0].let_go)  # of the last block's kind
        return Pass(plain, schedule, self._computed)

    def _keys(self, config: Config) -> tuple[Config, ...]:
        """What is traced for a pass besides its plain blocks, once those are."""
        plain = self._segments[self._trace_keys.plain(config)]
        depth = None
        by_flash = False
        if plain:
            depth = plain.depth
            by_flash = plain.by_flash
        asks_others = bool(self._workload.frozen)
        return self._trace_keys.others(config, depth, by_flash=by_flash, asks_others=asks_others)

    def _trace(self, config: Config) -> _Traced:
        """The segments of a trace, and the arguments of its operators."""
        if time.monotonic() > self._end:
            return None, None

        calls = Calls(self._symbols) if self._calls else None
        try:
            skeleton = copy.deepcopy(self._skeleton(config))
            layout = Layout.of(config)
            shards = layout.shard * layout.context
            # Rows of adapters are divided, too: of so many times the rank, each rank has a prime.
            config = config.replace(lora_rank=config.lora_rank * shards)

            samples = self._symbols.samples
            of_rank = self._workload.effective_batch_size // layout.dp_degree
            small = dataclasses.replace(
                self._workload, effective_batch_size=samples * layout.dp_degree
            )
            traced = trace_skeleton(
                small,
                config,
                self._hardware.of_several(layout.world),
                skeleton,
                calls=calls,
                rows=self._symbols.rows,
                whole_batch=max(of_rank, samples + 1),
            )
        except AutofitError:
            return None, calls

        grid = dataclasses.replace(self._grid, ranks=self._grid.ranks / shards)
        return segments_of(traced, grid, self._symbols, self._hardware), calls

    def _skeleton(self, config: Config) -> Skeleton:
        cut = Cut.of(config)
        if cut not in self._skeletons:
            self._skeletons[cut] = Skeleton.cut_short(self._workload, self._hardware, cut)
        return self._skeletons[cut]

    def _combined(
        self,
        config: Config,
        step_pass: Pass,
        recomputed: float,
        exchanges: Exchanges,
    ) -> Step:
        made_with = 0
        if self._hardware.device == "cpu":
            made_with = self._skeleton(config).made_with
        where = Where(self._workload, self._hardware, self.rates, self._grid, made_with)
        optimizer = self._optimizer(config, step_pass.segments)
        return combined(
            where,
            config,
            step_pass,
            optimizer,
            recomputed=recomputed,
            exchanges=exchanges,
        )

    def _optimizer(self, config: Config, segments: Segments) -> OptimizerRow:
        key = (config.optimizer, id(segments))
        if key not in self._optimizers:
            speed = Speed.of_update(self.rates, self._hardware, config)
            rows = []
            for update in self._updates_of(config, segments):
                cost = self._update_costs[update]
                if cost not in self._updates:
                    self._updates[cost] = cost.seconds(speed)
                *figures, _ = OptimizerRow._fields
                rows.append([*(getattr(cost, name) for name in figures), self._updates[cost]])

            self._optimizers[key] = OptimizerRow(*np.array(rows, float).T)

        return self._optimizers[key]

    def _updates_of(self, config: Config, segments: Segments) -> list[_Update]:
        """The updates of a config at each pair of the grid."""
        layout = Layout.of(config)
        shards = layout.shard * layout.context
        updates: list[_Update] = []
        for rank in self._grid.ranks.tolist():
            shapes = segments.shapes
            if rank and config.lora_rank:
                shapes = scaled_shapes(shapes, self._symbols.rank, math.ceil(rank / shards))

            updates.append((config.optimizer, tuple(shapes.items())))

        return updates

    def _cost_of_update(self, task: tuple[Config, _Update]) -> tuple[OptimizerCost, Calls | None]:
        """The cost of a config's update, and the arguments of its operators."""
        config, (_, kinds) = task
        calls = Calls(self._symbols) if self._calls else None
        cost = cost_of_update(
            self._workload,
            self._hardware,
            config,
            dict(kinds),
            calls,
            self._update_steps,
        )
        return cost, calls


def _sizes(workload: Workload) -> set[int]:
    """Every size that the primes of a trace must not divide."""
    model = meta_model_from(workload.model)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {size for tensor in tensors(workload.batch(1)) for size in tensor.shape}

    return sizes | {workload.sequence_length or 1, workload.effective_batch_size}
