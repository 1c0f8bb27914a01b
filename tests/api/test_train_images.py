"""`autofit train` on images beside texts, through the processors of the models themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError
from tests.api.trained_files import Run
from tests.data import pictures

_SMALL = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | dict.fromkeys(
    ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2
)
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 264,
        **_SMALL,
        "max_position_embeddings": 128,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        **dict.fromkeys(("depth", "num_heads"), 2),
        **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32),
        "patch_size": 28,
        "fullatt_block_indexes": [1],
        "window_size": 112,
    },
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
    "image_token_id": 261,
    "video_token_id": 262,
}


def qwen(folder: Path) -> Run:
    run = Run(folder, "image-text-to-text", QWEN, length=128)
    pictures.save_qwen(run.model)
    return run


def colours(run: Run) -> Path:
    """Four discs, of sizes of their own, and what colour each has."""
    rows: list[Any] = []
    for number, colour in enumerate(("red", "green", "blue", "black")):
        pictures.draw(run.folder / f"{colour}.png", colour, (60 + 60 * number, 60))
        rows.append({"image": f"{colour}.png", "prompt": "Which colour?", "completion": colour})
    return run.data(*rows)


@pytest.mark.parametrize("make", [qwen])
def test_two_real_steps(tmp_path: Path, make: Callable[[Path], Run]) -> None:
    run = make(tmp_path)
    data = colours(run)
    split = run.losses(data, steps=2, eval_data=data)
    run.content["config"] = {}
    assert run.losses(data, steps=2) == pytest.approx(split, rel=1e-3)
    assert split[1] < split[0]


def test_the_processor_is_left_beside_the_trained_model(tmp_path: Path) -> None:
    run = qwen(tmp_path)
    run.train(colours(run), steps=1, output=tmp_path / "out")
    names = {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"}
    assert names <= {file.name for file in (tmp_path / "out" / "model").iterdir()}
    assert run.losses(colours(run), steps=1, weights=tmp_path / "out" / "model")


def test_a_model_without_a_processor(tmp_path: Path) -> None:
    run = qwen(tmp_path)
    (run.model / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="its own processor makes of a file, and none is there") as error:
        run.train(colours(run), steps=1)
    assert "preprocessor_config.json" in error.value.remedy


def test_a_killed_run_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    run = qwen(tmp_path)
    data = colours(run)
    whole = run.losses(data, steps=4)
    first = run.losses(data, steps=2, output=tmp_path / "out")
    assert first + run.losses(data, steps=4, output=tmp_path / "out", resume=True) == whole
