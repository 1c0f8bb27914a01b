"""The trace of one training step of one Config: of all its blocks, of few that tell what all do, or of
each stage of a pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import UntraceableError
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout, chunks_of
from autofit.core.some_blocks import SomeBlocks
from autofit.core.workload import Workload
from autofit.estimate.deepened import deepened, reach_of
from autofit.estimate.earlier_micro_batches import Turn
from autofit.estimate.gradient_buckets import with_buckets
from autofit.estimate.operators import Calls
from autofit.estimate.peak import peak_of
from autofit.estimate.processes import parallel_map
from autofit.estimate.recorder import Recorder
from autofit.estimate.shallow_model import Cut, retain
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import allowed, fake_setup, trace_skeleton
from autofit.estimate.stages import FollowedStage, Moment, moments_of, with_others_under_way
from autofit.estimate.step_trace import Trace
from autofit.training.pipeline_cut import plan_of_stages

_ROUNDS = 3  # of micro-batches through chunks, in the last of which all do what later ones do
_CUTS = 2  # by which a deep model is tried to be told, the second as its blocks reach


def trace(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    *,
    whole: bool = False,
    processes: int | None = 1,
) -> Trace:
    """Trace one step.

    Args:
        whole: follow every block, also where a few tell what all of them do.
        processes: as of Workers; the stages of a pipeline are followed at the same time. Else than
            with 1 this process may still be forked afterwards.

    Raises:
        RefusedError: the config is impossible, or not for this model.
        UntraceableError: the model's code needs values.
    """
    canonical = allowed(config, workload, hardware)
    count = Layout.of(canonical).pipeline
    of_stage: Callable[[int], Trace]
    if count > 1:
        of_stage = _of_stages(workload, canonical, hardware, whole=whole)
    else:
        of_stage = partial(_whole_model, workload, canonical, hardware, whole)

    with parallel_map(of_stage, processes) as each:
        stages = each(range(count))

    return stages[0] if count == 1 else replace(stages[0], stages=tuple(stages))


def _whole_model(
    workload: Workload,
    config: Config,
    hardware: Hardware,
    whole: bool,
    _: int,
) -> Trace:
    """The trace of a model without stages."""
    if not whole:
        skeleton = partial(Skeleton.whole, workload, hardware)
        found = _of_few_blocks(workload, config, hardware, skeleton)
        if found is not None:
            return found

    return trace_skeleton(
        workload, config, hardware, Skeleton.whole(workload, hardware), between=True
    )


def _of_stages(
    workload: Workload,
    config: Config,
    hardware: Hardware,
    *,
    whole: bool,
) -> Callable[[int], Trace]:
    """What makes the trace of a pipeline's stage, by its number."""
    skeleton = Skeleton.whole(workload, hardware)
    setup = fake_setup(workload, config, hardware, skeleton.model, Recorder(hardware))
    cuts = list(plan_of_stages(setup).cuts)

    if chunks_of(config) > 1:
        return partial(_of_chunks, workload, config, hardware, cuts)

    micro_batches = config.gradient_accumulation_steps or 1
    count = len(cuts) - 1
    gathers = config.data_parallel == "fsdp"
    traced: dict[tuple[bool, bool, int, Turn], Trace] = {}

    def at_moment(stage: int, at: Moment) -> Trace:
        """The trace of a micro-batch beside others."""
        turn = at.turn
        if turn is Turn.DRAIN and not gathers:
            turn = Turn.LATER

        kind = (stage == 0, stage == count - 1, cuts[stage + 1] - cuts[stage], turn)
        if kind not in traced:
            traced[kind] = _of_stage(
                workload, config, hardware, stage, cuts, whole=whole, turn=turn
            )

        return with_others_under_way(traced[kind], stage, count, at, micro_batches)

    def of_stage(stage: int) -> Trace:
        """The trace at that moment at which the stage needs most."""
        moments = moments_of(
            stage,
            count,
            micro_batches,
            str(config.pipeline_schedule),
        )
        found = [at_moment(stage, at) for at in moments]

        return max(found, key=lambda trace: peak_of(trace, hardware).nbytes)

    return of_stage


