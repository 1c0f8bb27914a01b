"""`autofit train` on images beside texts, through the processors of the models themselves."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.smolvlm import processing_smolvlm

from autofit.core.errors import InputError
from tests.api.trained_files import Run
from tests.data import pictures

TEXT = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
QWEN_VISION = {
    **dict.fromkeys(("depth", "num_heads"), 2),
    **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32),
    "patch_size": 28,
}
QWEN_TOKENS = {
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN_TOKENS,
        "text_config": {**TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
        "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 112},
    },
    "qwen3_vl": {
        **QWEN_TOKENS,
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": MROPE,
        },
        "vision_config": {
            **QWEN_VISION,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "boi_token_index": 261,
        "eoi_token_index": 262,
        "image_token_index": 263,
    },
    "smolvlm": {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": 259,
    },
}
SAVE = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), pictures.save_qwen),
    "gemma3": pictures.save_gemma,
}


def model(folder: Path, kind: str = "qwen2_5_vl") -> Run:
    run = Run(folder, "image-text-to-text", CONFIGS[kind], length=192)
    SAVE.get(kind, pictures.save_smol)(run.model)
    return run


def colours(run: Run) -> Path:
    """Four discs, of sizes of their own, and what colour each has."""
    rows: list[Any] = []
    for number, colour in enumerate(("red", "green", "blue", "black")):
        pictures.draw(run.folder / f"{colour}.png", colour, (60 + 60 * number, 60))
        rows.append({"image": f"{colour}.png", "prompt": "Which colour?", "completion": colour})
    return run.data(*rows)


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in CONFIGS if kind != "smolvlm"),
        pytest.param("smolvlm", marks=pictures.needs_smol),
    ],
)
def test_two_real_steps(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # a package that only its videos need
    run = model(tmp_path, kind)
    data = colours(run)
    split = run.losses(data, steps=2, eval_data=data)
    run.content["config"] = {}
    whole = run.losses(data, steps=2)
    assert whole == pytest.approx(split, rel=1e-3)
    assert split[1] < split[0]

    # What an image shows matters, or these would be the same to the bit. In Gemma 3 it does from the second step on,
    # since the projection of images begins as zeros.
    pictures.draw(tmp_path / "red.png", "white")
    assert run.losses(data, steps=2)[1] != whole[1]


def test_the_processor_is_left_beside_the_trained_model(tmp_path: Path) -> None:
    run = model(tmp_path)
    run.train(colours(run), steps=1, output=tmp_path / "out")
    names = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    }
    assert names <= {file.name for file in (tmp_path / "out" / "model").iterdir()}
    assert run.losses(colours(run), steps=1, weights=tmp_path / "out" / "model")


def test_a_model_without_a_processor(tmp_path: Path) -> None:
    run = model(tmp_path)
    (run.model / "preprocessor_config.json").unlink()
    with pytest.raises(
        InputError, match="its own processor makes of a file, and none is there"
    ) as error:
        run.train(colours(run), steps=1)
    assert "preprocessor_config.json" in error.value.remedy


def test_a_killed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    run = model(tmp_path)
    data = colours(run)
    whole = run.losses(data, steps=4)
    assert run.losses(data, steps=2, output=tmp_path / "out") == whole[:2]
    assert run.losses(data, steps=4, output=tmp_path / "out", resume=True) == whole
