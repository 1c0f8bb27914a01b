"""The search of an 8B model within 24 GiB, replayed against what cards have shown: how good it is, and what it costs.

A synthetic truth: each config of the space takes what is predicted of it, divided by how far predictions were off in
the measured configs of its kind (`kinds`). Its probes differ by as much as two probes of one config did, and take the
seconds that probes of its kind took. What nothing was measured of is taken to be predicted rightly, so a replay says
what the search makes of errors that are known, not of those that are not.

What is best is so by discounted speed, as in a search by default, and by speed alone (`--prefer fast`). A quick search
(`--fast`) looks at a part of the space, and is held against the best of all of it.
"""

from __future__ import annotations

import functools
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
from autofit.core.options import BALANCED, FAST, SearchOptions
from autofit.core.plain import from_plain
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.models import resolve
from autofit.search.objectives.discounted import PREFERENCES
from autofit.search.predictions import Predictions
from autofit.search.ranking import Ranking
from autofit.search.space import Space
from autofit.tuning.narrowing import Narrowing
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
from benchmarks.replay_samplers import AGAIN, Problem, Replay

NOISE = 0.04  # of a probe on a card, as a share of its step
_PROBES = 25  # at most in a replay
_SEQUENCE = 2048
_BUILD, _STEPS = 3.0, 2.0  # seconds of a probe of what stays on the card
# more: to pin weights, to compile, to compile torchao's optimizers
_STREAMED, _COMPILING, _LOW_BIT = (9.0, 37.0, 8.0)
# What is compiled again is found in Inductor's cache: on two cores a small Llama's steps compiled in 7.8 and 20.9 s,
# and in another process again in 2.4 and 1.5 s. No card has shown it.
_COMPILING_AGAIN = 0.3
_LOW_BIT_OPTIMIZERS = ("adamw-4bit", "adamw-8bit-sr", "adamw-fp8", "adamw-sr")
AT, AT_SECONDS = (1, 2, 5, 10), (60, 120, 180)  # probes, and seconds of them


@dataclass(frozen=True)
class SyntheticTruth(Mapping[Config, Recorded]):
    """A row for each config, made when it is asked for."""

    expected: Predictions
    ratios: Mapping[str, float]  # predicted over measured step times, by kind

    def seconds(self, config: Config) -> float:
        """Of a step."""
        return float(self.expected.seconds[config] / self.ratios.get(kind_of(config), 1.0))

    def __getitem__(self, config: Config) -> Recorded:
        seconds = self.seconds(config)
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
    seconds = build + warm_up + _STEPS
    again = seconds - (1 - _COMPILING_AGAIN) * _COMPILING if is_compiled else seconds
    return {
        "step_seconds": asdict(StepSeconds(median=step, low=step, high=step)),
        "build_seconds": build,
        "warmup_seconds": warm_up,
        "seconds": seconds,
        AGAIN: again,
    }


@dataclass(frozen=True)
class Truths:
    """The search of a card, with the errors that all its measured rows show.

    Attributes:
        narrowing: tells the part of the space that a quick search looks at.
        ratios: as of `SyntheticTruth`.
        cap_bytes: what tensors may take.
    """

    workload: Workload
    hardware: Hardware
    space: Space
    narrowing: Narrowing
    ratios: Mapping[str, float]
    cap_bytes: int

    @classmethod
    def of(cls, directory: Path) -> Truths:
        """Of the card whose rows are stored there."""
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

        gib = CARD.budgets[0]
        settings = {knob: tuple(values) for knob, values in CARD.settings.items()}
        # Eager attention is never faster, and without it the space can be listed.
        settings.setdefault("attention", ("flash", "sdpa"))
        options = SearchOptions(space=CARD.space, set=settings, device=hardware.device, gpu_mem=gib)
        cap_bytes = budget_of(gib).cap_bytes(hardware.device, hardware.context_bytes)
        predict = functools.partial(
            predict_all, workload, hardware, processes=None, host_bytes=UNLIMITED
        )
        return cls(
            workload,
            hardware,
            space_for(options, workload, hardware),
            Narrowing(workload, hardware, cap_bytes, predict, options.seed),
            ratios,
            cap_bytes,
        )

    def problem(self, space: Space) -> Problem:
        """The search of a space for the fastest."""
        constraints = techniques.constraints(self.workload, self.hardware)
        configs = list(space.configs(constraints, self.narrowing.seed))
        nbytes, seconds = self.narrowing.predict(configs)
        known = [place for place, each in enumerate(seconds) if not math.isnan(each)]
        expected = Predictions.of(
            *([each[place] for place in known] for each in (configs, nbytes, seconds))
        )
        truth = SyntheticTruth(expected, self.ratios)
        samples = self.workload.effective_batch_size
        return Problem(space, constraints, expected, truth, self.cap_bytes, samples)


