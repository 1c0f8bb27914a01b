"""Small models of images and texts, and batches as their processors make them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from autofit.core.workload import Workload

_IMAGE, _LENGTH = 5, 16  # the token that stands for a part of an image; tokens of a text
_VISION = {"hidden_size": 32, "intermediate_size": 64}
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENS = {
    "image_token_id": _IMAGE,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}


def _text_of_qwen(**more: Any) -> dict[str, Any]:
    sections = [2, 3, 3] if not more else [4, 2, 2]
    return (
        _TEXT
        | {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": sections,
                "rope_theta": 1e4,
            }
        }
        | more
    )


def _qwen25() -> nn.Module:
    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "window_size": 16}
    vision |= {"spatial_merge_size": 2, "fullatt_block_indexes": [1], **_VISION}
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision, text_config=_text_of_qwen(), **_TOKENS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3() -> nn.Module:
    vision = {
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    vision |= {"spatial_merge_size": 2, "deepstack_visual_indexes": [0], **_VISION}
    config = transformers.Qwen3VLConfig(
        vision_config=vision, text_config=_text_of_qwen(head_dim=16), **_TOKENS
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _gemma3() -> nn.Module:
    vision = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        **_VISION,
    }
    text = _TEXT | {"head_dim": 16, "sliding_window": 8}
    config = transformers.Gemma3Config(
        vision_config=vision | {"vision_use_head": False}, text_config=text, mm_tokens_per_image=4
    )
    config.image_token_id = _IMAGE
    return transformers.Gemma3ForConditionalGeneration(config)


def _smolvlm() -> nn.Module:
    vision = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        **_VISION,
    }
    text = _TEXT | {"model_type": "llama"}
    config = transformers.SmolVLMConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=_IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def _texts(samples: int, image_tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(
        10, 100, (samples, _LENGTH), generator=torch.Generator().manual_seed(samples)
    )
    ids[:, 2 : 2 + image_tokens] = _IMAGE
    labels = ids.masked_fill(ids == _IMAGE, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _batch_of_qwen(samples: int) -> dict[str, torch.Tensor]:
    batch = _texts(samples, 4)
    grid = torch.tensor([[1, 4, 4]] * samples)
    pixels = torch.randn(samples * 16, 3 * 2 * 4 * 4)
    return batch | {
        "mm_token_type_ids": (batch["input_ids"] == _IMAGE).long(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


def _batch_of_gemma(samples: int) -> dict[str, torch.Tensor]:
    batch = _texts(samples, 4)
    types = (batch["input_ids"] == _IMAGE).long()
    return batch | {"token_type_ids": types, "pixel_values": torch.randn(samples, 3, 16, 16)}


def _batch_of_smolvlm(samples: int) -> dict[str, torch.Tensor]:
    """The second image of each sample is padding."""
    pixels = torch.randn(samples, 2, 3, 16, 16)
    mask = torch.ones(samples, 2, 16, 16, dtype=torch.long)
    pixels[:, 1], mask[:, 1] = 0, 0
    return _texts(samples, 4) | {"pixel_values": pixels, "pixel_attention_mask": mask}


_Made = tuple[Callable[[], nn.Module], Callable[[int], Any]]
VISION_LANGUAGE: dict[str, _Made] = {
    "qwen2.5-vl": (_qwen25, _batch_of_qwen),
    "qwen3-vl": (_qwen3, _batch_of_qwen),
    "gemma3": (_gemma3, _batch_of_gemma),
    "smolvlm": (_smolvlm, _batch_of_smolvlm),
}


def vision_language(name: str, effective_batch_size: int = 2) -> Workload:
    """Training one of these models."""
    model, batch = VISION_LANGUAGE[name]
    return Workload(model, batch, effective_batch_size=effective_batch_size, name=name)
