"""Whatever stands in a config.json, reading it gives a workload or one sentence, and takes little memory."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.models.config_json import check_directory, read_directory
from autofit.models.huggingface import huggingface_workload
from tests.models.test_config_json import BERT, LLAMA
from tests.processes import as_ordinary_user

VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "image_size": 32,
    "num_hidden_layers": 1,
}
BASES = [
    LLAMA,
    {**BERT, "architectures": ["BertForSequenceClassification"]},
    {**BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForCausalLM"],
        "text_config": {"vocab_size": 99},
    },
    {
        "model_type": "siglip",
        "architectures": ["SiglipForImageClassification"],
        "vision_config": {"image_size": 32},
    },
    {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
    VIT,
]
KEYS = [
    "architectures",
    "auto_map",
    "dtype",
    "hidden_size",
    "id2label",
    "image_size",
    "label2id",
    "layer_types",
]
KEYS += [
    "max_position_embeddings",
    "max_seq_len",
    "model_type",
    "num_attention_heads",
    "num_channels",
    "num_labels",
]
KEYS += [
    "num_hidden_layers",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "rope_scaling",
    "text_config",
]
KEYS += [
    "tie_word_embeddings",
    "torch_dtype",
    "vision_config",
    "vocab_size",
    "use_cache",
    "transformers_version",
]
NUMBERS = st.sampled_from([0, -1, 7, 1.5, 1e30, 10**30, 2**40, float("nan"), float("inf")])
PLAIN = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "x", "\ud800", "a\0b"])
JUNK = (
    PLAIN
    | st.lists(PLAIN, max_size=3)
    | st.dictionaries(st.sampled_from(["0", "a", "vocab_size"]), PLAIN)
)


def read(directory: Path, config: Any) -> Workload:
    (directory / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return huggingface_workload(read_directory(directory))


@pytest.mark.filterwarnings("ignore")  # of transformers, on what it finds strange
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from(BASES),
    changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=2),
)
def test_other_values_of_any_key(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        workload = read(tmp_path, {**base, **changes})
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(workload, Workload)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**LLAMA, "model_type": "x", "auto_map": 3},
            "auto_map should be a mapping, not 3. Correct it.",
        ),
        (
            {**LLAMA, "auto_map": ["AutoConfig"]},
            "auto_map should be a mapping, not ['AutoConfig'].",
        ),
        ({**LLAMA, "architectures": 7}, "does not say in `architectures` what the model is for."),
        ({**LLAMA, "architectures": [7]}, "does not say in `architectures` what the model is for."),
        ({**LLAMA, "model_type": []}, "has no model_type."),
        ({**LLAMA, "quantization_config": "x"}, "is of a checkpoint that is already quantised."),
        ({**LLAMA, "vocab_size": -1}, "the config of {name} needs a positive vocab_size, not -1."),
        ({**LLAMA, "vocab_size": 1e30}, "expected int, got float (value: 1e+30)"),
        ({**LLAMA, "vocab_size": None}, "expected int, got NoneType (value: None)"),
        ({**LLAMA, "text_config": 3}, "describes no valid model: "),
        ({**LLAMA, "num_labels": 10**12}, "num_labels cannot be 1000000000000. Correct it."),
        (
            {**LLAMA, "text_config": {"num_hidden_layers": 10**9}},
            "num_hidden_layers cannot be 1000000000.",
        ),
        ({**BASES[3], "hidden_size": None}, "describes no valid model: "),
        ({**BASES[3], "dtype": 1.5}, "describes no valid model: "),
        (
            {**VIT, "image_size": [1, 2, 3]},
            "the config of {name} cannot have image_size [1, 2, 3].",
        ),
        ({**VIT, "image_size": -1}, "the config of {name} cannot have image_size -1."),
        ("[" * 100_000, "cannot be read: "),
        ('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}", "cannot be read: "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, config)
    assert message.replace("{name}", tmp_path.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for make in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        make()
        with pytest.raises(
            InputError, match=r"config\.json cannot be read: it is no regular file\."
        ):
            check_directory(tmp_path)
        file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"holds no config\.json\."):
        check_directory(tmp_path)
    with pytest.raises(InputError, match="the directory of a model cannot be 'a"):
        check_directory("a\0b")


def test_a_file_without_permission() -> None:
    def test(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "config.json").chmod(0)
        with pytest.raises(InputError, match=r"config\.json cannot be read: Permission denied\."):
            check_directory(folder)
        folder.chmod(0)
        with pytest.raises(InputError, match=r"cannot be read: Permission denied|is not there"):
            check_directory(folder / "model")

    as_ordinary_user(test)
