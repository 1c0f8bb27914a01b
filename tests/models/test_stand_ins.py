"""Which preset stands for a model of a hub."""

from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.models.stand_ins import stand_in


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2-vl-7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_a_preset_of_its_own_needs_no_note(name: str, preset: str) -> None:
    assert stand_in(name, 2048) == (preset, None)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-Reranker-4B", "qwen3-4b"),
        ("deepcogito/cogito-v1-preview-qwen-14B", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("Skywork/Skywork-Reward-V2-Qwen3-8B", "qwen3-8b"),
        ("iic/gme-Qwen2-VL-2B-Instruct", "qwen2-vl-2b"),
        ("casperhansen/llama-3-70b-fp16", "llama-3.1-70b"),
        ("OpenGVLab/InternVL3_5-8B", "internvl3.5-8b"),
        ("stabilityai/stablelm-2-zephyr-1_6b", "stablelm-2-1.6b"),
        ("mistralai/Devstral-Small-2507", "mistral-small-24b"),
        ("mistralai/Magistral-Small-2509", "mistral-small-3.1-24b"),
        ("BAAI/bge-reranker-v2-m3", "bge-m3"),
    ],
)
def test_names_of_the_same_sizes(name: str, preset: str) -> None:
    assert stand_in(name, 512) == (preset, f"{name} is taken to have the sizes of {preset}.")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("XiaomiMiMo/MiMo-7B-RL", "mistral-7b"),  # the nearest of any family
        ("Qwen/Qwen-7B", "qwen2.5-7b"),  # the nearest of its own
        ("allenai/Llama-3.1-Tulu-3-8B", "llama-3.1-8b"),  # the most alike by name of those as large
        ("google/gemma-4-12B-it", "gemma-3-12b"),  # takes images, though its name does not say so
        ("TinyLlama/TinyLlama_v1.1", "llama-3.2-1b"),  # whose own samples are shorter
        ("mistralai/Mixtral-8x7B-Instruct-v0.1-long", "mixtral-8x7b"),
        ("arcee-ai/Trinity-Nano-Preview", "trinity-nano"),  # its sizes are not known one by one
        ("AIDC-AI/Ovis2-34B", "qwen2.5-vl-32b"),
    ],
)
def test_one_as_large_stands_for_others_and_says_so(name: str, preset: str) -> None:
    found, note = stand_in(name, 4096)
    assert found == preset
    assert note is not None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", "no preset is like it"),
        ("someone/Mixtral-3x3B", "no preset is like it"),
        ("Qwen/Qwen3-1000B-A30B", "no preset is like it"),
        ("nvidia/NVIDIA-Nemotron-3-Ultra-500B-A50B-BF16", "no preset is like it"),
        ("someone/our-model-7B", "no preset is like it"),
        ("deepseek-ai/deepseek-vl2", "no preset is like it"),
        ("deepseek-ai/DeepSeek-Math-V2", "no preset is like it"),
        ("Qwen/Qwen2-Audio-7B-Instruct", "no preset is like it"),
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "quantised already"),
    ],
)
def test_what_has_no_like_is_told(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        stand_in(name, 2048)


def test_another_family_stands_for_one_whose_adapted_layers_it_has() -> None:
    name = "baichuan-inc/Baichuan2-7B-Base"
    assert stand_in(name, 4096, layers=("q_proj", "up_proj"))[0] == "llama-2-7b"
    with pytest.raises(InputError, match="no preset with layers named W_pack is like it"):
        stand_in(name, 4096, layers=("W_pack", "o_proj"))


def test_a_file_of_images_gets_a_model_that_sees() -> None:
    task = "image-text-to-text"
    assert stand_in("google/gemma-3-4b-it", 2048, task=task)[0] == "gemma-3-4b"
    assert stand_in("someone/seeing-8b", 2048, task=task)[0] == "qwen2-vl-7b"


def test_a_directory_is_itself_and_long_samples_need_room(tmp_path: Path) -> None:
    assert stand_in(str(tmp_path), 128) == (str(tmp_path), None)
    assert stand_in("openai-community/gpt2", 1024)[0] == "gpt2"
    with pytest.raises(InputError, match="no preset is like it"):
        stand_in("meta-llama/Llama-3.1-8B", 500_000)
    name, note = stand_in("meta-llama/Llama-3.1-8B", 500_000, stretches=True)
    assert name == "llama-3.1-8b" and "sizes of llama-3.1-8b" in str(note)
    with pytest.raises(InputError, match="gpt2 takes samples of at most 1024 tokens, not 4096"):
        stand_in("openai-community/gpt2", 4096)
