"""Seconds and bytes of a report, of searches of 100, 1,000 and 20,000 trials.

The records are drawn: each trial has a config of its own, and figures of the usual size.
"""

import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.record import RECORD, Predicted, Record
from autofit.core.result import Result, tier
from autofit.report.html.page import report_page

TRIALS = (100, 1_000, 20_000)
MOST_SECONDS = 10.0  # of CPU, from the file to the page
MOST_BYTES = 3_000_000

_CARD = Hardware(
    "cuda", "a card", 24 * GIB, 64 * GIB, 60 * GIB, 8, capability=(8, 9), context_bytes=GIB // 2
)
_KNOBS = {
    "precision": ("bf16", "bf16-mixed", "fp32"),
    "micro_batch_size": (1, 2, 4, 8, 16, 32),
    "activation_checkpointing": ("none", "selective", "alternate", "full"),
    "lora_rank": (0, 4, 8, 16, 32, 64, 128),
    "optimizer": ("adamw", "adamw-8bit", "adafactor", "sgd"),
    "optimizer_offload": ("none", "cpu"),
    "activation_offload": ("none", "cpu"),
    "loss": ("standard", "chunked"),
    "attention": ("sdpa", "eager"),
    "compile": ("none", "default"),
}


def record_of(trials: int, seed: int = 0) -> Record:
    """The record of a search of so many trials, of which every fifth ran out of memory."""
    rng = random.Random(seed)
    combinations = list(itertools.islice(itertools.product(*_KNOBS.values()), 40_000))
    measurements = []
    for number, values in enumerate(rng.sample(combinations, trials)):
        config = Config(dict(zip(_KNOBS, values, strict=True)))
        nbytes = rng.randrange(4 * GIB, 22 * GIB)
        if number % 5 == 4:
            reason = f"out of memory: {nbytes / GIB:.3f} GiB more were asked for."
            peak = PeakBytes(23 * GIB)
            missed = Measurement(config, Outcome.OUT_OF_MEMORY, number, peak_bytes=peak)
            measurements.append(dataclasses.replace(missed, reason=reason, seconds=3.1))
            continue

        step = rng.uniform(0.5, 5.0)
        fits = Measurement(
            config,
            Outcome.FITS,
            number,
            step_seconds=StepSeconds(step, step * 0.99, step * 1.01),
            samples_per_second=32 / step,
            tokens_per_second=32 * 2048 / step,
            peak_bytes=PeakBytes(nbytes, nbytes + GIB // 4, nbytes + GIB // 2),
            seconds=rng.uniform(3, 9),
        )
        measurements.append(fits)

    best = max(measurements, key=lambda trial: trial.throughput)
    best = dataclasses.replace(best, verified=True)
    result = Result(
        model="drawn",
        workload={"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 32},
        source={"kind": "preset", "model": "drawn"},
        hardware=_CARD,
        budget=Budget(24 * GIB, 60 * GIB),
        versions={"autofit": "0"},
        best=best,
        tiers={name: best if name == tier(best.config) else None for name in ("full", "lora")},
        trials=tuple(measurements),
        skipped={"predicted": 1, "dominated": 2, "refused": 3},
        stopped_by="bound",
        space_size=len(combinations),
        search_seconds=4.0 * trials,
        finalists=(best,),
    )
    predicted = tuple(Predicted(rng.randrange(4 * GIB, 22 * GIB), 1.0) for _ in measurements)
    return Record(result, {"seed": seed, "tolerance": 0.03}, predicted)


def figures(trials: int) -> tuple[float, int]:
    """Seconds of CPU that a report takes from the file, and the bytes of its page."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / RECORD).write_text(record_of(trials).to_text(), encoding="utf-8")
        start = time.process_time()
        page = report_page(Record.of_run(directory), directory)
        return time.process_time() - start, len(page.encode())


def main(trials: Sequence[int] = TRIALS) -> dict[str, list[float]]:
    """Print, and return by the number of trials, the seconds and the bytes of a report."""
    figures(10)  # imports, and the template
    found = {}
    for number in trials:
        seconds, nbytes = figures(number)
        found[str(number)] = [round(seconds, 2), nbytes]
        print(f"{number:>7,} trials: {seconds:6.2f} s of CPU, {nbytes / 1e6:.2f} MB", flush=True)
        if seconds > MOST_SECONDS or nbytes > MOST_BYTES:
            print(f"That is more than {MOST_SECONDS:g} s or {MOST_BYTES / 1e6:g} MB.", flush=True)
    return found