def told(directories: Sequence[Path], seeds: int) -> str:
    """What the search comes to on each card that figures are kept of, over so many seeds."""
    lines = []
    for directory in directories:
        truths = Truths.of(directory)
        whole = truths.problem(truths.space)
        part = truths.narrowing.quick(truths.space)
        quick = truths.problem(part) if part else whole
        lines.append(
            f"{truths.hardware.name}: {CARD.model} within {CARD.budgets[0]:g} GiB, {len(whole.rows):,} configs"
        )
        for prefer in (BALANCED, FAST):
            ranking = Ranking(0.0, lambda config: (), PREFERENCES[prefer])
            best, most = _best(replace(whole, ranking=ranking))
            lines.append(
                f"--prefer {prefer}: the best is {kind_of(best)}, micro-batch {best['micro_batch_size']}"
            )
            lines += _searches(replace(whole, ranking=ranking), most, seeds, quick=False)
            lines.append(f"--prefer {prefer} --fast, {len(quick.rows):,} configs")
            lines += _searches(replace(quick, ranking=ranking), most, seeds, quick=True)

    return "\n".join(lines) or "no card has shown anything yet"


def _searches(problem: Problem, most: float, seeds: int, *, quick: bool) -> Iterator[str]:
    """A line for each seed, and the mean."""
    sampler = replay_samplers.QUICK if quick else replay_samplers.AUTOFIT[0]
    answers = []
    for seed in range(seeds):
        start = time.monotonic()
        run = replay_samplers.replay(sampler, problem, seed, _PROBES)
        regrets = [1 - _merit(problem, each) / most if each else 1.0 for each in run.leaders]
        answers.append(regrets[-1])
        yield _line(run, regrets, seed, time.monotonic() - start)

    yield f"  mean regret of the answer: {statistics.mean(answers):.1%}"


def _merit(problem: Problem, config: Config) -> float:
    """Samples per second without noise, discounted as the objective says."""
    assert isinstance(problem.rows, SyntheticTruth)
    speed = problem.samples / problem.rows.seconds(config)
    return speed / problem.ranking.objective.discount(config)


def _best(problem: Problem) -> tuple[Config, float]:
    """The best config that fits, and its merit."""
    merits = {
        config: _merit(problem, config)
        for config, nbytes in problem.expected.nbytes.items()
        if nbytes <= problem.budget
    }
    best = max(merits, key=lambda config: merits[config])
    return best, merits[best]


def _line(run: Replay, regrets: Sequence[float], seed: int, proposing: float) -> str:
    probed = len(run.seen)
    by_probes = [regrets[min(at, probed) - 1] for at in AT]
    by_seconds = [_regret_at(regrets, run.ended[:probed], at) for at in AT_SECONDS]
    answer = run.leaders[-1]
    return (
        f"  seed {seed}: regret after {_listed(AT)} probes {_shares(by_probes)},"
        f" after {_listed(AT_SECONDS)} s of probes {_shares(by_seconds)};"
        f" {probed} probes {run.ended[probed - 1]:.0f} s, finals {run.ended[-1] - run.ended[probed - 1]:.0f} s,"
        f" proposing {proposing:.0f} s here; answer {kind_of(answer) if answer else 'none'}, {regrets[-1]:.1%}"
    )


def _regret_at(regrets: Sequence[float], ended: Sequence[float], seconds: float) -> float:
    """The regret of what was known after so many seconds; 1 while nothing was."""
    done = sum(each <= seconds for each in ended)
    return regrets[done - 1] if done else 1.0


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{each:.1%}" for each in values)
