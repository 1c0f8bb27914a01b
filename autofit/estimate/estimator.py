"""The estimate of one Config: a trace of the whole model, applied to the target device."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.layout import Layout, chunks_of
from autofit.core.workload import Workload
from autofit.distributed.collectives import seconds as collective_seconds
from autofit.estimate.allocator_events import reserved_for
from autofit.estimate.between_steps import EVALUATION, SAVING
from autofit.estimate.calibration import Calibration
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.peak import (
    LEAST_COMPILED,
    MOST_COMPILED,
    RECOMPUTED_UNCERTAINTY,
    Peak,
    host_bytes_of,
    peak_of,
    peaks_between_steps,
    recomputed_share,
)
from autofit.estimate.ranks import group_of, step_seconds
from autofit.estimate.rates import Rates, format_of, rate_of
from autofit.estimate.roofline import Speed
from autofit.estimate.stages import seconds_of_schedule
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import links_of

# (low, high) relative to predictions before probes have shown more. On the CPU from
# benchmarks/estimate_memory; on CUDA of reserved bytes: PyTorch's own allocator, rehearsed without
# kernels (benchmarks/fake_cuda), reserved 2.7 % less to 3.9 % more in uncompiled steps of language
# models; what kernels and their libraries add is unknown.
_UNCERTAINTY = {"cpu": (0.99, 1.01), "cuda": (0.97, 1.06)}
_CONTEXT = 500 * MIB  # of CUDA, where the card does not tell; 300 to 700 MiB are usual
# Of NCCL, for each group of ranks: a send and a receive buffer of 4 MiB and two smaller ones
# (NCCL_BUFFSIZE, LL, LL128) for each of 8 to 24 channels. Not measured.
COMMUNICATOR_BYTES = 200 * MIB
_COMMUNICATOR_SPREAD = 120 * MIB


def predict(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    *,
    rates: Rates | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Predict memory and time of one Config.

    Args:
        rates: how fast the device is; None: no times are predicted.
        calibration: how far off predictions were on this device.

    Raises:
        RefusedError: the config is impossible.
        UntraceableError: the model cannot be traced without its values.
    """
    traced = trace(workload, config, hardware)
    return estimate_of(
        traced,
        workload,
        hardware,
        rates=rates,
        calibration=calibration,
    )


def estimate_of(
    traced: Trace,
    workload: Workload,
    hardware: Hardware,
    *,
    rates: Rates | None,
    calibration: Calibration | None,
) -> Estimate:
    """The estimate from a trace, which devices that run the same operators can share."""
    if traced.stages:
        return _of_stages(traced, workload, hardware, rates, calibration)

    calibration = calibration or Calibration()
    if rates and rates.measured_here and rates.operators is None:
        rates = replace(rates, operators=traced.calls.measured(rates))

    peak = peak_of(traced, hardware)
    groups = Layout.of(traced.config).groups
    reserved = None
    context = 0
    workspace = 0

    if hardware.device == "cuda":
        context = hardware.context_bytes or _CONTEXT
        context += COMMUNICATOR_BYTES * groups
        workspace = workspace_bytes(hardware)
        allocator = workspace, hardware.expandable_segments

        if allocator not in traced.reserved:
            traced.reserved[allocator] = reserved_for(
                traced,
                hardware,
                expandable=hardware.expandable_segments,
            )

        reserved = max(traced.reserved[allocator], peak.nbytes + workspace)
        parts = {**peak.parts, "temporary": peak.parts["temporary"] + workspace}
        peak = replace(
            peak,
            nbytes=peak.nbytes + workspace,
            parts=parts,
        )

    uncertainty = None
    share = recomputed_share(traced.config, workload, hardware)
    if share is not None and reserved is not None:
        uncertainty = RECOMPUTED_UNCERTAINTY * peak.parts["activations"]
        recomputed = int(share * peak.parts["activations"])
        reserved -= recomputed
        parts = {
            **peak.parts,
            "activations": peak.parts["activations"] - recomputed,
        }
        peak = replace(
            peak,
            nbytes=peak.nbytes - recomputed,
            parts=parts,
        )

    peaks = peaks_between_steps(traced, hardware)
    between = {what: nbytes + workspace for what, nbytes in peaks.items()}
    needed = max(reserved or peak.nbytes, *between.values(), 0)

    low, high = _interval(
        traced,
        peak,
        needed,
        reserved is None,
        calibration,
        uncertainty,
    )

    times = {}
    if rates:
        times = times_of(
            traced,
            workload,
            hardware,
            rates,
            calibration.seconds or 1.0,
        )

    return Estimate(
        config=traced.config,
        allocated_bytes=peak.nbytes,
        reserved_bytes=reserved,
        low=low + context - _COMMUNICATOR_SPREAD * groups * (context > 0),
        high=high + context + _COMMUNICATOR_SPREAD * groups * (context > 0),
        breakdown={**peak.parts, "context": context},
        notes=(*_notes(traced, rates, uncertainty), *_notes_between_steps(between, peak)),
        host_bytes=host_bytes_of(traced),
        evaluation_bytes=between.get(EVALUATION),
        saving_bytes=between.get(SAVING),
        **times,
    )


