"""The estimate of one Config: a trace of the whole model, and what the target makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autofit.core.estimate import Estimate
from autofit.core.hardware import MIB, Hardware
from autofit.core.workload import Workload
from autofit.estimate.allocator_events import run_of
from autofit.estimate.calibration import Calibration
from autofit.estimate.compiled import LEAST, MOST, UNSURE, computed_again
from autofit.estimate.fake_device import workspace_bytes
from autofit.estimate.peak import Peak, peak_of
from autofit.estimate.rates import Rates, format_of, rate_of
from autofit.estimate.roofline import Speed, Work, passes_of
from autofit.estimate.scaling import ONE, UNSCALED
from autofit.estimate.trace import Trace, trace
from autofit.hardware.caching_allocator import replay

# How far off predictions are taken to be where no probe has shown it yet. On the CPU from benchmarks/estimate_memory;
# on CUDA of what is reserved: PyTorch's own allocator, rehearsed without kernels (benchmarks/fake_cuda), reserved 2.7 %
# less to 3.9 % more in uncompiled steps of language models; kernels and their libraries add what nobody saw yet.
_UNCERTAIN = {"cpu": (0.99, 1.01), "cuda": (0.97, 1.06)}
_CONTEXT = 500 * MIB  # of CUDA, where the card says nothing else; between 300 and 700 MiB are seen


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
        rates: how fast the device is; None: time is left out.
        calibration: what measurements on this device have shown.

    Raises:
        RefusedError: the config cannot be; UntraceableError: the model cannot be followed without its numbers.
    """
    return estimate_of(trace(workload, config, hardware), workload, hardware, rates=rates, calibration=calibration)


def estimate_of(
    traced: Trace,
    workload: Workload,
    hardware: Hardware,
    *,
    rates: Rates | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """What a trace comes to on a device: several devices that run the same operators can share one."""
    if rates and rates.here and rates.operators is None:
        rates = replace(rates, operators=traced.calls.measured(rates))
    peak = peak_of(traced, hardware)
    reserved, context, workspace = None, 0, 0
    if hardware.device == "cuda":
        context, workspace = hardware.context_bytes or _CONTEXT, workspace_bytes(hardware)
        replayed = replay(run_of(traced, hardware), expandable=hardware.expandable_segments)
        reserved = max(replayed.peak_reserved, peak.nbytes + workspace)
        parts = {**peak.parts, "temporary": peak.parts["temporary"] + workspace}
        peak = replace(peak, nbytes=peak.nbytes + workspace, parts=parts)
    share, unsure = computed_again(traced.config, workload, hardware), None
    if share is not None and reserved is not None:
        unsure = UNSURE * peak.parts["activations"]
        again = int(share * peak.parts["activations"])
        reserved -= again
        parts = {**peak.parts, "activations": peak.parts["activations"] - again}
        peak = replace(peak, nbytes=peak.nbytes - again, parts=parts)
    low, high = _interval(traced, peak, reserved, calibration or Calibration(), unsure)
    times = _times(workload, traced, hardware, rates, calibration) if rates else {}
    return Estimate(
        config=traced.config,
        allocated_bytes=peak.nbytes,
        reserved_bytes=reserved,
        low=low + context,
        high=high + context,
        breakdown={**peak.parts, "context": context},
        notes=tuple(_notes(traced, rates, unsure)),
        **times,
    )


def _interval(
    traced: Trace, peak: Peak, reserved: int | None, calibration: Calibration, unsure: float | None
) -> tuple[int, int]:
    """(low, high) bytes, without the context."""
    device = "cpu" if reserved is None else "cuda"
    least, most = calibration.spread or _UNCERTAIN[device]
    expected = (reserved or peak.nbytes) * calibration.memory
    low, high = expected * least, expected * most
    if unsure is not None:
        low, high = low - unsure, high + unsure
    elif traced.config["compile"] != "none":
        low -= (peak.parts["activations"] + peak.parts["temporary"]) * (1 - LEAST)
        high *= MOST
    return int(low), int(high)


def _times(
    workload: Workload, traced: Trace, hardware: Hardware, rates: Rates, calibration: Calibration | None
) -> dict[str, Any]:
    config = traced.config
    speed = Speed(
        rates,
        asynchronous=hardware.device == "cuda",
        tf32=config["precision"] == "tf32",
        compiled=config["compile"] != "none",
    )
    accumulation = int(config["gradient_accumulation_steps"] or 1)
    forward, backward, update = (_waits(traced, phase, speed) for phase in ("forward", "backward", "update"))
    micro = {name: forward[name] + backward[name] for name in update}
    waits = {name: accumulation * micro[name] + update[name] for name in update}
    copied = waits.pop("transfer")
    busy = sum(waits.values())
    # Copies run beside the computation of a micro-batch; an update waits for what is moved or computed for it.
    overlapped = max(micro["transfer"], sum(micro.values()) - micro["transfer"])
    seconds = (accumulation * overlapped + sum(update.values())) * ((calibration and calibration.seconds) or 1.0)
    bottleneck = "transfer" if copied > busy else "compute" if waits["compute"] > busy / 2 else "memory"
    samples = workload.effective_batch_size / seconds
    tokens = samples * workload.sequence_length if workload.unit == "tokens" and workload.sequence_length else None
    return {
        "step_seconds": seconds,
        "samples_per_second": samples,
        "tokens_per_second": tokens,
        "bottleneck": bottleneck,
        "utilisation": _model_flops(traced) * accumulation / seconds / _peak(traced, rates),
    }


def _waits(traced: Trace, phase: str, speed: Speed) -> dict[str, float]:
    passes = passes_of(traced.config, phase)
    work = Work.of(traced.costs_of(phase), ONE, UNSCALED, traced.dispatched_in(phase))
    return {name: float(each[0]) for name, each in work.seconds(speed, passes=passes).items()}


def _model_flops(traced: Trace) -> float:
    """Of a micro-batch, by the usual count: a backward costs twice its forward, once where no weight is trained."""
    forward = sum(cost.flops for cost in traced.costs_of("forward"))
    return forward * (2.0 if traced.config["lora_rank"] else 3.0)


def _peak(traced: Trace, rates: Rates) -> float:
    """Operations per second at the most, in the format that most of the arithmetic is in."""
    known = rates.peak or rates.matmul
    by_format: dict[str, int] = {}
    for cost in traced.costs:
        name = format_of(cost.dtype)
        by_format[name] = by_format.get(name, 0) + cost.flops
    name = max(by_format, key=lambda each: by_format[each], default="float32")
    return rate_of(known, "tf32" if name == "float32" and traced.config["precision"] == "tf32" else name)


def _notes(traced: Trace, rates: Rates | None, unsure: float | None) -> list[str]:
    notes = []
    if traced.config["compile"] != "none":
        known = "less what compiled transformers compute again" if unsure is not None else "in a wide interval"
        notes.append(f"compiled code cannot be traced: the memory is that of the eager operations, {known}.")
    notes += traced.assumptions
    if rates is None:
        notes.append("nothing is known of this device's speed.")
    return notes
