"""Answers to prompts with an image each: batches, losses, and how such a workload is made again."""

from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.models import needs_images, resolve, workload_from_source
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.models.losses.preference import inputs_of
from autofit.training.build import build
from autofit.training.step import train_step
from tests.estimate.traced import peak, traced, tracked
from tests.tiny import CLIP_VISION, CPU, LLAMA

QWEN = {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 2,
        "num_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "patch_size": 56,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    },
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 60,
    "text_config": LLAMA,
    "vision_config": CLIP_VISION,
}


def workload(task: str, config: dict[str, Any] = QWEN) -> Any:
    model = HuggingFaceModel("seeing", task, config, {"kind": "directory", "path": "x"}, sees=True)
    return huggingface_workload(model, sequence_length=32, effective_batch_size=2)


def test_each_answer_has_its_image() -> None:
    batch = workload("dpo").batch(3)
    assert batch["input_ids"].shape == (3, 2, 32)
    assert batch["pixel_values"].shape[:2] == (3, 2)
    assert batch["image_grid_thw"].tolist() == [[[1, 8, 8]] * 2] * 3
    assert bool((batch["labels"][:, :, :18] == -100).all())  # the image stands in the prompt
    assert bool((batch["input_ids"] == 5).sum(dim=2).eq(16).all())

    inputs = inputs_of(batch)
    assert inputs["input_ids"].shape == (6, 32)
    assert inputs["pixel_values"].shape == (6 * 64, batch["pixel_values"].shape[-1])
    assert "labels" not in inputs and "reference" not in inputs


@pytest.mark.parametrize("config", [QWEN, LLAVA], ids=["patches", "pixels"])
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_micro_batches_train_what_the_whole_does(task: str, config: dict[str, Any]) -> None:
    made = workload(task, config)
    losses = []
    for micro in (2, 1):
        setup = build(made, {"micro_batch_size": micro, "reference": "resident"}, CPU)
        losses.append([train_step(setup, made.batch(2)).item() for _ in range(2)])
        setup.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_bytes_are_those_of_real_steps() -> None:
    made = workload("dpo", LLAVA)
    for knobs in ({"micro_batch_size": 1}, {"activation_checkpointing": "full"}):
        assert peak(traced(made, **knobs)) == tracked(made, knobs)


def test_it_is_made_again_from_a_result() -> None:
    made = resolve("qwen2-vl-2b", task="dpo", sequence_length=512, sees=True)
    assert made.source["sees"] is True
    again = workload_from_source(made.source, made.summary())
    assert again.model == made.model
    assert again.batch(1).keys() == made.batch(1).keys()
    assert "pixel_values" not in resolve("qwen2.5-0.5b", task="dpo").batch(1)
    with pytest.raises(InputError, match="no model of for image-text-to-text"):
        resolve("qwen2.5-0.5b", task="dpo", sees=True)


def test_models_that_need_images_are_known() -> None:
    assert needs_images("qwen2.5-vl-3b", "dpo")
    assert needs_images("qwen2.5-vl-3b", "rerank")
    assert not needs_images("qwen2.5-vl-3b", "causal-lm")  # which it can be on texts alone
    assert not needs_images("qwen2.5-0.5b", "dpo")
    assert not needs_images("somebody/on-the-hub", "dpo")


def test_both_texts_of_a_pair_differ() -> None:
    batch = workload("orpo").batch(1)
    assert not torch.equal(batch["input_ids"][0, 0], batch["input_ids"][0, 1])