def _of_stages(
    traced: Trace,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None,
    calibration: Calibration | None,
) -> Estimate:
    """The estimate of a pipeline: the memory of the stage that needs most, and the time of all."""
    estimates = [
        estimate_of(stage, workload, hardware, rates=None, calibration=calibration)
        for stage in traced.stages
    ]
    largest = max(estimates, key=lambda estimate: estimate.high)
    needs = ", ".join(f"{estimate.high / GIB:.2f}" for estimate in estimates)

    times: dict[str, Any] = {}
    notes = [f"the stages need up to {needs} GiB."]
    if rates:
        factor = (calibration or Calibration()).seconds or 1.0
        times, idle = _times_of_stages(traced, workload, hardware, rates, factor)
        notes.append(f"{idle:.0%} of the step the devices wait for one another.")

    unknown = "the speed of this device is unknown."
    notes += [note for note in largest.notes if note != unknown or not rates]

    return replace(largest, notes=tuple(notes), **times)


def _times_of_stages(
    traced: Trace,
    workload: Workload,
    hardware: Hardware,
    rates: Rates,
    factor: float,
) -> tuple[dict[str, Any], float]:
    """The fields of an Estimate about the time of a pipeline, and the share of it in which stages
    wait."""
    stages = [_phases_of(stage, hardware, rates) for stage in traced.stages]
    micro_batches = traced.config.gradient_accumulation_steps or 1
    layout = Layout.of(traced.config)
    group = group_of(2, layout.stage_world, hardware)
    links = links_of(hardware)
    passing = [
        float(collective_seconds("send", stage.passed_bytes, group, links))
        for stage in traced.stages[:-1]
    ]

    working = seconds_of_schedule(
        [stage.forward for stage in stages],
        [stage.backward for stage in stages],
        passing,
        micro_batches,
        str(traced.config.pipeline_schedule),
        chunks_of(traced.config),
    )
    of_stages = [micro_batches * (stage.forward + stage.backward) for stage in stages]
    busy = sum(of_stages) / len(of_stages)
    seconds = (working + max(stage.update for stage in stages)) * factor

    slowest = stages[of_stages.index(max(of_stages))]
    passed = 2 * micro_batches * chunks_of(traced.config) * max(passing)
    bottleneck = "transfer" if passed > max(of_stages) else slowest.bottleneck
    needed = sum(_needed_flops(stage) / _peak(stage, rates) for stage in traced.stages)
    utilisation = needed * micro_batches / seconds / len(stages)

    return _speed_fields(workload, seconds, bottleneck, utilisation), 1 - busy / working


def _interval(
    traced: Trace,
    peak: Peak,
    needed: int,
    on_cpu: bool,
    calibration: Calibration,
    uncertainty: float | None,
) -> tuple[int, int]:
    """(low, high) bytes, without the context."""
    least, most = calibration.spread or _UNCERTAINTY["cpu" if on_cpu else "cuda"]
    prediction = needed * calibration.memory
    low = prediction * least
    high = prediction * most

    if uncertainty is not None:
        low -= uncertainty
        high += uncertainty
    elif traced.config.compile != "none":
        low -= (peak.parts["activations"] + peak.parts["temporary"]) * (1 - LEAST_COMPILED)
        high *= MOST_COMPILED

    return int(low), int(high)


def times_of(
    traced: Trace,
    workload: Workload,
    hardware: Hardware,
    rates: Rates,
    factor: float = 1.0,
) -> dict[str, Any]:
    """The fields of an Estimate that are about time.

    Args:
        factor: how much longer than predicted steps have taken.
    """
    if traced.stages:
        times, _ = _times_of_stages(traced, workload, hardware, rates, factor)
        return times

    accumulation = traced.config.gradient_accumulation_steps or 1
    found = _phases_of(traced, hardware, rates)
    seconds = (accumulation * (found.forward + found.backward) + found.update) * factor
    needed = _needed_flops(traced) * accumulation / _peak(traced, rates)

    return _speed_fields(
        workload,
        seconds,
        found.bottleneck,
        needed / seconds,
    )


