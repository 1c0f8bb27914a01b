"""What help says of knobs is what the techniques are."""

from autofit import techniques
from autofit.cli.knobs_of_set import Knob, known_knobs


def test_the_knobs_read_from_source_are_those_that_are_registered() -> None:
    registered = {each.name: Knob(each.name, each.values, each.takes) for each in techniques.all_techniques()}
    del registered["gradient_accumulation_steps"]
    assert known_knobs() == [registered[name] for name in sorted(registered)]


def test_every_knob_says_what_it_takes() -> None:
    described = {each.name: each.description for each in known_knobs()}
    assert all(described.values())
    assert described["precision"] == "fp32, tf32, bf16, bf16-mixed, fp16-mixed, fp8"
    assert described["optimizer_in_backward"] == "false, true"
    assert described["lora_rank"] == "a whole number from 0 (train all weights) to 1024"
