"""Tiny configs build tiny models, and keep what is no size."""

import pytest
import torch
import transformers

from benchmarks.zoo.shrink import merged, overrides, tiny_config


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("swin", "SwinForImageClassification"),
        ("t5", "T5ForConditionalGeneration"),
        ("gemma3n_text", "Gemma3nForCausalLM"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
    ],
)
def test_a_tiny_config_builds_a_tiny_model(kind: str, architecture: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, architecture)(tiny_config(kind))
    assert 10_000 < sum(each.numel() for each in model.parameters()) < 3_000_000


def test_sizes_are_small_and_the_rest_is_as_it_was() -> None:
    config, default = tiny_config("qwen2"), transformers.Qwen2Config()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 512)
    assert (config.hidden_act, config.rms_norm_eps) == (default.hidden_act, default.rms_norm_eps)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)  # equal by default


def test_configs_within_a_config_are_shrunk_too() -> None:
    config = tiny_config("llava")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.image_token_index < config.text_config.vocab_size == 512


def test_overrides_are_of_families_that_there_are() -> None:
    # Than the oldest transformers that is supported.
    newer = {
        "deimv2",
        "dots3_note",
        "glmga",
        "mistral_large4",
        "molmo2",
        "muse_spark",
        "nemo_speechlm",
    }
    newer |= {"bailing_hybrid", "nemotron_h_omni", "step3p7", "tipsv2_dpt"}
    assert set(overrides()) <= set(transformers.CONFIG_MAPPING) | newer
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}}) == {
        "a": 1,
        "b": {"c": 4, "d": 3},
    }
