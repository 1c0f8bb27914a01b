"""The search of an 8B model within 24 GiB, replayed against what cards have shown: how good it is, and what it costs.

A synthetic truth: each config of the space takes what is predicted of it, divided by how far predictions were off in
the measured configs of its kind (`kinds`). Its probes differ by as much as two probes of one config did, and take the
seconds that probes of its kind took. What nothing was measured of is taken to be predicted rightly, so a replay says
what the search makes of errors that are known, not of those that are not.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autofit import techniques
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Outcome, StepSeconds
from autofit.core.options import SearchOptions
from autofit.core.plain import from_plain
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.models import resolve
from autofit.search.predictions import Predictions
from autofit.tuning.space import space_for
from benchmarks import replay_samplers
from benchmarks.gpu.bench import stored_traits
from benchmarks.gpu.kinds import by_kind, kind_of, mean_ratio
from benchmarks.gpu.listed import STAGE as LISTED
from benchmarks.gpu.measured import STAGE as MEASURED
from benchmarks.gpu.measured import UNLIMITED
from benchmarks.gpu.search import CARD, budget_of
from benchmarks.gpu.store import Row, Store
from benchmarks.record_table import Row as Recorded
from benchmarks.replay_samplers import Problem, Replay

NOISE = 0.04  # of a probe on a card, as a share of its step
_PROBES = 25  # at most in a replay
_SEQUENCE = 2048
_BUILD, _STEPS = 3.0, 2.0  # seconds of a probe of what stays on the card
# more: to pin weights, to compile, to compile torchao's optimizers
_STREAMED, _COMPILING, _LOW_BIT = (9.0, 37.0, 8.0)
_LOW_BIT_OPTIMIZERS = ("adamw-4bit", "adamw-8bit-sr", "adamw-fp8", "adamw-sr")
AT, AT_SECONDS = (1, 2, 5, 10), (60, 120, 180)  # probes, and seconds of them


@dataclass(frozen=True)
class SyntheticTruth(Mapping[Config, Recorded]):
    """A row for each config, made when it is asked for."""

    expected: Predictions
    ratios: Mapping[str, float]  # predicted over measured step times, by kind

    def __getitem__(self, config: Config) -> Recorded:
        seconds = self.expected.seconds[config] / self.ratios.get(kind_of(config), 1.0)
        chance = random.Random(json.dumps(dict(config), sort_keys=True))
        probes = [_probe(config, seconds * math.exp(chance.gauss(0.0, NOISE))) for _ in range(3)]
        return Recorded(config, Outcome.FITS, int(self.expected.nbytes[config]), None, probes)

    def __iter__(self) -> Iterator[Config]:
        return iter(self.expected.nbytes)

    def __len__(self) -> int:
        return len(self.expected.nbytes)


def _probe(config: Config, step: float) -> dict[str, object]:
    """One probe of a config, with its seconds as on a card."""
    is_streamed = config.get("parameter_offload", "none") != "none"
    is_compiled = config.get("compile", "none") != "none"
    build = _BUILD + (_STREAMED if is_streamed else 0.0)
    warm_up = step + (_COMPILING if is_compiled else 0.0)
    if config.get("optimizer") in _LOW_BIT_OPTIMIZERS:
        warm_up += _LOW_BIT
    return {
        "step_seconds": asdict(StepSeconds(median=step, low=step, high=step)),
        "build_seconds": build,
        "warmup_seconds": warm_up,
        "seconds": build + warm_up + _STEPS,
    }


def problem_of(directory: Path) -> tuple[Problem, Hardware]:
    """The search that is replayed, on the card of a store, with the errors that all its rows show."""
    store = Store(directory / "items.jsonl")
    about = store.rows("about")[""]
    hardware = replace(from_plain(Hardware, about["hardware"]), here=False)
    traits = stored_traits(store, CARD.model)
    plain = resolve(
        CARD.model, sequence_length=_SEQUENCE, effective_batch_size=CARD.effective_batch_size
    )
    workload = replace(plain, traits=traits)

    rows: list[Row] = [*store.rows(MEASURED).values(), *store.rows(LISTED).values()]
    ratios = {
        kind: ratio for kind, of_kind in by_kind(rows).items() if (ratio := mean_ratio(of_kind))
    }
    return _problem(workload, hardware, CARD.budgets[0], ratios), hardware


def _problem(
    workload: Workload, hardware: Hardware, gib: float, ratios: Mapping[str, float]
) -> Problem:
    settings = {knob: tuple(values) for knob, values in CARD.settings.items()}
    options = SearchOptions(space=CARD.space, set=settings, device=hardware.device, gpu_mem=gib)
    space = space_for(options, workload, hardware)
    constraints = techniques.constraints(workload, hardware)
    configs = list(space.configs(constraints, options.seed))

    nbytes, seconds = predict_all(workload, hardware, configs, processes=None, host_bytes=UNLIMITED)
    known = [place for place, each in enumerate(seconds) if not math.isnan(each)]
    expected = Predictions.of(
        *([each[place] for place in known] for each in (configs, nbytes, seconds))
    )
    cap = budget_of(gib).cap_bytes(hardware.device, hardware.context_bytes)
    samples = workload.effective_batch_size
    return Problem(space, constraints, expected, SyntheticTruth(expected, ratios), cap, samples)


def told(directories: Sequence[Path], seeds: int) -> str:
    """What the search comes to on each card that figures are kept of, over so many seeds."""
    lines = []
    for directory in directories:
        problem, hardware = problem_of(directory)
        best, most = _best(problem)
        tokens = _SEQUENCE * most
        lines.append(
            f"{hardware.name}: {CARD.model} within {CARD.budgets[0]:g} GiB, {len(problem.rows):,} configs"
        )
        lines.append(
            f"the best of them: {tokens:,.0f} tokens/s, {kind_of(best)}, micro-batch {best['micro_batch_size']}"
        )
        runs = []
        for seed in range(seeds):
            start = time.monotonic()
            run = replay_samplers.replay(replay_samplers.AUTOFIT[0], problem, seed, _PROBES)
            lines.append(_line(problem, run, most, seed, time.monotonic() - start))
            runs.append(run)
        regret = statistics.mean(_regrets(problem, run, most)[-1] for run in runs)
        lines.append(f"mean regret of the answer: {regret:.1%}")
    return "\n".join(lines) or "no card has shown anything yet"


def _best(problem: Problem) -> tuple[Config, float]:
    """The fastest config that fits, and its samples per second."""
    expected, truth = problem.expected, problem.rows
    assert isinstance(truth, SyntheticTruth)
    seconds = {
        config: expected.seconds[config] / truth.ratios.get(kind_of(config), 1.0)
        for config, nbytes in expected.nbytes.items()
        if nbytes <= problem.budget
    }
    best = min(seconds, key=lambda config: seconds[config])
    return best, problem.samples / seconds[best]


def _regrets(problem: Problem, run: Replay, most: float) -> list[float]:
    """1 - throughput of what would be returned / of the best that fits, after each probe."""
    return [max(0.0, 1 - problem.throughput(each) / most) if each else 1.0 for each in run.leaders]


def _line(problem: Problem, run: Replay, most: float, seed: int, proposing: float) -> str:
    regrets = _regrets(problem, run, most)
    probed = len(run.seen)
    by_probes = [regrets[min(at, probed) - 1] for at in AT]
    by_seconds = [_regret_at(regrets, run.ended[:probed], at) for at in AT_SECONDS]
    answer = run.leaders[-1]
    return (
        f"  seed {seed}: regret after {_listed(AT)} probes {_shares(by_probes)},"
        f" after {_listed(AT_SECONDS)} s of probes {_shares(by_seconds)};"
        f" {probed} probes {run.ended[probed - 1]:.0f} s, finals {run.ended[-1] - run.ended[probed - 1]:.0f} s,"
        f" proposing {proposing:.0f} s here; answer {kind_of(answer) if answer else 'none'}"
    )


def _regret_at(regrets: Sequence[float], ended: Sequence[float], seconds: float) -> float:
    """The regret of what was known after so many seconds; 1 while nothing was."""
    done = sum(each <= seconds for each in ended)
    return regrets[done - 1] if done else 1.0


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{each:.1%}" for each in values)