def _of_stage(
    workload: Workload,
    config: Config,
    hardware: Hardware,
    stage: int,
    cuts: list[int],
    *,
    whole: bool,
    turn: Turn,
) -> Trace:
    """The trace of one micro-batch through one stage."""
    followed = FollowedStage.of(cuts, stage, len(cuts) - 1)
    skeleton = partial(_skeleton_of, followed, workload, hardware)
    if not whole:
        found = _of_few_blocks(workload, config, hardware, skeleton, followed, turn=turn)
        if found is not None:
            return found
    return trace_skeleton(
        workload, config, hardware, skeleton(), between=True, stage=followed, turn=turn
    )


def _of_chunks(
    workload: Workload,
    config: Config,
    hardware: Hardware,
    cuts: list[int],
    stage: int,
) -> Trace:
    """The trace of one micro-batch through all chunks of a stage; its `whole` is of the micro-batches
    after which a step goes on as it does then."""
    stages = Layout.of(config).pipeline
    followed = FollowedStage.of(cuts, stage, stages)
    follow = partial(trace_skeleton, workload, config, hardware, stage=followed)
    one = follow(_skeleton_of(followed, workload, hardware), between=True)

    micro_batches = config.gradient_accumulation_steps or 1
    rounds = max(1, micro_batches // stages)
    several = follow(
        _skeleton_of(followed, workload, hardware),
        turn=Turn.FIRST,
        micro_batches=min(rounds, _ROUNDS) * (micro_batches // rounds),
    )

    return replace(one, whole=several, reserved={})


def _skeleton_of(stage: FollowedStage, workload: Workload, hardware: Hardware) -> Skeleton:
    """The blocks of a stage, and one in place of each row of others."""
    made = Skeleton.whole(workload, hardware)
    retain(made.model, stage.kept)

    return made


def _of_few_blocks(
    workload: Workload,
    config: Config,
    hardware: Hardware,
    skeleton: Callable[[], Skeleton],
    stage: FollowedStage | None = None,
    *,
    turn: Turn = Turn.LATER,
) -> Trace | None:
    """The trace of a deep model, of which few blocks are followed; None where it is not deep, or
    its blocks do not do alike.

    Args:
        skeleton: makes one, of a `stage` with its neighbours.
    """
    has_buckets = config.data_parallel == "ddp"
    if has_buckets and stage is not None:  # their buckets, made after a backward, end anywhere
        return None
    if any(map(SomeBlocks.of, config.values())):  # which blocks those are follows from all
        return None

    cut = Cut.of(config)
    if stage is not None:  # its first and last blocks are not those of the skeleton
        cut = replace(cut, first=cut.first + 1, reach=cut.reach + 1)

    calls = Calls()
    follow = partial(
        trace_skeleton,
        workload,
        config,
        hardware,
        calls=calls,
        between=True,
        stage=stage,
        turn=turn,
    )
    try:
        for _ in range(_CUTS):
            shortened = skeleton().two_depths(cut)
            if shortened is None:
                return None

            shallower, deeper = shortened
            less = follow(shallower)
            reach = reach_of(less)
            if reach <= cut.reach:
                more = follow(deeper)
                break
            cut = replace(cut, reach=reach)
        else:  # blocks that do ever more
            return None
    except UntraceableError:  # code that counts its blocks
        return None

    assert more.depth, "it was shortened"
    missing = (more.depth.whole - more.depth.retained) // more.depth.period
    whole = deepened(less, more, more.depth.period, missing, more.depth.early)
    if whole is not None and has_buckets:
        whole = with_buckets(whole, more, missing)
    if whole is None:
        return None
    return replace(
        more, depth=None, shallower=replace(less, depth=None), missing=missing, whole=whole
    )
