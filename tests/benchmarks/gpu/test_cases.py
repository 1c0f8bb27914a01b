from itertools import pairwise

import pytest

from autofit.models import resolve
from autofit.techniques import technique_named
from benchmarks.gpu.cases import CARD, FIRST, FULL, LEVERS, LORA, SMOKE, Grid, Lever


def test_every_legal_triple_comes_once() -> None:
    mixed = CARD.mixed()
    found = [(case.model, case.technique, case.lever) for case in mixed]
    legal = {(m, t, lever.name) for m in CARD.models for lever in LEVERS for t in lever.techniques}
    assert set(found) == legal
    assert len(found) == len(legal) == len({case.key for case in mixed})


def test_each_next_case_is_of_another_model_technique_and_lever() -> None:
    neighbours = list(pairwise(CARD.mixed()[:48]))
    for part in ("model", "technique", "lever"):
        same = sum(getattr(one, part) == getattr(other, part) for one, other in neighbours)
        assert same <= len(neighbours) // 10, part


@pytest.mark.parametrize("count", [12, 24, 48])
def test_a_part_of_the_order_covers_models_techniques_and_many_levers(count: int) -> None:
    part = CARD.mixed()[:count]
    assert len({(case.model, case.technique) for case in part}) >= 11
    assert len({case.lever for case in part}) >= min(count, len(LEVERS)) * 0.75


def test_models_that_share_a_number_with_techniques_still_meet_them_all() -> None:
    grid = Grid(
        {"a": "", "b": ""},
        {"one": {}, "two": {}},
        [Lever("plain", {}, ("one", "two"))],
        8,
        4,
        4,
        FIRST,
    )
    assert {(case.model, case.technique) for case in grid.mixed()} == {
        (m, t) for m in "ab" for t in ("one", "two")
    }


def test_levers_alone_begin_with_the_plain_configs_and_change_nothing_else() -> None:
    cases = CARD.one_at_a_time()
    assert [(case.model, case.technique, case.lever) for case in cases[:2]] == [
        ("1.5B", FULL, "plain"),
        ("8B", LORA, "plain"),
    ]
    changes = {lever.name: lever.knobs for lever in LEVERS}
    for case in cases:
        assert case.knobs == {**CARD.techniques[case.technique], **changes[case.lever]}


@pytest.mark.parametrize("grid", [CARD, SMOKE], ids=["card", "smoke"])
def test_models_and_knobs_exist(grid: Grid) -> None:
    for preset in grid.models.values():
        assert (
            resolve(preset, sequence_length=grid.sequence_length, effective_batch_size=8).task
            == "causal-lm"
        )
    for case in grid.mixed():
        for knob, value in case.knobs.items():
            technique = technique_named(knob)
            assert not technique.values or value in technique.values, (knob, value)
        assert grid.effective_batch_size % int(case.knobs["micro_batch_size"]) == 0
