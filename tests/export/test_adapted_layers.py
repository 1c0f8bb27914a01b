"""Names and patterns of other tools select the same layers as `lora_targets` made of them."""

import re
from collections.abc import Callable

import pytest
from torch import nn

from autofit.core.errors import InputError, RefusedError
from autofit.export.adapted_layers import (
    matched_layers,
    named_layers,
    reading_layers,
    usual_layers,
)
from autofit.models.huggingface import HuggingFaceModel
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from
from tests import tiny

Factory = Callable[[], nn.Module]

SEEING = {
    "model_type": "qwen2_vl",
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 160000,
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
}


@pytest.fixture(scope="module")
def seeing() -> Factory:
    return HuggingFaceModel("seeing", "image-text-to-text", SEEING)


@pytest.fixture(scope="module")
def reading() -> Factory:
    return HuggingFaceModel("reading", "causal-lm", tiny.LLAMA)


def selected(factory: Factory, targets: str) -> set[str]:
    return set(adapter_targets(meta_model_from(factory), targets)[0])


@pytest.mark.parametrize(
    "pattern",
    [
        r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
        r"model\.language_model\.layers\.1\..*",
        r".*\.(q_proj|down_proj)",
        r"model\.visual\.blocks\.\d+\.attn\.proj",
    ],
)
def test_a_pattern_selects_the_layers_that_it_matches(seeing: Factory, pattern: str) -> None:
    linears = selected(seeing, "all-linear")
    wanted = {name for name in linears if re.fullmatch(pattern, name)}
    assert wanted and wanted < linears
    assert selected(seeing, matched_layers(seeing, pattern)) == wanted


def test_a_pattern_of_all_text_layers_is_one_word(seeing: Factory) -> None:
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    assert "+" not in matched_layers(seeing, pattern)


@pytest.mark.parametrize("pattern", [r"no\.layer", "(", r"lm_head|visual"])
def test_a_pattern_of_no_layer_is_told(seeing: Factory, pattern: str) -> None:
    with pytest.raises(InputError, match=r"matches|no pattern"):
        matched_layers(seeing, pattern)


def test_only_what_reads_texts_is_found_beside_what_sees(seeing: Factory, reading: Factory) -> None:
    targets = reading_layers(seeing)
    assert targets is not None
    linears = selected(seeing, "all-linear")
    assert selected(seeing, targets) == {name for name in linears if ".language_model." in name}
    assert reading_layers(reading) is None


def test_names_without_a_layer_are_passed_over(reading: Factory) -> None:
    assert named_layers(reading, ["q_proj", "Wqkv"]) == ("q_proj", ("Wqkv",))
    targets, missing = named_layers(reading, ["Wqkv"])
    assert missing == ()
    with pytest.raises(RefusedError, match="no layer named Wqkv"):
        selected(reading, targets)


def test_layers_that_nobody_names_are_pefts_own(seeing: Factory, reading: Factory) -> None:
    assert usual_layers(reading) == ["q_proj", "v_proj"]
    with pytest.raises(InputError, match="peft knows none for qwen2_vl"):
        usual_layers(seeing)
