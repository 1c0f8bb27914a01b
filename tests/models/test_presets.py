"""The presets are what they say: every figure is checked by building the model without memory."""

import json

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.tasks import TASKS
from autofit.models import describe_presets, load_preset, preset_model, preset_names

# As published, written down a second time so that a slip in the YAML cannot confirm itself.
PUBLISHED = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "llama-3-8b": 8030261248,
    "llama-3.1-8b": 8030261248,
    "llama-3.1-70b": 70553706496,
    "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824,
    "mistral-7b": 7241732096,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304,
    "qwen2.5-7b": 7615616512,
    "qwen3-0.6b": 596049920,
    "qwen3-8b": 8190735360,
    "phi-1.5": 1418270720,
    "tinyllama-1.1b": 1100048384,
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-large": 774030080,
    "gpt2-xl": 1557611200,
    "bert-base": 109514298,
    "bert-large": 335174458,
    "vit-base": 86567656,
    "vit-huge": 632045800,
}


@pytest.mark.parametrize("name", preset_names())
def test_parameter_count_is_exact(name: str) -> None:
    preset = load_preset(name)
    with torch.device("meta"):
        model = preset_model(name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.parameters


def test_parameter_counts_are_the_published_ones() -> None:
    counts = {name: load_preset(name).parameters for name in preset_names()}
    assert counts.pop("tiny-llama") == 6917376  # ours
    assert counts == PUBLISHED


@pytest.mark.parametrize("name", preset_names())
def test_every_key_of_a_config_is_one_transformers_knows(name: str) -> None:
    """transformers keeps an unknown key in silence, so a misspelt one would leave a default in its place."""
    preset = load_preset(name)
    config = preset_model(name).transformers_config()
    known = set(type(config)().to_dict()) | set(type(config).attribute_map) | {"num_labels"}
    assert set(preset.config) <= known
    for key, value in preset.config.items():
        if key != "rope_parameters":
            assert getattr(config, key) == value
    assert (
        preset.config.get("rope_parameters", {}).items()
        <= (getattr(config, "rope_parameters", None) or {}).items()
    )


def test_building_leaves_a_preset_untouched() -> None:
    before = json.dumps(load_preset("phi-1.5").config)
    preset_model("phi-1.5").transformers_config()
    assert json.dumps(load_preset("phi-1.5").config) == before


def test_tasks_are_known() -> None:
    assert {load_preset(name).task for name in preset_names()} <= set(TASKS)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_preset("llama-3.1-8")
    assert str(caught.value) == "unknown model 'llama-3.1-8'. Did you mean 'llama-3.1-8b'?"


def test_description_is_json_with_one_row_for_each_preset() -> None:
    rows = json.loads(json.dumps(describe_presets()))
    assert [row["name"] for row in rows] == list(preset_names())
    assert rows[0] == {
        "name": "tiny-llama",
        "task": "causal-lm",
        "parameters": 6917376,
        "hub": None,
    }
