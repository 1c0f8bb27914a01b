"""A config.json from a directory or the hub becomes a model, or one sentence that says why not."""

import json
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from autofit.core.errors import InputError
from autofit.models.config_json import check_weights, is_hub_id, read_directory, read_hub
from autofit.models.huggingface import huggingface_workload
from autofit.models.tasks.sizes import YOUR_FUNCTION
from autofit.training.inspect import inspect_workload
from tests.tiny import CPU, mixture_workload

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,  # where transformers 4 had it
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SAY_LLAMA = (
    "Say what to train it for, --task causal-lm, sequence-classification, token-classification, question-answering, "
    f"embed. {YOUR_FUNCTION}"
)
REMOTE_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class NovelConfig(PreTrainedConfig):
    model_type = "novel"

    def __init__(self, vocab_size=20, hidden_size=8, **rest):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**rest)


class NovelForCausalLM(PreTrainedModel):
    config_class = NovelConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, labels=None, **_):
        logits = self.head(self.embed(input_ids))
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)
"""
REMOTE_CONFIG = {
    "model_type": "novel",
    "architectures": ["NovelForCausalLM"],
    "auto_map": {
        "AutoConfig": "novel.NovelConfig",
        "AutoModelForCausalLM": "novel.NovelForCausalLM",
    },
    "vocab_size": 30,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


def write(directory: Path, config: Any) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    return directory


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_directory(directory, **options)
    return str(caught.value)


def test_a_directory_becomes_a_workload_that_trains(directory: Path) -> None:
    model = read_directory(write(directory, LLAMA))
    assert (model.name, model.task) == ("my-model", "causal-lm")
    assert model.source == {"kind": "directory", "path": str(directory)}
    workload = cloudpickle.loads(cloudpickle.dumps(huggingface_workload(model)))
    assert workload.sequence_length == 64
    made = workload.model()
    assert made.config.rope_parameters["rope_theta"] == 500000.0
    assert made.config.use_cache is False
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    made(**workload.batch(2)).loss.backward()


def test_the_model_is_remembered_by_its_whole_path(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, LLAMA)
    monkeypatch.chdir(directory)
    model = read_directory(Path())
    assert (model.name, model.source["path"]) == ("my-model", str(directory))


@pytest.mark.parametrize(
    ("architecture", "config", "task"),
    [
        ("LlamaForCausalLM", LLAMA, "causal-lm"),
        ("GPT2LMHeadModel", {"model_type": "gpt2"}, "causal-lm"),
        ("BertForMaskedLM", BERT, "masked-lm"),
        ("BertForPreTraining", BERT, "masked-lm"),
        ("BertForSequenceClassification", BERT, "sequence-classification"),
        ("ViTForImageClassification", {"model_type": "vit"}, "image-classification"),
    ],
)
def test_the_task_follows_from_the_architecture(
    directory: Path, architecture: str, config: dict[str, Any], task: str
) -> None:
    assert (
        read_directory(write(directory, {**config, "architectures": [architecture]})).task == task
    )


def test_the_labels_of_a_classifier_are_counted(directory: Path) -> None:
    labels = {str(number): f"class {number}" for number in range(5)}
    config = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": labels}
    workload = huggingface_workload(read_directory(write(directory, config)))
    assert workload.batch.labels.classes == 5
    assert workload.model().classifier.out_features == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "{path} cannot be read: It looks like the config file at '{path}' is not a valid JSON file. "
              "Correct it, or write it again with save_pretrained."),
        ([], "{path} should hold a mapping, not list. Correct it."),
        ({}, "{path} has no model_type. Add the key, or write it with save_pretrained."),
        ({"model_type": ["llama"]}, "{path} has no model_type. Add the key, or write it with save_pretrained."),
        ({**LLAMA, "model_type": "lama9"}, "{path} has model_type 'lama9', which this version of transformers does "
                                           "not know. Install a newer transformers."),
        ({**LLAMA, "architectures": None},
         "{path} does not say in `architectures` what the model is for. " + SAY_LLAMA),
        ({**LLAMA, "architectures": ["LlamaModel"]},
         "{path} is of LlamaModel, which does not say what to train it for. " + SAY_LLAMA),
        ({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]},
         "{path} is of T5WithLMHeadModel, which does not say what to train it for. Say what to train it for, --task "
         "seq2seq, sequence-classification, token-classification, question-answering, embed. " + YOUR_FUNCTION),
        ({"model_type": "vit_mae", "architectures": ["ViTMAEForPreTraining"]},
         "{path} is of ViTMAEForPreTraining, which does not say what to train it for. " + YOUR_FUNCTION),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}},
         "{path} is of a checkpoint that is already quantised. Give the model it was made from; autofit quantises it "
         "itself where that is faster."),
        ({**LLAMA, "hidden_size": "big"},
         "{path} describes no valid model: Validation error for field 'hidden_size': TypeError: Field 'hidden_size' "
         "expected int, got str (value: 'big'). Correct it."),
        ({**LLAMA, "num_attention_heads": 0},
         "{path} describes no valid model: integer division or modulo by zero. Correct it."),
    ],
)  # fmt: skip
def test_configs_that_are_refused(directory: Path, config: Any, message: str) -> None:
    expected = message.replace("{path}", str(directory / "config.json"))
    assert refusal(write(directory, config)) == expected


def test_a_directory_without_a_config(directory: Path) -> None:
    assert refusal(directory) == (
        f"the directory {directory} holds no config.json. "
        "Give the directory of a Hugging Face model, or the name of a preset."
    )
    assert (
        refusal(directory / "gone")
        == f"the directory {directory / 'gone'} is not there. Check the path."
    )


def test_code_of_the_model_is_not_run_unasked(directory: Path) -> None:
    (directory / "novel.py").write_text("raise RuntimeError('was run')")
    assert refusal(write(directory, REMOTE_CONFIG)) == (
        f"{directory / 'config.json'} needs Python code that comes with the model, which is not run unasked. "
        "Look at that code, then add --trust-remote-code."
    )


def test_code_of_the_model_is_run_when_allowed(directory: Path) -> None:
    (directory / "novel.py").write_text(REMOTE_MODEL)
    model = read_directory(write(directory, REMOTE_CONFIG), trust_remote_code=True)
    workload = huggingface_workload(cloudpickle.loads(cloudpickle.dumps(model)), sequence_length=8)
    made = workload.model()
    assert (type(made).__name__, made.embed.num_embeddings) == ("NovelForCausalLM", 30)
    made(**workload.batch(2)).loss.backward()


def test_code_of_the_model_that_fails_is_one_sentence(directory: Path) -> None:
    (directory / "novel.py").write_text("raise RuntimeError('first line\\nsecond line')")
    message = refusal(write(directory, REMOTE_CONFIG), trust_remote_code=True)
    assert (
        message
        == f"{directory / 'config.json'} describes no valid model: first line second line. Correct it."
    )


def test_a_known_config_with_a_model_class_of_its_own_needs_permission(directory: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "novel.NovelForCausalLM"}
    config = {"model_type": "vit", "architectures": ["NovelForCausalLM"], "auto_map": auto_map}
    assert "--trust-remote-code" in refusal(write(directory, config))


def test_a_hub_id_without_network_says_what_to_do() -> None:
    with pytest.raises(InputError) as caught:
        read_hub("nobody/nothing")
    assert caught.value.message.startswith(
        "nobody/nothing is no directory here, and its config.json cannot be fetched: "
    )
    assert "\n" not in caught.value.message
    assert caught.value.remedy == "Download the model and give its directory, or check the name."


def test_a_hub_id_is_read_from_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(directory, LLAMA) / "config.json"
    monkeypatch.setattr(
        "transformers.configuration_utils.cached_file", lambda *_, **__: str(config)
    )
    model = read_hub("somebody/some-llama")
    assert (model.name, model.task) == ("some-llama", "causal-lm")
    assert model.source == {"kind": "hub", "model": "somebody/some-llama"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", True),
        ("org-1/Model_2.5", True),
        ("a", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a", False),
    ],
)
def test_hub_ids(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected


MIXTURE = {"architectures": ["GptOssForCausalLM"], **mixture_workload("gpt_oss").model.config}


def test_a_checkpoint_that_is_dequantised_as_it_is_read_is_meant_as_such(directory: Path) -> None:
    plain = huggingface_workload(read_directory(write(directory, MIXTURE)))
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    workload = huggingface_workload(
        read_directory(write(directory, {**MIXTURE, "quantization_config": stored}))
    )
    shapes, theirs = (
        [(n, p.shape) for n, p in each.model().named_parameters()] for each in (workload, plain)
    )
    assert shapes == theirs
    # or what is trained would be saved as if it had
    assert not hasattr(workload.model().config, "quantization_config")
    assert workload.model.transformers_config().quantization_config == {
        **stored,
        "dequantize": True,
    }
    notes, none = (inspect_workload(each, CPU, None).notes for each in (workload, plain))
    assert none == ()
    assert notes == (
        "the checkpoint holds mxfp4 weights, dequantised as they are loaded: figures are of the dequantised.",
    )


def test_weights_are_a_directory_or_on_a_hub(tmp_path: Path) -> None:
    check_weights("meta-llama/Llama-3.1-8B")
    check_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(InputError, match="is a file, and weights are read from a directory"):
        check_weights(str(file))
    with pytest.raises(InputError, match="is not there"):
        check_weights(str(tmp_path / "nowhere"))
