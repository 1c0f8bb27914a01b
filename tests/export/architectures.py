"""Small models of every task that is exported, as their config.json says it."""

from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "causal-lm": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "transformers_version": "5.23.0",
    },
    "masked-lm": {
        "model_type": "bert",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "image-classification": {
        "model_type": "vit",
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 5,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
ARCHITECTURES["gpt2"] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
ARCHITECTURES["sequence-classification"] = ARCHITECTURES["masked-lm"]
ARCHITECTURES |= dict.fromkeys(
    ("dpo", "kto", "orpo", "simpo", "distill"), ARCHITECTURES["causal-lm"]
)
ARCHITECTURES["reward"] = ARCHITECTURES["causal-lm"] | {"num_labels": 1, "pad_token_id": 0}
ARCHITECTURES["rerank"] = ARCHITECTURES["masked-lm"] | {"num_labels": 1}
ARCHITECTURES["embed"] = ARCHITECTURES["masked-lm"]
