"""The presets are what they say: every figure is checked by building the model without memory."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.tasks import TASKS
from autofit.models import (
    HuggingFaceModel,
    describe_presets,
    load_preset,
    model_names,
    preset_model,
    preset_names,
)
from autofit.models.stand_ins import _names, _positions

# As published, of those that many examples are of; written down a second time so that a slip in the YAML cannot
# confirm itself.
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


# What a count is rounded to where it is published so, at least.
ROUNDED = 10**5
# Keys of config.json that transformers reads, and keeps as others, or has for single layers, or by kind.
TRANSLATED = {
    *("head_dim", "num_key_value_heads", "tie_word_embeddings"),
    *("first_k_dense_replace", "full_attn_idxs", "global_head_dim", "hybrid_override_pattern"),
    *(
        "layer_types",
        "linear_attn_config",
        "num_experts",
        "num_global_key_value_heads",
        "num_labels",
    ),
    *("n_inner", "clip_qkv", "rope_theta", "interleave_moe_layer_step", "attn_layer_indices"),
}


# Whose layers may differ from one another.
BY_LAYER = {
    *("first_k_dense_replace", "full_attn_idxs", "hybrid_override_pattern", "layer_types"),
    *("interleave_moe_layer_step", "attn_layer_indices", "linear_attn_config", "mlp_only_layers"),
}
FEW_LAYERS = 2


def count_of(model: HuggingFaceModel) -> int:
    """The parameters of a model; where its layers are alike, by what each of them adds."""
    layers = model.config.get("num_hidden_layers", 0)
    if layers <= FEW_LAYERS + 1 or BY_LAYER & set(model.config):
        return built(model)

    less, more = (
        built(replace(model, config={**model.config, "num_hidden_layers": count}))
        for count in (FEW_LAYERS, FEW_LAYERS + 1)
    )
    return less + (layers - FEW_LAYERS) * (more - less)


def built(model: HuggingFaceModel) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model().parameters())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "bert-base"])
def test_a_layer_adds_what_all_of_them_hold(name: str) -> None:
    assert count_of(preset_model(name)) == built(preset_model(name))


@pytest.mark.parametrize("name", preset_names())
def test_parameter_count_is_the_published_one(name: str) -> None:
    published = load_preset(name).parameters
    alike = load_preset(name).kind in ("decoders", "encoders", "vision")
    count = count_of(preset_model(name)) if alike else built(preset_model(name))
    if published % ROUNDED:
        assert count == published
    else:
        assert count == pytest.approx(published, rel=0.015)


def test_parameter_counts_are_written_down_twice() -> None:
    for name, parameters in PUBLISHED.items():
        assert load_preset(name).parameters == parameters


@pytest.mark.parametrize("name", preset_names())
def test_every_key_of_a_config_is_one_transformers_knows(name: str) -> None:
    """transformers keeps an unknown key in silence, so a misspelt one would leave a default in its place."""
    preset = load_preset(name)
    _check_keys(preset.config, preset_model(name).transformers_config())


def _check_keys(written: Mapping[str, Any], config: Any) -> None:
    known = set(type(config)().to_dict()) | set(type(config).attribute_map) | TRANSLATED
    assert set(written) <= known
    for key, value in written.items():
        if key in TRANSLATED:
            continue
        found = getattr(config, key)
        if key.endswith("_config"):
            _check_keys(value, found)
        elif isinstance(value, Mapping):
            assert value.items() <= found.items()
        else:
            assert found == value


@pytest.mark.parametrize("name", preset_names())
def test_the_longest_sample_is_the_one_that_transformers_takes(name: str) -> None:
    preset = load_preset(name)
    if TASKS[preset.task].medium == "images":
        return
    longest = preset_model(name).longest()
    assert _positions(preset) == pytest.approx(math.inf if longest is None else longest, abs=2)


def test_no_two_presets_have_a_name_in_common() -> None:
    names = [name for preset in map(load_preset, preset_names()) for name in _names(preset)]
    assert len(names) == len({name.lower() for name in names})


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
    assert [row["name"] for row in rows] == list(model_names())
    assert rows[0] == {
        "name": "tiny-llama",
        "task": "causal-lm",
        "parameters": 6917376,
        "hub": None,
    }
