"""Unsloth: a script, and a YAML that holds less and says so."""

import ast
from typing import Any

import yaml

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LORA, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("unsloth"), source(**knobs))


def calls(script: str) -> dict[str, dict[str, Any]]:
    """Keywords of the script's calls by the function's name."""
    return {
        getattr(call.func, "attr", getattr(call.func, "id", "")): {
            each.arg or "": ast.unparse(each.value) for each in call.keywords
        }
        for call in ast.walk(ast.parse(script))
        if isinstance(call, ast.Call)
    }


def test_the_script_loads_adapts_and_trains() -> None:
    said = calls(exported(**CASES["qlora"]).files["train_unsloth.py"])
    assert said["from_pretrained"]["load_in_4bit"] == "True"
    assert said["from_pretrained"]["dtype"] == "torch.bfloat16"
    assert said["get_peft_model"]["r"] == "16"
    assert said["get_peft_model"]["use_gradient_checkpointing"] == "True"
    assert said["SFTConfig"]["optim"] == "'adamw_bnb_8bit'"
    assert "get_peft_model" not in calls(exported().files["train_unsloth.py"])


def test_a_cpu_is_given_no_key_that_is_of_cards() -> None:
    given = {
        device: write(tool_named("unsloth"), source(device)).files["train_unsloth.py"]
        for device in ("cpu", "cuda")
    }
    assert {device: "float32_mixed_precision" in text for device, text in given.items()} == {
        "cpu": False,
        "cuda": True,
    }


def test_the_yaml_holds_less_and_says_so() -> None:
    text = exported(**CASES["qlora"]).files["unsloth.yaml"]
    told = yaml.safe_load(text)
    assert told["training"]["gradient_checkpointing"] == "true"
    assert told["lora"]["target_modules"].startswith("q_proj,")
    assert "always takes adamw_8bit" in text
    assert (
        yaml.safe_load(exported().files["unsloth.yaml"])["training"]["gradient_checkpointing"]
        == "none"
    )


def test_offloading_is_its_own_checkpointing() -> None:
    made = exported(activation_checkpointing="full", activation_offload="cpu")
    assert (
        calls(made.files["train_unsloth.py"])["from_pretrained"]["use_gradient_checkpointing"]
        == "'unsloth'"
    )
    assert {each.knob for each in made.departures} == {"kernels", "loss"}


def test_its_own_ways_are_named() -> None:
    named = {each.knob: each.may_not_fit for each in exported(**LORA, loss="chunked").departures}
    assert named == {"precision": True, "loss": True, "kernels": False}
