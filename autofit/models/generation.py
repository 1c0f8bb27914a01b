"""What generating holds beside the weights: the keys and values of each token, by a model's config."""

from typing import Any

_ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")


def cache_bytes(
    config: Any,
    tokens: int,
    *,
    itemsize: int,
    split: int = 1,
) -> int:
    """The bytes of keys and values of one sequence, on each of the devices that share its heads.

    Layers with a window hold its tokens at most, layers without attention nothing: their state does
    not grow. Multi-head latent attention is counted as vLLM holds it, by its latent vector, which
    every device holds whole.

    Args:
        config: of transformers.
        itemsize: bytes of an element.
        split: the devices that share the heads; there are never fewer than one for each.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not getattr(text, "use_sliding_window", True):
        window = None
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers

    held = 0
    for kind in kinds:
        if kind not in _ATTENDS:
            continue
        if kind == "full_attention" or window is None:
            held += tokens
        else:
            held += min(tokens, window)

    return held * _elements(text, split) * itemsize


def _elements(text: Any, split: int) -> int:
    """What a layer keeps of a token, on each device."""
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        return int(latent + text.qk_rope_head_dim)

    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    return int(2 * max(1, shared // split) * size)
