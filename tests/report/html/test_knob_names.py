"""A config in words: every value of every knob is described, custom ones by their names."""

import pytest

from autofit import techniques
from autofit.report.html.knob_names import config_rows, off_knobs
from tests import tiny


def test_what_is_on_and_what_is_off() -> None:
    config = {technique.name: technique.off for technique in techniques.all_techniques()}
    config |= {"precision": "bf16", "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    config |= {"lora_rank": 8, "lora_targets": "all-linear", "quantization": "nf4"}
    words = {title: (means, knob) for title, means, knob in config_rows(config)}
    assert words["Micro-batch"] == (
        "1 sample at a time, 4 times for each update",
        "micro_batch_size: 1, gradient_accumulation_steps: 4",
    )
    assert words["Trained"][0].startswith("LoRA adapters of rank 8 on all linear layers")
    assert words["Frozen weights"] == ("in 4 bits (NF4)", "quantization: nf4")
    assert {"activation_checkpointing", "compile", "optimizer_in_backward"} <= set(
        off_knobs(config)
    )
    assert len(config_rows(config)) + len(off_knobs(config)) + 5 >= len(config)


@pytest.mark.parametrize(
    "name",
    [
        technique.name
        for technique in techniques.all_techniques()
        if technique.name not in ("lora_alpha", "lora_dropout")
    ],
)
def test_every_value_has_words(name: str) -> None:
    """But for those that say enough by themselves, as numbers do."""
    for value in techniques.technique_named(name).choices(tiny.CPU):
        config = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, name: value}
        words = {knob: means for _, means, knob in config_rows(config)}
        if isinstance(value, str) and value != "none" and name != "lora_targets":
            assert words[f"{name}: {value}"] != value, "say what it does"


def test_a_technique_of_ones_own() -> None:
    (row,) = config_rows({"my_knob": "x"})
    assert row == ("My knob", "x", "my_knob: x")
