"""What a prediction costs, and how well thousands predicted at once are ranked: issue by issue the figures of README.

`python -m benchmarks.estimate_space [--model llama-3.1-8b] [--samples 100] [--smoke] [--out FILE]`; about ten minutes
for a model of 8 billion parameters on 2 cores, most of them for the full estimates that the ranking is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from autofit import techniques
from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Workload
from autofit.estimate.estimator import predict
from autofit.estimate.figures import predict_all
from autofit.estimate.rates import rates_for
from autofit.hardware.catalogue import card
from autofit.models import resolve
from autofit.search.space import load_space
from autofit.tuning.space import knob_choices
from benchmarks.gpu.cases import TINY

SINGLE = {  # what one prediction is timed for, and the seconds it may take
    "full": ({"precision": "bf16", "micro_batch_size": 1, "activation_checkpointing": "full"}, 3.0),
    "lora": ({"precision": "bf16", "micro_batch_size": 1, "lora_rank": 16}, 6.0),
    "qlora": (
        {"precision": "bf16", "micro_batch_size": 1, "lora_rank": 16, "quantization": "nf4"},
        6.0,
    ),
}
_ROUNDS = 3  # predictions of which the median is taken
COLD, WARM, DEEP, RESIDENT, CORRELATION = 60.0, 2.0, 10.0, 1.5 * GIB, 0.98


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--deep", default="llama-2-70b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--space")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a small model, in seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.deep, options.samples = str(TINY), str(TINY), 3
    options.space = options.space or ("exact" if options.smoke else "everything")
    # A cache of its own, or what is asked first would be there from a former run.
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        figures = _figures(options)
    print(report(figures))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    hardware, rounds = hardware_of(options.gpu), 1 if options.smoke else _ROUNDS
    workload = resolve(options.model, effective_batch_size=32)
    deep = resolve(options.deep, effective_batch_size=32)
    figures: dict[str, Any] = {"model": options.model, "deep": options.deep, "gpu": hardware.name}
    figures["single"] = {
        name: seconds_of(workload, hardware, knobs, rounds) for name, (knobs, _) in SINGLE.items()
    }
    figures["deep_seconds"] = seconds_of(deep, hardware, SINGLE["full"][0], rounds)
    figures |= ranking(workload, hardware, space=options.space, samples=options.samples)
    figures["resident_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return figures


def hardware_of(name: str) -> Hardware:
    """A card of the catalogue in a machine with plenty of host memory."""
    known = card(name)
    return Hardware(
        "cuda",
        known.title,
        known.memory_bytes,
        512 * GIB,
        512 * GIB,
        16,
        capability=known.capability,
    )


def seconds_of(
    workload: Workload, hardware: Hardware, knobs: Mapping[str, Any], rounds: int
) -> float:
    """The median of some predictions, after one that imports what it needs."""
    predict(workload, knobs, hardware, rates=rates_for(hardware))
    return float(
        np.median([_seconds(lambda: predict(workload, knobs, hardware)) for _ in range(rounds)])
    )


def ranking(workload: Workload, hardware: Hardware, *, space: str, samples: int) -> dict[str, Any]:
    """Seconds for the whole space, cold and from the cache, and Spearman's correlation with full estimates."""
    configs = legal_configs(workload, hardware, space)
    found: list[Any] = []
    cold, busy = (
        _seconds(lambda: found.append(predict_all(workload, hardware, configs))),
        time.process_time(),
    )
    warm = _seconds(lambda: found.append(predict_all(workload, hardware, configs)))
    assert np.array_equal(found[0][0], found[1][0], equal_nan=True)
    nbytes, seconds = found[0]
    chosen = random.Random(0).sample(range(len(configs)), min(samples, len(configs)))
    full, rough = [], []
    for number in chosen:
        try:
            exact = predict(workload, configs[number], hardware, rates=rates_for(hardware))
        except AutofitError:
            continue
        full.append((exact.allocated_bytes, exact.step_seconds))
        rough.append((nbytes[number], seconds[number]))
    errors = np.array([b[0] / a[0] - 1 for a, b in zip(full, rough, strict=True)])
    return {
        "configs": len(configs),
        "unknown": int(np.isnan(nbytes).sum()),
        "cold_seconds": cold,
        "processor_seconds": busy,
        "warm_seconds": warm,
        "compared": len(full),
        "bytes_spearman": spearman([a[0] for a in full], [b[0] for b in rough]),
        "seconds_spearman": spearman([a[1] for a in full], [b[1] for b in rough]),
        "bytes_error_median": float(np.median(np.abs(errors))),
        "bytes_error_worst": float(np.max(np.abs(errors))),
    }


def legal_configs(workload: Workload, hardware: Hardware, space: str) -> list[Config]:
    """The configs of a space that a search would choose from."""
    return list(
        load_space(space, knob_choices(workload, hardware)).configs(
            techniques.constraints(workload, hardware)
        )
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """The correlation of ranks, ties at their mean rank."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    given = np.asarray(values, dtype=float)
    return np.array([(given < each).sum() + (given == each).sum() / 2 for each in given])


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(figures: Mapping[str, Any]) -> str:
    """The figures beside what they should be."""
    rows = [
        *(
            (f"one config, {name}", f"{figures['single'][name]:.1f} s", f"{most:.0f} s")
            for name, (_, most) in SINGLE.items()
        ),
        (f"one config of {figures['deep']}", f"{figures['deep_seconds']:.1f} s", f"{DEEP:.0f} s"),
        (f"{figures['configs']:,} configs", f"{figures['cold_seconds']:.1f} s", f"{COLD:.0f} s"),
        ("the same from the cache", f"{figures['warm_seconds']:.2f} s", f"{WARM:.0f} s"),
        (
            f"ranks of bytes, {figures['compared']} configs",
            f"{figures['bytes_spearman']:.4f}",
            f"{CORRELATION}",
        ),
        ("ranks of seconds", f"{figures['seconds_spearman']:.4f}", f"{CORRELATION}"),
        ("resident memory", f"{figures['resident_gib']:.2f} GiB", f"{RESIDENT / GIB:.1f} GiB"),
    ]
    lines = [
        f"{figures['model']} on {figures['gpu']}",
        *(f"  {a:44} {b:>10}  (wanted: {c})" for a, b, c in rows),
    ]
    worst = f"{figures['bytes_error_worst']:.1%}"
    return "\n".join(
        [
            *lines,
            f"  bytes differ by {figures['bytes_error_median']:.2%} in the median, {worst} at most",
        ]
    )


if __name__ == "__main__":
    main()
