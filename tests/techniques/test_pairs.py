"""Composition: every pair of values of different knobs works together, or the technique that minds refuses it.

A covering array (Cohen et al. 1997, the AETG system) holds each pair of values that is not always refused in at least
one config. Each of its configs is built and trains two steps.

Values of `compile` other than off count as one value here: they differ in which kernels Inductor chooses, long after
it was given what was traced. So do the budgets of activation_checkpointing (one graph, cut at another place), and
optimizers and frozen weights of one kind of format. The contract's tests try each of them alone. Tracing a block takes
seconds, so what only a compiled config can hold is covered first, by as few as a climb finds, and all else by configs
that are not compiled.
"""

import contextlib
import itertools
import random
import re
from collections.abc import Callable
from functools import cache

import pytest
import torch

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Hyperparameters
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.techniques.contract import (
    EFFECTIVE_BATCH,
    ON_ONE_DEVICE,
    knobs,
    reason_against,
    values_of,
)

WORKLOAD = tiny.llama_workload(EFFECTIVE_BATCH)
COMPILE = technique_named("compile")
TRIES = 30  # completions of a pair that are looked at, before it is taken to be always refused
CLIMBS = 4  # to a config that is compiled, of which the best is taken
SHARES = 10  # tests that the configs are dealt out to: how many configs there are is not known before it is worked out

# What Dynamo stumbles over while it reads other libraries' code; runs go on, and tests make errors of warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]

ALIKE = {  # optimizers of one library, for the same weights; formats of one kind
    **dict.fromkeys(("adamw-8bit", "lion-8bit"), "bitsandbytes"),
    **dict.fromkeys(("adafactor", "muon"), "torch, weight by weight"),
    **dict.fromkeys(("adamw-4bit", "adamw-fp8"), "torchao"),
    **dict.fromkeys(("adamw-sr", "adamw-8bit-sr"), "torchao, rounded"),
    **dict.fromkeys(("nf4", "nf4-dq"), "4 bits"),
}
# What a compiled block takes as it comes, or what is done after it: whether it is off counts beside `compile`.
BESIDE_GRAPHS = ("optimizer", "lora_rank", "lora_alpha", "lora_dropout", "micro_batch_size")
NUMBERS = ("lora_rslora", "lora_plus")  # knobs that multiply by another number
Knobs = dict[str, Value]
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def all_values() -> dict[str, list[Value]]:
    """Every value that this machine does not refuse by itself; numbers by their stand-ins.

    Without knobs of which only one value is left: every config holds that.
    """
    values = {
        technique.name: [
            value for value in values_of(technique) if not reason_against(technique.name, value)
        ]
        for technique in ON_ONE_DEVICE
        if technique.name not in ("gradient_accumulation_steps", *NUMBERS)  # the former is derived
    }
    return {knob: each for knob, each in values.items() if len(each) > 1}


def pair_of(one: tuple[str, Value], other: tuple[str, Value]) -> Pair:
    """What counts as covered: compiled or not, under a budget or not; the kind of optimizer and of weights."""
    compiled = any(
        value != COMPILE.off if knob == COMPILE.name else str(value).startswith("budget-")
        for knob, value in (one, other)
    )

    def counted(knob: str, value: Value) -> Value:
        if knob == COMPILE.name:
            return value != COMPILE.off
        if compiled and knob in BESIDE_GRAPHS:
            return value != technique_named(knob).off
        return "budget" if str(value).startswith("budget-") else ALIKE.get(str(value), value)

    return (one[0], counted(*one)), (other[0], counted(*other))


