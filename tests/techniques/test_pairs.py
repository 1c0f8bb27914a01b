"""Composition: every pair of values of different knobs works together, or the technique that minds refuses it.

A covering array (Cohen et al. 1997, the AETG system) holds each pair of values that is not always refused in at least
one config. Each of its configs is built and trains two steps.
"""

import itertools
import random
import re
from functools import cache

import pytest
import tiny
import torch
from contract import EFFECTIVE_BATCH, reason_against, values_of

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hyperparameters import Hyperparameters
from autofit.techniques import all_techniques, refuse, settle, technique_named
from autofit.training.build import build
from autofit.training.loop import train_step

WORKLOAD = tiny.llama_workload(EFFECTIVE_BATCH)
TRIES = 60  # completions of a pair that are looked at, before it is taken to be always refused
SELDOM = {"compile": 0.8}  # how often a completion leaves a knob off that makes a config slow to test

# What Dynamo stumbles over while it reads other libraries' code; runs go on, and tests make errors of warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

Pair = frozenset[tuple[str, Value]]


def all_values() -> dict[str, list[Value]]:
    """Every value that this machine does not refuse by itself; numbers by their stand-ins."""
    return {
        technique.name: [value for value in values_of(technique) if not reason_against(technique.name, value)]
        for technique in all_techniques()
        if technique.name != "gradient_accumulation_steps"  # derived
    }


def pairs_of(config: Config, values: dict[str, list[Value]]) -> set[Pair]:
    held = [(knob, config[knob]) for knob in values]
    return {frozenset(pair) for pair in itertools.combinations(held, 2)}


def legal_config(fixed: dict[str, Value], values: dict[str, list[Value]], draw: random.Random) -> Config | None:
    """A canonical config with these knobs that is not refused; None where none of a number of tries is one."""
    for attempt in range(TRIES):
        others = {knob: _drawn(knob, each, draw, attempt) for knob, each in values.items()}
        config = settle({**others, **fixed}, WORKLOAD, tiny.CPU)
        if all(config[knob] == value for knob, value in fixed.items()) and not refuse(config, WORKLOAD, tiny.CPU):
            return config
    return None


def _drawn(knob: str, values: list[Value], draw: random.Random, attempt: int) -> Value:
    """Any value; the more often it was refused, the more knobs stay off."""
    off = technique_named(knob).off
    return off if draw.random() < max(SELDOM.get(knob, 0), attempt / TRIES) else draw.choice(values)


@cache
def covering_array() -> tuple[tuple[Config, ...], frozenset[Pair]]:
    """Legal configs that hold every pair at least once, and the pairs that no legal config holds."""
    values, draw = all_values(), random.Random(0)
    wanted = {
        frozenset(((one, v), (other, w)))
        for one, other in itertools.combinations(values, 2)
        for v, w in itertools.product(values[one], values[other])
    }
    chosen: list[Config] = []
    impossible: set[Pair] = set()
    while missing := sorted(wanted, key=lambda pair: sorted(map(repr, pair))):
        pair = draw.choice(missing)
        candidates = [legal_config(dict(pair), values, draw) for _ in range(6)]
        legal = [config for config in candidates if config is not None]
        if not legal:
            impossible.add(pair)
            wanted.remove(pair)
            continue
        best = max(legal, key=lambda config: len(pairs_of(config, values) & wanted))
        chosen.append(best)
        wanted -= pairs_of(best, values)
    return tuple(chosen), frozenset(impossible)


@pytest.mark.parametrize("number", range(len(covering_array()[0])))
def test_it_trains_or_is_refused_when_built(number: int) -> None:
    config = covering_array()[0][number]
    torch.manual_seed(0)
    model = WORKLOAD.model()
    try:
        setup = build(WORKLOAD, config, tiny.CPU, model=model, hyperparameters=Hyperparameters(lr=1e-3))
    except RefusedError as refused:
        assert re.match(r"\w.*[;.,] .*\.$", str(refused)), config
        return
    losses = [train_step(setup, WORKLOAD.batch(EFFECTIVE_BATCH)) for _ in range(2)]
    assert all(loss.isfinite() for loss in losses), config
    setup.close()


def test_what_never_works_together_is_refused_in_a_sentence_with_the_remedy() -> None:
    for pair in covering_array()[1]:
        config = settle(dict(pair), WORKLOAD, tiny.CPU)
        if any(config[knob] != value for knob, value in pair):
            continue  # settling made it another config: one of the two means nothing here
        reason = refuse(config, WORKLOAD, tiny.CPU)
        assert reason, f"{dict(pair)} is never legal, but the reason is not that pair"
        assert re.match(r"\w+: \w.*[;.,] .*\.$", reason), reason
