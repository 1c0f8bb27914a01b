"""From usual configs to one of each tier that no change of one or two knobs improves, seeing little of the space."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.result import tier
from autofit.estimate.figures import predict_all
from autofit.estimate.trace_keys import traced_part
from autofit.hardware.catalogue import card, hardware_of
from autofit.search.enumeration import Enumeration
from autofit.search.objectives.discounted import PREFERENCES
from autofit.tuning.local_search import LocalSearch, Merit, Neighbours, pairs_of
from autofit.tuning.narrowing import Row, Values
from autofit.tuning.predicted_space import predict_drawn
from tests.tiny import llama_workload

OFF: dict[str, Value] = {
    "precision": "bf16",
    "quantization": "none",
    "lora_rank": 0,
    "micro_batch_size": 1,
    "activation_checkpointing": "full",
    "attention": "sdpa",
    "kernels": "none",
    "loss": "chunked",
    "optimizer": "adamw",
    "compile": "none",
}
KNOBS: Values = {
    "precision": ("bf16", "bf16-mixed", "fp32"),
    "lora_rank": (32, 0),
    "quantization": ("nf4", "none"),
    "micro_batch_size": (1, 2, 4, 8, 16),
    "activation_checkpointing": ("full", "selective", "none"),
    "attention": ("sdpa", "eager", "flash"),
    "kernels": ("liger", "none"),
    "loss": ("fused", "chunked", "standard"),
    "optimizer": ("adamw-4bit", "adamw-8bit", "adamw"),
    "compile": ("none", "default"),
}


def refuse(config: Config) -> str | None:
    return "only frozen" if config.quantization != "none" and not config.lora_rank else None


NEIGHBOURS = Neighbours(KNOBS, Constraints(OFF, {}, {"quantization": refuse}))
SPACE = [
    config
    for values in itertools.product(*KNOBS.values())
    if not refuse(config := Config({**OFF, **dict(zip(KNOBS, values, strict=True))}))
]
STARTS = [Config({**OFF, "lora_rank": rank}) for rank in (0, 32)]


def made_up(seed: int) -> Callable[[Sequence[Config]], tuple[list[float], list[float]]]:
    """Bytes and seconds of configs: each value has factors of its own, and larger micro-batches are faster."""
    draw = random.Random(seed)
    factors = {
        (knob, value): (draw.uniform(0.7, 1.0), draw.uniform(1.0, 1.5))
        for knob, values in KNOBS.items()
        for value in values
    }

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        nbytes, seconds = [], []
        for config in configs:
            sizes, times = zip(*(factors[knob, config[knob]] for knob in KNOBS), strict=True)
            weights = 5.0 if config.quantization == "none" else 2.0
            nbytes.append(weights + 4 * config.micro_batch_size * math.prod(sizes))
            seconds.append(math.prod(times) * (1 + 1 / config.micro_batch_size))
        return nbytes, seconds

    return predict


def within_two(config: Config) -> list[Config]:
    changes = NEIGHBOURS.changes(config)
    sets = [*([change] for change in changes), *pairs_of(changes)]
    return [found for some in sets if (found := NEIGHBOURS.changed(config, some))]


def merit_within(cap: float) -> Callable[[Row], Merit]:
    def merit(row: Row) -> Merit:
        return (1.0, 1 / row.seconds) if row.nbytes <= cap else (0.0, -row.nbytes)

    return merit


@pytest.mark.parametrize("cap", [6.0, 10.0, 60.0])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_within_two_changes_is_better_and_little_was_asked(seed: int, cap: float) -> None:
    predict, merit = made_up(seed), merit_within(cap)
    search = LocalSearch(NEIGHBOURS, predict, merit)
    search.add(STARTS)
    for name in ("full", "lora"):
        leader = search.refine(name)
        assert leader is not None
        around = within_two(leader.config)
        assert {tier(config) for config in around} == {name}
        best = max(map(merit, map(Row, around, *predict(around))))
        assert best <= merit(leader) or best[1] <= 1.005 * merit(leader)[1]
    assert search.refine("head") is None
    assert len(search.rows) < len(SPACE) / 10


def test_without_time_the_best_so_far_leads() -> None:
    predict, merit = made_up(0), merit_within(60.0)
    search = LocalSearch(NEIGHBOURS, predict, merit, is_over=lambda: True)
    search.add(STARTS)
    leader = search.refine("full")
    assert leader is not None and leader.config in STARTS
    assert search.rows.keys() == set(STARTS)


def test_what_was_seen_to_be_slow_is_not_asked_again() -> None:
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        seconds = [
            3.0 * (1 + (config.precision == "fp32")) + (config.attention == "eager")
            for config in configs
        ]
        return [1.0] * len(configs), seconds

    search = LocalSearch(NEIGHBOURS, predict, merit_within(2.0))
    search.add(STARTS)
    search.refine("full")
    search.refine("lora")
    slow = [config for config in asked if config.precision == "fp32"]
    assert {config.lora_rank for config in slow} == {0}


def test_what_does_nothing_here_is_no_reason_to_ask_for_something_again() -> None:
    """Compiling is canonicalised away, so that its effect is never seen."""
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        seconds = []
        for config in configs:
            slow = (config.precision == "fp32") + (config.attention == "eager")
            seconds.append(3.0 * (1 + slow) - (config.loss == "fused"))
        return [1.0] * len(configs), seconds

    uncompiled = Constraints(OFF, {"compile": lambda config: "none"}, {})
    search = LocalSearch(Neighbours(KNOBS, uncompiled), predict, merit_within(2.0))
    search.add(STARTS[:1])
    leader = search.refine("full")
    assert leader is not None
    assert leader.config.loss == "fused"
    assert sum(config.precision == "fp32" for config in asked) == 1
    assert sum(config.attention == "eager" for config in asked) == 1


def test_of_pairs_that_need_a_trace_the_most_promising_are_asked_first() -> None:
    """Two knobs save time that only fit together with a third one: of all pairs few are looked at."""
    batches: list[set[tuple[Value, ...]]] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        batches.append(set(map(traced_part, configs)))
        nbytes, seconds = [], []
        for config in configs:
            kept = config.activation_checkpointing != "full"
            nbytes.append(10.0 + 5.0 * kept - 6.0 * (config.attention != "sdpa"))
            slow = (
                (config.attention != "sdpa") + (config.kernels != "none") + config.loss.count("s")
            )
            seconds.append(10.0 + 0.1 * slow - 4.0 * kept)
        return nbytes, seconds

    search = LocalSearch(NEIGHBOURS, predict, merit_within(12.0))
    search.add(STARTS[:1])
    search.add(search.singles(search.rows[STARTS[0]]))
    traced = set.union(*batches)
    del batches[:]
    leader = search.refine("full")
    assert leader is not None
    assert leader.config.activation_checkpointing != "full"
    assert leader.config.attention != "sdpa"
    assert 0 < len(batches[0] - traced) <= 6


def test_a_next_leader_profits_from_what_was_seen_around_the_last_one() -> None:
    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        seconds = []
        for config in configs:
            slow = (config.precision == "fp32") + (config.attention == "eager")
            seconds.append(3.0 * (1 + slow) - (config.compile == "default"))
        return [1.0] * len(configs), seconds

    search = LocalSearch(NEIGHBOURS, predict, merit_within(2.0))
    search.add(STARTS[:1])
    first = search.leader("full")
    assert first is not None
    search.add(search.singles(first))
    second = search.leader("full")
    assert second is not None and second.config.compile == "default"
    asked = search.singles(second)
    assert asked
    assert not [each for each in asked if each.precision == "fp32" or each.attention == "eager"]


def test_without_tracing_only_what_was_traced_is_predicted() -> None:
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        return made_up(1)(configs)

    search = LocalSearch(NEIGHBOURS, predict, merit_within(60.0))
    search.add(STARTS)
    search.refine("full", tracing=False)
    traced = ("precision", "activation_checkpointing", "attention", "kernels", "loss")
    assert {tuple(config[knob] for knob in traced) for config in asked} == {
        tuple(OFF[knob] for knob in traced)
    }
    assert len({config.micro_batch_size for config in asked}) > 1


def test_unknown_figures_never_lead() -> None:
    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        known = [config.loss != "fused" for config in configs]
        return [1.0] * len(configs), [1.0 if each else math.nan for each in known]

    search = LocalSearch(NEIGHBOURS, predict, merit_within(2.0))
    search.add(STARTS)
    leader = search.refine("full")
    assert leader is not None and leader.config.loss != "fused"


def test_changes_keep_to_the_space_and_to_its_rules() -> None:
    config = STARTS[0]
    assert NEIGHBOURS.changed(config, [("quantization", "nf4")]) is None  # refused
    assert NEIGHBOURS.changed(config, [("lora_rank", 32)]) is None  # of another tier
    assert NEIGHBOURS.changed(config, [("loss", "fused")]) == config.replace(loss="fused")
    assert ("loss", "chunked") not in NEIGHBOURS.changes(config)


def test_around_what_was_drawn_the_best_of_each_tier_is_found() -> None:
    """Of a small space the three slowest configs of each tier are drawn."""
    workload = llama_workload(2, 64)
    cards = hardware_of(card("rtx-4090"))
    objective = PREFERENCES["balanced"]
    knobs: Values = {
        "precision": ("bf16", "bf16-mixed"),
        "lora_rank": (8, 0),
        "micro_batch_size": (1, 2, 4),
        "activation_checkpointing": ("full", "none"),
        "optimizer": ("adamw", "adamw-foreach"),
    }
    constraints = techniques.constraints(workload, cards)
    space = Enumeration(knobs, constraints).configs()
    nbytes, seconds = predict_all(workload, cards, space)
    cap = sorted(nbytes)[len(nbytes) // 2]

    by_tier: dict[str, list[Row]] = {}
    for row in map(Row, space, nbytes, seconds):
        if row.nbytes <= cap:
            by_tier.setdefault(tier(row.config), []).append(row)
    drawn = []
    for of_tier in by_tier.values():
        of_tier.sort(key=lambda row: row.seconds * objective.discount(row.config))
        drawn += [row.config for row in of_tier[-3:]]

    figures, others = predict_drawn(
        workload, cards, drawn, knobs, cap, objective, within=60.0, processes=1
    )
    assert figures == predict_all(workload, cards, drawn)
    found = {row.config for row in others}
    assert found.isdisjoint(drawn) and found <= set(space)
    assert all(row.nbytes <= cap for row in others)
    for of_tier in by_tier.values():
        assert of_tier[0].config in found
    assert len(by_tier) == 2
