"""What help says of knobs is what the techniques are."""

from dataclasses import fields

from autofit import techniques
from autofit.cli.knobs_of_set import known_knobs
from autofit.core.knobs import Knob
from tests import tiny


def test_the_knobs_read_from_source_are_those_that_are_registered() -> None:
    facts = [field.name for field in fields(Knob)]
    every = {each.name: Knob(*(getattr(each, fact) for fact in facts)) for each in techniques.all_techniques()}
    assert known_knobs(derived=True) == [every[name] for name in sorted(every)]
    assert known_knobs() == [every[name] for name in sorted(every) if name != "gradient_accumulation_steps"]


def test_what_source_and_registry_take_is_the_same() -> None:
    values = (None, True, False, 0, 1, 1.0, 0.5, -1, 1024, 1025, 2**20, 10**400, float("nan"), float("inf"), "x")
    for knob in known_knobs(derived=True):
        accepts = techniques.technique_named(knob.name).accepts
        for value in (*values, *knob.values):
            assert knob.accepts(value) == accepts(value, tiny.CPU), (knob.name, value)


def test_every_knob_says_what_it_takes() -> None:
    described = {each.name: each.description for each in known_knobs()}
    assert all(described.values())
    assert described["precision"] == "fp32, tf32, bf16, bf16-mixed, fp16-mixed, fp8"
    assert described["optimizer_in_backward"] == "false, true"
    assert described["lora_rank"] == "a whole number from 0 (train all weights) to 1024"
