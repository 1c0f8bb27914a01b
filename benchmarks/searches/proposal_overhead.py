"""What choosing the next config costs, beside the probes themselves: a whole search whose probes take no time.

`python -m benchmarks.proposal_overhead [--model llama-3.1-8b] [--gpu h100] [--devices 1] [--configs 50000]
[--trials 40] [--json]`

The space is all that a search of that model on that card would choose from, with what the estimator predicts of it; a
probe answers at once with its prediction, up to noise. What passes from one answer to the next question is the search's
own: the journal, Optuna, and weighing every config anew.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from autofit import techniques
from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.estimate.figures import predict_all
from autofit.models import resolve
from autofit.search import study
from autofit.search.journal import Journal
from autofit.search.predictions import Predictions
from autofit.search.space import load_space
from autofit.search.study import Limits, SearchProblem, search
from autofit.tuning.narrowing import Narrowing
from autofit.tuning.space import knob_choices
from benchmarks.estimate_space import hardware_of

NOISE, OFF_BY = 0.01, 0.1  # of a probe, and of a prediction


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpu-mem", type=float, default=24.0)
    parser.add_argument("--space", default="everything")
    parser.add_argument("--configs", type=int, default=50_000)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures = overhead(given)
    print(json.dumps(figures, indent=1) if given.json else line(figures))


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds from one probe's answer to the next probe."""
    hardware = hardware_of(given.gpu).of_several(given.devices)
    workload = resolve(given.model, effective_batch_size=32)
    constraints = techniques.constraints(workload, hardware)
    predict = functools.partial(predict_all, workload, hardware, processes=None)
    whole = load_space(given.space, knob_choices(workload, hardware))
    narrowing = Narrowing(workload, hardware, given.gpu_mem * 2**30, predict, seed=0)
    space, _ = narrowing.narrowed(whole)
    answers = _Answers(int(given.gpu_mem * 2**30))

    def expect(configs: Sequence[Config]) -> Predictions:
        answers.expected = Predictions.of(configs, *predict(configs))
        return answers.expected

    problem = SearchProblem(
        probe=answers.probe,
        constraints=constraints,
        memory_order=lambda knob, value: techniques.technique_named(knob).memory_order(value),
        on_finished=lambda measurement, best: None,
        predict=expect,
    )
    limits = Limits(trials=given.trials, memory_bytes=answers.budget)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(study, "_MOST_SCORED", given.configs),
    ):
        found = search(
            space, problem, limits=limits, journal=Journal(Path(folder) / "journal.log", {})
        )
    seconds = answers.between
    return {
        "model": given.model,
        "configs": min(given.configs, found.space_size),
        "proposals": len(seconds),
        "median_seconds": statistics.median(seconds),
        "mean_seconds": statistics.fmean(seconds),
        "worst_seconds": max(seconds),
    }


class _Answers:
    """Probes that answer at once, and when they were asked."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.expected: Predictions | None = None
        self.between: list[float] = []
        self._answered: float | None = None

    def probe(self, number: int, config: Config, best: float | None) -> Measurement:
        if self._answered is not None:
            self.between.append(time.perf_counter() - self._answered)
        seen = self._seen(number, config)
        self._answered = time.perf_counter()
        return seen

    def _seen(self, number: int, config: Config) -> Measurement:
        assert self.expected, "a search asks what to expect first"
        peak = self.expected.nbytes[config]
        size = PeakBytes(int(peak))
        if not peak <= self.budget:
            return Measurement(config, Outcome.OUT_OF_MEMORY, number, peak_bytes=size, seconds=20.0)
        off = random.Random(config.key).gauss(0, OFF_BY) + random.Random(number).gauss(0, NOISE)
        seconds = self.expected.seconds[config] * math.exp(off)
        steps = StepSeconds(seconds, seconds, seconds)
        rate = 32 / seconds
        return Measurement(
            config,
            Outcome.FITS,
            number,
            step_seconds=steps,
            samples_per_second=rate,
            peak_bytes=size,
            seconds=30.0,
        )


def line(figures: dict[str, Any]) -> str:
    """One line of figures."""
    return (
        f"{figures['model']}: choosing among {figures['configs']:,} configs took"
        f" {1e3 * figures['median_seconds']:.0f} ms in the median of {figures['proposals']} proposals"
        f" (mean {1e3 * figures['mean_seconds']:.0f}, worst {1e3 * figures['worst_seconds']:.0f})"
    )


if __name__ == "__main__":
    main()
