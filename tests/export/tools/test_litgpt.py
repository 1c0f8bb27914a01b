"""litgpt: the whole batch instead of steps, adapters by kinds of layers, no checkpointing on one device."""

from typing import Any

import yaml

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LORA, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("litgpt"), source(**knobs))


def keys(**knobs: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(**knobs).files["litgpt.yaml"]))


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in exported(**knobs).departures}


def test_accumulation_is_told_by_the_whole_batch() -> None:
    train = keys()["train"]
    assert (train["micro_batch_size"], train["global_batch_size"]) == (2, 8)


def test_a_directory_of_weights_stays_where_it_is() -> None:
    assert keys()["checkpoint_dir"] == "checkpoints/meta-llama/Llama-3.1-8B"
    made = write(tool_named("litgpt"), source("cuda", "causal-lm", {"weights": "/models/llama"}))
    assert yaml.safe_load(made.files["litgpt.yaml"])["checkpoint_dir"] == "/models/llama"


def test_adapters_are_told_by_kinds_of_layers() -> None:
    told = keys(lora_rank=8, lora_targets="attention")
    assert (told["lora_query"], told["lora_projection"], told["lora_mlp"], told["lora_head"]) == (
        True,
        True,
        False,
        False,
    )
    assert keys(**LORA)["lora_mlp"] is True
    assert "lora_r" not in keys()


def test_quantised_weights_want_one_format() -> None:
    assert (keys(**CASES["qlora"])["quantize"], keys(**CASES["qlora"])["precision"]) == (
        "bnb.nf4",
        "bf16-true",
    )
    mixed = {**CASES["qlora"], "precision": "bf16-mixed", "activation_checkpointing": "none"}
    assert keys(**mixed)["precision"] == "bf16-true"
    assert departures(**mixed) == {"precision": False}


def test_what_it_cannot_do_on_one_device_may_not_fit() -> None:
    assert departures(**CASES["full"]) == {"activation_checkpointing": True}
    assert departures(**CASES["compiled"]) == {"compile": True, "loss": True}
    assert keys(optimizer="adamw-8bit")["optimizer"]["class_path"] == "bitsandbytes.optim.AdamW8bit"
