"""Ludwig: the YAML of a model of kind llm."""

from typing import Any

import yaml

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LINEAR, LORA, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("ludwig"), source(**knobs))


def keys(**knobs: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(**knobs).files["ludwig.yaml"]))


def test_sections() -> None:
    told = keys(**CASES["qlora"])
    adapter = {"type": "lora", "r": 16, "alpha": 32, "dropout": 0.0, "target_modules": list(LINEAR)}
    assert told["adapter"] == {**adapter, "use_dora": False, "use_rslora": False}
    assert told["quantization"]["bits"] == 4
    assert told["quantization"]["bnb_4bit_compute_dtype"] == "bfloat16"
    assert told["trainer"]["optimizer"] == {"type": "adamw_8bit"}
    assert (told["trainer"]["batch_size"], told["trainer"]["gradient_accumulation_steps"]) == (2, 4)
    assert told["trainer"]["enable_gradient_checkpointing"] is True
    assert "adapter" not in keys()
    assert keys()["trainer"]["enable_gradient_checkpointing"] is False


def test_what_it_does_otherwise_is_named() -> None:
    named = {
        each.knob: each.may_not_fit
        for each in exported(**LORA, loss="chunked", compile="default").departures
    }
    assert named == {"precision": True, "loss": True, "compile": False}
    assert {each.knob for each in exported(optimizer="adamw-4bit").departures} == {"optimizer"}
