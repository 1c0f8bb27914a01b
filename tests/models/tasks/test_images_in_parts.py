"""Models that are told the shape of an image's patches, or see it as a whole and in parts."""

from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from tests.estimate.traced import peak, traced, tracked
from tests.tiny import LLAMA

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LFM2 = {
    "model_type": "lfm2_vl",
    "image_token_id": 60,
    "vision_config": {**_SIZES, "patch_size": 56, "num_patches": 64, "vision_use_head": False},
    "text_config": {
        **_SIZES,
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
        "max_position_embeddings": 256,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
}
PADDLE_OCR = {
    "model_type": "paddleocr_vl",
    "image_token_id": 60,
    "vision_start_token_id": 61,
    "vision_end_token_id": 62,
    "vision_config": {**_SIZES, "patch_size": 56, "image_size": 448},
    "text_config": {
        **LLAMA,
        "model_type": "paddleocr_vl_text",
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 3, 3],
        },
    },
}
LLAVA_NEXT = {
    "model_type": "llava_next",
    "image_token_index": 60,
    "image_grid_pinpoints": [[28, 56], [56, 56]],
    "text_config": {**LLAMA, "max_position_embeddings": 256},
    "vision_config": {
        "model_type": "clip_vision_model",
        **_SIZES,
        "image_size": 28,
        "patch_size": 14,
    },
}


def workload(config: dict[str, Any], length: int = 48) -> Any:
    model = HuggingFaceModel("seeing", "image-text-to-text", config)
    return huggingface_workload(model, sequence_length=length, effective_batch_size=2)


def test_an_image_is_as_many_tokens_as_the_model_makes_of_it() -> None:
    shaped = workload(LFM2).batch(2)
    assert shaped["spatial_shapes"].tolist() == [[8, 8]] * 2
    assert shaped["pixel_values"].shape == (2, 64, 3 * 56 * 56)
    assert (shaped["input_ids"] == 60).sum(dim=1).tolist() == [16, 16]  # of four patches each

    squares = workload(PADDLE_OCR).batch(2)
    assert squares["image_grid_thw"].tolist() == [[1, 8, 8]] * 2
    assert squares["pixel_values"].shape == (2 * 64, 3, 56, 56)
    assert (squares["input_ids"] == 60).sum(dim=1).tolist() == [16, 16]

    in_parts = workload(LLAVA_NEXT).batch(2)
    assert in_parts["image_sizes"].tolist() == [[56, 56]] * 2
    assert in_parts["pixel_values"].shape == (2, 5, 3, 28, 28)
    # the whole, its quarters, and the end of each of their rows
    assert (in_parts["input_ids"] == 60).sum(dim=1).tolist() == [4 + 16 + 4] * 2


@pytest.mark.parametrize(
    "config", [LFM2, LLAVA_NEXT, PADDLE_OCR], ids=["shapes", "parts", "squares"]
)
def test_a_step_takes_what_is_predicted(config: dict[str, Any]) -> None:
    made = workload(config)
    for knobs in ({}, {"micro_batch_size": 1, "activation_checkpointing": "full"}):
        assert peak(traced(made, **knobs)) == pytest.approx(tracked(made, knobs), rel=0.01)


def test_an_image_that_a_model_does_not_take_is_told() -> None:
    with pytest.raises(InputError, match="no images of 56 x 56"):
        workload({**LLAVA_NEXT, "image_grid_pinpoints": [[28, 56]]})
