"""Tiny configs: the default config of a family with every size in it made small, and nothing else changed.

Sizes are known by the names of their keys, which families share; what stays after that (sizes that must agree with each
other in one family alone) is in overrides.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

OVERRIDES = Path(__file__).with_name("overrides.yaml")
VOCABULARY, WIDTH, HEADS = 512, 64, 4
_WIDTHS = r"(.*_)?(hidden_sizes|embed_dims?|dims|widths|conv_dim|tdnn_dim)"
# The first pattern that matches a whole key says how large its value may be; what is smaller by default stays.
_MOST: tuple[tuple[str, int], ...] = (
    (r".*vocab.*(size|base).*", VOCABULARY),
    (
        r"num_feat_extract_layers|.*(shared|nextn|window|resolution|feature)_?\w*layers|num_channels",
        10**9,
    ),
    (r".*(num_kv_shared_layers|num_nextn_predict_layers|mtp_num_hidden_layers)", 0),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(.*_)?(layers|n_layers?|depth|num_blocks|num_block|resampler_depth|num_res_blocks)", 2),
    (r".*(key_value_heads|kv_heads?|n_head_kv|num_kv_heads|query_groups)", 2),
    (r"num_experts_per_tok|top_k|moe_top_?k|moe_k|num_selected_experts|topk", 2),
    (
        r".*(num_experts|num_local_experts|n_routed_experts|num_moe_experts|num_experts_per_layer)",
        4,
    ),
    (r".*(n_shared_experts|num_shared_experts)", 1),
    (
        r"(.*_)?(attention_heads|num_heads|n_heads?|mamba_n_heads|attn_heads)|.*num_(key|value)_heads",
        4,
    ),
    (
        r"(.*_)?(head_dim|head_size|d_kv|dim_head|d_head|kv_channels|query_pre_attn_scalar|kv_lora_rank|q_lora_rank)",
        16,
    ),
    (r"qk_head_dim", 32),
    (r"rotary_dim", 16),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(moe|expert|shared)\w*intermediate\w*", 32),
    (
        r".*(intermediate_size|intermediate_dim|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feedforward|mlp_hidden)\w*",
        128,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|projection_dim|hidden_channels|proj_size|"
        r"dim|embedding_dim|d_embed|width|projector_hidden_act|conv_dim|emb_dim|output_dim|out_dim|input_size|state_size)",
        64,
    ),
    (
        r".*(position_embeddings|n_positions|max_seq_len\w*|max_\w*positions|max_length|num_positions|n_ctx)",
        512,
    ),
    (r".*(num_queries|num_query_tokens|num_latents|n_latents|query_num)", 8),
    (r".*(chunk_size|sliding_window\w*|attention_window)", 32),
)
_SPECIAL = re.compile(r".*(_token_ids?|_token_index|_token|_idx|_index)")


@cache
def overrides() -> dict[str, dict[str, Any]]:
    """What single families need besides, as in config.json."""
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(OVERRIDES.read_text(encoding="utf-8"))
    return loaded


def tiny_config(model_type: str) -> Any:
    """The family's config as transformers' own object."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = overrides().get(model_type, {})
    return kind(**merged(_shrunk(kind()), own))


def merged(sizes: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A nested mapping with another one on top."""
    nested = {
        key: merged(sizes.get(key) or {}, value)
        for key, value in over.items()
        if isinstance(value, Mapping)
    }
    return {**sizes, **over, **nested}


def _shrunk(config: Any) -> dict[str, Any]:
    """The keys of a config whose values are too large, with smaller ones; those of configs within it too."""
    from transformers import PreTrainedConfig

    sizes: dict[str, Any] = {}
    given = config.to_dict()
    for key, value in given.items():
        part = vars(config).get(key)
        if isinstance(part, PreTrainedConfig):
            # of a backbone
            stages = getattr(part, "out_features", None) if hasattr(part, "depths") else None
            named = {"model_type": part.model_type, **({"out_features": stages} if stages else {})}
            sizes[key] = named | merged(_shrunk(part), overrides().get(part.model_type, {}))
        elif isinstance(value, dict) and "mrope_section" in value:
            sizes[key] = {**value, "mrope_section": [2, 3, 3]}  # half of a head
        else:
            small = _small(key, value)
            if small != value:
                sizes[key] = small
    heads = next(
        (
            given[key]
            for key in ("num_attention_heads", "n_head")
            if isinstance(given.get(key), int)
        ),
        None,
    )
    if "num_key_value_heads" in sizes and given["num_key_value_heads"] == heads:
        sizes["num_key_value_heads"] = min(heads, HEADS)
    heads = given.get("num_heads")
    # of the first stage
    if isinstance(heads, list | tuple) and isinstance(given.get("embed_dim"), int):
        sizes["embed_dim"] = 8 * heads[0]
    image, patch = given.get("image_size"), given.get("patch_size")
    if isinstance(image, int):
        sizes["image_size"] = min(image, 4 * patch if isinstance(patch, int) and patch > 8 else 64)
    return sizes


def _small(key: str, value: Any) -> Any:
    if (
        isinstance(value, list | tuple)
        and len(value) > 1
        and all(type(each) is int for each in value)
    ):
        return _small_list(key, list(value))
    if type(value) is not int:
        return value
    if _SPECIAL.fullmatch(key):
        return value if value < VOCABULARY else VOCABULARY - 1 - sum(key.encode()) % 97
    most = next((most for pattern, most in _MOST if re.fullmatch(pattern, key)), None)
    return value if most is None else min(value, most)


def _small_list(key: str, values: list[int]) -> list[int]:
    """Of one size for each stage: the stages stay, and so do the ratios of their widths."""
    if re.fullmatch(r"(.*_)?(depths?|num_blocks|num_layers|stage_numb_of_layers|layers)", key):
        return [min(value, 2) for value in values]
    if key == "decoder_in_channels":  # of detectors: what comes out of the encoder
        return [WIDTH] * len(values)
    if re.fullmatch(_WIDTHS, key) and max(values) > WIDTH and min(values) >= 8:
        while max(values) > 2 * WIDTH and all(value % 2 == 0 and value > 8 for value in values):
            values = [value // 2 for value in values]
    return values
