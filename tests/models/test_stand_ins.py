"""Which preset stands for a model of a hub."""

from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.models.stand_ins import stand_in


@pytest.mark.parametrize(
    ("name", "preset", "is_said"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b", False),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama-3-8b", True),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", True),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b", True),
        ("Qwen/Qwen3-4B-Instruct-2507", "llama-3.2-3b", True),
        ("deepcogito/cogito-v1-preview-qwen-14B", "llama-2-13b", True),
    ],
)
def test_the_same_sizes_or_as_many_parameters(name: str, preset: str, is_said: bool) -> None:
    found, note = stand_in(name, 2048)
    assert found == preset
    assert (note is not None) == is_said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", "no preset is like it"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "no preset is like it"),
        ("Qwen/Qwen2-VL-7B-Instruct", "no preset is like it"),
        ("state-spaces/mamba-2.8b", "no preset is like it"),
        ("Qwen/Qwen3.5-27B", "no preset is like it"),
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "quantised already"),
    ],
)
def test_what_has_no_like_is_told(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        stand_in(name, 2048)


def test_a_directory_is_itself_and_long_samples_need_room(tmp_path: Path) -> None:
    assert stand_in(str(tmp_path), 128) == (str(tmp_path), None)
    assert stand_in("openai-community/gpt2", 1024)[0] == "gpt2"
    with pytest.raises(InputError, match="no preset is like it"):
        stand_in("openai-community/gpt2", 4096)