def _speed_fields(
    workload: Workload,
    seconds: float,
    bottleneck: str,
    utilisation: float,
) -> dict[str, Any]:
    """The fields of an Estimate that are about time, by the seconds of a step."""
    samples = workload.effective_batch_size / seconds
    tokens = None
    if workload.unit == "tokens" and workload.sequence_length:
        tokens = samples * workload.sequence_length

    return {
        "step_seconds": seconds,
        "samples_per_second": samples,
        "tokens_per_second": tokens,
        "bottleneck": bottleneck,
        "utilisation": utilisation,
    }


@dataclass(frozen=True)
class _Phases:
    """What one device does in a step.

    Attributes:
        forward, backward: seconds of a micro-batch, in the mean of a step.
        update: seconds.
        bottleneck: what limits it: "compute", "memory" or "transfer".
    """

    forward: float
    backward: float
    update: float
    bottleneck: str


def _phases_of(traced: Trace, hardware: Hardware, rates: Rates) -> _Phases:
    """The phases of a step on one device, with what it exchanges with others that see other
    samples."""
    speed = Speed.of(rates, hardware, traced.config)
    of_update = Speed.of_update(rates, hardware, traced.config)
    accumulation = traced.config.gradient_accumulation_steps or 1

    def waits_of_phase(name: str, speed: Speed, *, overlapping: bool) -> dict[str, float]:
        return traced.of_whole(
            lambda followed: followed.waits(followed.spans(name), speed, overlapping=overlapping)
        )

    phases = [waits_of_phase(name, speed, overlapping=True) for name in ("forward", "backward")]
    update = waits_of_phase("update", of_update, overlapping=False)
    micro = {name: sum(phase[name] for phase in phases) for name in update}
    waits = {name: accumulation * micro[name] + update[name] for name in update}
    copied = waits.pop("transfer")
    busy = sum(waits.values())

    # Copies overlap with a forward and a backward; an update waits for what is moved or computed
    # for it.
    computing = []
    for phase in phases:
        working = phase["compute"] + phase["memory"]
        computing.append(max(phase["transfer"], working) + phase["launch"])

    if Layout.of(traced.config).stage_world > 1:
        links = links_of(hardware)
        found = traced.of_whole(
            lambda followed: {"both": step_seconds(followed, speed, hardware, links)}
        )
        alone = accumulation * sum(computing)
        copied += max(found["both"] - alone, 0.0)
        computing = [seconds * found["both"] / alone for seconds in computing]

    bottleneck = "memory"
    if copied > busy:
        bottleneck = "transfer"
    elif waits["compute"] > busy / 2:
        bottleneck = "compute"

    return _Phases(
        computing[0],
        computing[1],
        sum(update.values()),
        bottleneck,
    )


def _needed_flops(traced: Trace) -> float:
    """The arithmetic of a micro-batch by the usual count: a backward costs twice its forward, once
    if most weights are frozen; never more than is computed."""
    flops = traced.of_whole(_flops)
    usual = flops["forward"] * (2.0 if traced.config.lora_rank else 3.0)

    return min(usual, flops["step"])


def _flops(traced: Trace) -> dict[str, int]:
    return {
        "forward": sum(cost.flops for cost in traced.costs_of("forward")),
        "step": sum(cost.flops for cost in traced.costs),
    }


def _flops_by_format(traced: Trace) -> dict[str, int]:
    flops: Counter[str] = Counter()
    for cost in traced.costs:
        flops[format_of(cost.dtype)] += cost.flops

    return flops


def _peak(traced: Trace, rates: Rates) -> float:
    """Peak operations per second of the formats computed in, each for its share of the
    arithmetic."""
    peak = rates.peak or rates.matmul
    flops = Counter(traced.of_whole(_flops_by_format))
    if traced.config.precision == "tf32":
        flops["tf32"] += flops.pop("float32", 0)

    seconds = sum(count / rate_of(peak, name) for name, count in flops.items())
    if not seconds:
        return rate_of(peak, "float32")

    return flops.total() / seconds


def _notes_between_steps(between: Mapping[str, int], peak: Peak) -> Iterator[str]:
    """A sentence on what takes more memory than a step."""
    for what, nbytes in between.items():
        if nbytes > peak.nbytes:
            yield f"{what} takes more memory than a step: {nbytes / GIB:.2f} GiB of tensors."


def _notes(traced: Trace, rates: Rates | None, uncertainty: float | None) -> list[str]:
    notes = []
    if traced.config.compile != "none":
        detail = "less what compiled transformers compute again"
        if uncertainty is None:
            detail = "in a wide interval"

        notes.append(
            f"compiled code cannot be traced: the memory is that of the eager operations, {detail}."
        )

    notes += traced.assumptions
    if rates is None:
        notes.append("the speed of this device is unknown.")

    return notes
