"""A config in words: every value of every knob is told, those of one's own by their names."""

import pytest

from autofit import techniques
from autofit.report.html.knob_names import config_rows, off_knobs
from autofit.techniques import canonicalize
from tests import tiny


def test_what_is_on_and_what_is_off() -> None:
    config = canonicalize(
        {"precision": "bf16", "micro_batch_size": 1, "lora_rank": 8, "quantization": "nf4"},
        tiny.llama_workload(4),
        tiny.CPU,
    )
    told = {row.title: (row.words, row.knob) for row in config_rows(config)}
    assert told["Micro-batch"] == (
        "1 sample at a time, 4 times for each update",
        "micro_batch_size: 1, gradient_accumulation_steps: 4",
    )
    assert told["Trained"][0].startswith("LoRA adapters of rank 8 on ")
    assert told["Frozen weights"] == ("in 4 bits (NF4)", "quantization: nf4")
    assert {"activation_checkpointing", "compile", "optimizer_in_backward"} <= set(off_knobs(config))
    assert len(config_rows(config)) + len(off_knobs(config)) + 4 >= len(config)


@pytest.mark.parametrize(
    "name",
    [
        each
        for each in (each.name for each in techniques.all_techniques())
        if each not in ("lora_alpha", "lora_dropout")
    ],
)
def test_every_value_is_told_in_words(name: str) -> None:
    """But for those that say enough by themselves, as numbers do."""
    for value in techniques.technique_named(name).choices(tiny.CPU):
        config = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, name: value}
        told = {row.knob: row.words for row in config_rows(config)}
        if isinstance(value, str) and value != "none" and name != "lora_targets":
            assert told[f"{name}: {value}"] != value, "say what it does"


def test_a_technique_of_ones_own() -> None:
    (row,) = config_rows({"my_knob": "x"})
    assert (row.title, row.words, row.knob) == ("My knob", "x", "my_knob: x")
