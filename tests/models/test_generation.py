"""What a cache of keys and values takes, beside figures worked out by hand."""

from transformers import CONFIG_MAPPING

from autofit.models import preset_model
from autofit.models.generation import cache_bytes


def test_each_layer_keeps_keys_and_values_of_each_token() -> None:
    config = preset_model("llama-3.1-8b").transformers_config()
    # 32 layers of 8 heads of 128: the 2.5 GB that Unsloth's blog of 2025-02-20 says of 20K tokens
    of_token = 32 * 2 * 8 * 128 * 2
    assert cache_bytes(config, 1, itemsize=2) == of_token
    assert cache_bytes(config, 20_000, itemsize=2) / 1e9 == 2.62144
    assert cache_bytes(config, 1, itemsize=4) == 2 * of_token


def test_heads_are_shared_down_to_one_on_each_device() -> None:
    config = preset_model("llama-3.1-8b").transformers_config()
    whole = cache_bytes(config, 64, itemsize=2)
    assert cache_bytes(config, 64, itemsize=2, split=4) == whole // 4
    assert cache_bytes(config, 64, itemsize=2, split=32) == whole // 8


def test_a_window_bounds_what_a_layer_keeps() -> None:
    config = preset_model("mistral-7b").transformers_config()
    assert cache_bytes(config, 8192, itemsize=2) == cache_bytes(config, 4096, itemsize=2)
    sizes = {"sliding_window": 16, "num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 2}
    gemma = CONFIG_MAPPING["gemma2"](**sizes, num_key_value_heads=1)
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert cache_bytes(gemma, 100, itemsize=2) == (16 + 100) * 2 * 8 * 2


def test_latent_attention_keeps_its_latent_vector() -> None:
    config = CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=3)
    of_token = 3 * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    assert cache_bytes(config, 1, itemsize=2) == of_token
    assert cache_bytes(config, 1, itemsize=2, split=8) == of_token


def test_layers_without_attention_keep_nothing() -> None:
    kinds = ["linear_attention", "full_attention"]
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = CONFIG_MAPPING["qwen3_next"](**sizes, layer_types=kinds)
    assert cache_bytes(config, 10, itemsize=2) == 10 * 2 * 2 * 16 * 2
