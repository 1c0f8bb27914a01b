"""peft: its own loader takes the adapter's config."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftConfig

from autofit.core.errors import InputError
from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LINEAR, source


def load(path: Path, text: str) -> Any:
    """By peft's loader, which only warns of keys that it does not know, and checks no rank: our check adds both."""
    (path / "adapter_config.json").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = PeftConfig.from_pretrained(str(path))
    assert isinstance(config, LoraConfig)
    assert config.r >= 1
    return config


@pytest.mark.parametrize("case", ["lora", "qlora"])
def test_its_own_loader_takes_it(case: str, tmp_path: Path) -> None:
    made = write(tool_named("peft"), source(**CASES[case], lora_dropout=0.1))
    config = load(tmp_path, made.files["peft/adapter_config.json"])
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.1)
    assert config.target_modules == set(LINEAR)
    assert config.task_type == "CAUSAL_LM"
    assert "adapter's config says nothing of it" in made.files["peft/README.md"]


def test_its_own_loader_refuses_wrong_keys(tmp_path: Path) -> None:
    data = json.loads(
        write(tool_named("peft"), source(**CASES["lora"])).files["peft/adapter_config.json"]
    )
    with pytest.raises(Exception, match="rank"):
        load(tmp_path, json.dumps({**data, "rank": 8}))
    with pytest.raises(AssertionError):
        load(tmp_path, json.dumps({**data, "r": -1}))
    with pytest.raises(KeyError, match="LORAA"):
        load(tmp_path, json.dumps({**data, "peft_type": "LORAA"}))


def test_configs_without_adapters_are_none_of_its_business() -> None:
    with pytest.raises(InputError, match="this config trains all weights"):
        write(tool_named("peft"), source())
