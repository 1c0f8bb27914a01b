"""Constraints as diagram: asked seldom, known everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.search import decision_diagram
from autofit.search.decision_diagram import ALLOWED, FORBIDDEN, ConstraintProber, DecisionDiagram

KNOBS: dict[str, tuple[Value, ...]] = dict.fromkeys("abcdef", (0, 1, 2))


def tree_of(
    refuse: Callable[[Config], str | None],
) -> tuple[DecisionDiagram, int | None, list[Config]]:
    asked: list[Config] = []

    def noting(config: Config) -> str | None:
        asked.append(config)
        return refuse(config)

    diagram = DecisionDiagram()
    prober = ConstraintProber(KNOBS, Constraints(refuse={"rule": noting}), diagram)
    return diagram, prober.refusal("rule"), asked


def said(diagram: DecisionDiagram, tree: int, places: tuple[int, ...]) -> int:
    for knob, place in zip(KNOBS, places, strict=True):
        tree = diagram.assume(tree, knob, place)
    return tree


def test_few_questions_answer_for_all_combinations() -> None:
    def refuse(config: Config) -> str | None:
        return (
            "no" if config["e"] == 2 and config["b"] == 1 and (config["a"] or config["f"]) else None
        )

    diagram, tree, asked = tree_of(refuse)
    assert tree is not None
    assert len(asked) == 9  # e: 0 and 1; then b: 0 and 2; then a: 1 and 2; then f: 0, 1 and 2
    assert diagram.reads[tree] == {"a", "b", "e", "f"}
    for places in itertools.product(range(3), repeat=6):
        expected = FORBIDDEN if refuse(Config(dict(zip(KNOBS, places, strict=True)))) else ALLOWED
        assert said(diagram, tree, places) == expected


def test_what_reads_a_knob_in_vain_does_not_hang_on_it() -> None:
    assert tree_of(lambda config: "no" if config["a"] == 5 else None)[1] == ALLOWED
    assert tree_of(lambda config: "no" if config["a"] != 5 else None)[1] == FORBIDDEN


def test_the_same_rules_have_the_same_tree_in_whatever_order_they_read() -> None:
    diagram = DecisionDiagram()
    constraints = Constraints(
        refuse={
            "one": lambda config: "no" if config["a"] == 1 else None,
            "two": lambda config: "no" if config["b"] != 7 and config["a"] == 1 else None,
        }
    )
    prober = ConstraintProber(KNOBS, constraints, diagram)
    one, two = map(prober.refusal, ("one", "two"))
    assert one == two


def test_a_rule_that_reads_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_diagram, "_MOST_ANSWERS", 100)
    assert tree_of(lambda config: "no" if hash(config) == 1 else None)[1] is None
    monkeypatch.setattr(decision_diagram, "_MOST_ANSWERS", 3**6)
    assert tree_of(lambda config: "no" if hash(config) == 1 else None)[1] == ALLOWED


def test_settling_says_values_and_contradictions() -> None:
    def canonicalize(config: Config) -> Value:
        if config["b"] == 2:
            raise InputError("2 contradicts.")
        return config["a"] if config["b"] else None

    diagram = DecisionDiagram()
    prober = ConstraintProber(KNOBS, Constraints(canonicalize={"a": canonicalize}), diagram)
    tree = prober.canonical("a")
    assert tree is not None
    ends = {
        places: said(diagram, tree, (*places, 0, 0, 0, 0))
        for places in itertools.product(range(3), repeat=2)
    }
    for (a, b), end in ends.items():
        if b == 2:
            assert end == FORBIDDEN
        else:
            assert diagram.values[end] == ("a", a if b else None)
    assert sorted(str(diagram.values[each][1]) for each in diagram.gives[tree]) == [
        "0",
        "1",
        "2",
        "None",
    ]


def test_true_is_not_1() -> None:
    diagram = DecisionDiagram()
    assert diagram.value("a", 1) != diagram.value("a", True)