class Cover:
    """Legal configs that hold every pair at least once, and the pairs that no legal config holds."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.impossible: list[Knobs] = []
        self._values = all_values()
        self._draw = random.Random(0)
        self._missing = {
            pair_of((one, v), (other, w)): {one: v, other: w}
            for one, other in itertools.combinations(self._values, 2)
            for v, w in itertools.product(self._values[one], self._values[other])
        }
        self._cover(
            {pair for pair, fixed in self._missing.items() if _compiled(fixed)},
            lambda fixed: {COMPILE.name: self._draw.choice(self._values[COMPILE.name][1:])} | fixed,
            climbs=CLIMBS,
        )
        self._cover(set(self._missing), lambda fixed: {COMPILE.name: COMPILE.off} | fixed, climbs=1)

    def _cover(self, wanted: set[Pair], beside: Callable[[Knobs], Knobs], climbs: int) -> None:
        while left := [pair for pair in self._missing if pair in wanted]:
            pair = self._draw.choice(left)
            fixed = beside(self._missing[pair])
            climbed = [
                self._climb(start, fixed, wanted)
                for _ in range(climbs)
                if (start := self._start(fixed))
            ]
            if not climbed:
                self.impossible.append(self._missing.pop(pair))
                continue
            self.configs.append(max(climbed, key=lambda config: self._gain(config, wanted)))
            for held in self._pairs(self.configs[-1]):
                self._missing.pop(held, None)

    def _start(self, fixed: Knobs) -> Config | None:
        """A legal config with these knobs: any values of the others; the more often it was none, the more are off."""
        for attempt in range(TRIES):
            config = self._legal({knob: self._drawn(knob, attempt) for knob in self._values}, fixed)
            if config:
                return config
        return None

    def _drawn(self, knob: str, attempt: int) -> Value:
        off = self._draw.random() < attempt / TRIES
        return technique_named(knob).off if off else self._draw.choice(self._values[knob])

    def _climb(self, config: Config, fixed: Knobs, wanted: set[Pair]) -> Config:
        """Exchange one knob's value after the other's for what gains most."""
        for knob in self._draw.sample(list(self._values), len(self._values)):
            held = {each: config[each] for each in self._values}
            others = [self._legal({**held, knob: value}, fixed) for value in self._values[knob]]
            config = max([config, *filter(None, others)], key=lambda each: self._gain(each, wanted))
        return config

    def _legal(self, given: Knobs, fixed: Knobs) -> Config | None:
        config = canonicalize({**given, **fixed}, WORKLOAD, tiny.CPU)
        kept = all(config[knob] == value for knob, value in fixed.items())
        return config if kept and not refuse(config, WORKLOAD, tiny.CPU) else None

    def _gain(self, config: Config, wanted: set[Pair]) -> float:
        """How many missing pairs it holds, by what it takes: to trace adapters takes four times as long as all else."""
        new = sum(pair in self._missing and pair in wanted for pair in self._pairs(config))
        return new / 4 if config[COMPILE.name] != COMPILE.off and config["lora_rank"] else new

    def _pairs(self, config: Config) -> list[Pair]:
        return list(
            itertools.starmap(
                pair_of, itertools.combinations([(k, config[k]) for k in self._values], 2)
            )
        )


def _compiled(held: Knobs) -> bool:
    """Whether these knobs, or what one of them means nothing without, are of a config that is compiled."""
    needed = (knobs(knob, value).get(COMPILE.name, COMPILE.off) for knob, value in held.items())
    return any(value != COMPILE.off for value in needed)


cover = cache(Cover)


@pytest.mark.parametrize("share", range(SHARES))
def test_it_trains_or_is_refused_when_built(share: int) -> None:
    # in this order: what is compiled forgets what torchao compiled for others
    configs = cover().configs
    for config in configs[share * len(configs) // SHARES : (share + 1) * len(configs) // SHARES]:
        try:
            train(config)
        except Exception as error:
            error.add_note(f"This is of {config}.")
            raise


def train(config: Config) -> None:
    torch.manual_seed(0)
    model = WORKLOAD.model()
    try:
        setup = build(
            WORKLOAD, config, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=1e-3)
        )
    except RefusedError as refused:
        assert re.match(r"\w.*[;.,] .*\.$", str(refused))
        return
    with contextlib.closing(setup):
        losses = [train_step(setup, WORKLOAD.batch(EFFECTIVE_BATCH)) for _ in range(2)]
    assert all(loss.isfinite() for loss in losses)


def test_what_never_works_together_is_refused_in_a_sentence_with_the_remedy() -> None:
    for pair in cover().impossible:
        config = canonicalize(pair, WORKLOAD, tiny.CPU)
        if any(config[knob] != value for knob, value in pair.items()):
            continue  # settling made it another config: one of the two means nothing here
        reason = refuse(config, WORKLOAD, tiny.CPU)
        assert reason, f"{pair} is never legal, but the reason is not that pair"
        assert re.match(r"\w+: \w.*[;.,] .*\.$", reason), reason
