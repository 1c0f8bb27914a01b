"""A saved result and a data file train the model it names; what does not go together is told in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml

from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note
from autofit.fit import Trained
from autofit.train import TrainOptions, train_saved

DATA = Path(__file__).parents[1] / "examples" / "data"
BYTES = tiny.LLAMA | {"vocab_size": 256}
BERT = {
    "model_type": "bert",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "id2label": {"0": "cat", "1": "dog", "2": "cow"},
}


class Case:
    """A model's directory and a result that names it."""

    def __init__(self, folder: Path, architecture: str, config: dict[str, Any], *, length: int | None = 32) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        self.result = folder / "result.yaml"
        self.content: dict[str, Any] = {
            "autofit": 1,
            "model": "model",
            "workload": {"task": "any", "sequence_length": length, "effective_batch_size": 8},
            "source": {"kind": "directory", "path": str(self.model)},
            "hardware": {"device": "cpu"},
            "config": {"micro_batch_size": 4, "precision": "bf16-mixed"},
        }

    def train(self, data: Path, *, events: list[Event] | None = None, **options: Any) -> Trained:
        self.result.write_text(yaml.safe_dump(self.content))
        listener = events.append if events is not None else None
        return train_saved(self.result, data, TrainOptions(**{"lr": 3e-3, **options}), listener=listener)


@pytest.fixture
def causal(tmp_path: Path) -> Case:
    return Case(tmp_path, "LlamaForCausalLM", BYTES)


def losses(trained: Trained) -> list[float]:
    return [report.loss for report in trained.history]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_text_from_scratch(causal: Case) -> None:
    seen = losses(causal.train(DATA / "alice.txt"))
    assert len(seen) == -(-len((DATA / "alice.txt").read_bytes()) // 32 // 8)
    assert seen[0] == pytest.approx(5.5, abs=0.3)  # ln 256
    assert mean(seen[-5:]) < 0.75 * seen[0]


def test_the_seed_decides_weights_and_order(causal: Case) -> None:
    first, again, other = (losses(causal.train(DATA / "alice.txt", steps=3, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_labelled_lines(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0})
    assert losses(case.train(DATA / "reviews.jsonl", epochs=8))[-1] < 0.4


def test_masked_bytes(tmp_path: Path) -> None:
    case = Case(tmp_path, "BertForMaskedLM", BERT)
    seen = losses(case.train(DATA / "alice.txt", epochs=2))
    assert mean(seen[-5:]) < 0.8 * seen[0]


def test_images(tmp_path: Path) -> None:
    case = Case(tmp_path, "ViTForImageClassification", VIT, length=None)
    labels = torch.arange(24) % 3
    pixels = torch.randn(24, 3, 8, 8) + labels.view(-1, 1, 1, 1)
    torch.save({"pixel_values": pixels, "labels": labels}, tmp_path / "images.pt")
    seen = losses(case.train(tmp_path / "images.pt", epochs=15))
    assert mean(seen[-3:]) < 0.5 * seen[0]


def test_weights_that_were_trained_are_gone_on_with(causal: Case) -> None:
    events: list[Event] = []
    trained = causal.train(DATA / "alice.txt", epochs=2, output=causal.folder / "out", events=events)
    weights = causal.folder / "out" / "model"
    assert json.loads((weights / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    further = causal.train(DATA / "alice.txt", steps=2, weights=weights)
    assert losses(further)[0] == pytest.approx(mean(losses(trained)[-5:]), abs=0.2)
    assert not [event for event in events if isinstance(event, Note)]


def test_warnings_of_the_build_reach_the_listener(causal: Case) -> None:
    causal.content["config"] = {"precision": "bf16"}
    events: list[Event] = []
    causal.train(DATA / "alice.txt", steps=1, events=events)
    assert any(isinstance(event, Note) and "bf16 weights lose updates" in event.text for event in events)


def test_the_tokenizer_beside_the_weights_is_used(causal: Case) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[END]": 1, "the": 2, "rabbit": 3, "hole": 4}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    causal.train(DATA / "alice.txt", steps=1, output=causal.folder / "out")
    weights = causal.folder / "out" / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="[END]").save_pretrained(weights)
    (causal.folder / "a.txt").write_text("the rabbit hole " * 100)
    trained = causal.train(causal.folder / "a.txt", weights=weights, epochs=40)
    assert len(trained.history) == 40 * -(-(301 // 32) // 8)
    assert losses(trained)[-1] < 0.5  # four ids in turn are easily learnt, twelve bytes would not be yet


def test_going_on_with_a_stopped_run(causal: Case) -> None:
    out = causal.folder / "out"
    causal.train(DATA / "alice.txt", steps=2, output=out)
    further = causal.train(DATA / "alice.txt", steps=4, output=out, resume=True)
    assert [report.step for report in further.history] == [2, 3]
    assert causal.train(DATA / "alice.txt", steps=4, output=out, resume=True).history == []


# What does not go together


def with_source(source: Any) -> Callable[[Case], None]:
    return lambda case: case.content.update(source=source)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_source({}), "is of a model that lived in a Python process"),
        (with_source({"kind": "magic"}), "unknown kind of model source 'magic'"),
        (lambda case: shutil.rmtree(case.model), r"the directory .*model is not there"),
        (lambda case: case.content.pop("config"), "is not a result of autofit: it lacks config"),
        (lambda case: case.content.update(autofit=9), "has schema 9; this autofit reads schema 1"),
        (lambda case: case.content["config"].update(precison=1), r"unknown knob 'precison'\. Did you mean 'precision'"),
        (
            lambda case: case.content["workload"].update(effective_batch_size=6),
            "does not divide the effective batch of 6",
        ),
        (lambda case: case.content["hardware"].update(device="tpu"), "the device must be cpu or cuda, not 'tpu'"),
    ],
    ids=["living", "kind", "gone", "no config", "schema", "knob", "batch", "device"],
)
def test_results_that_cannot_be_trained(causal: Case, change: Callable[[Case], None], words: str) -> None:
    change(causal)
    with pytest.raises(InputError, match=words):
        causal.train(DATA / "alice.txt", steps=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_result_for_a_device_that_is_not_here(causal: Case) -> None:
    causal.content["hardware"]["device"] = "cuda"
    with pytest.raises(ProbeError, match="no CUDA device"):
        causal.train(DATA / "alice.txt", steps=1)


def test_a_function_of_the_users_has_data_of_its_own(causal: Case) -> None:
    code = "import tiny\ndef make():\n    return tiny.mlp_workload()\n"
    (causal.folder / "mine.py").write_text(code)
    causal.content["source"] = {"kind": "function", "function": f"{causal.folder / 'mine.py'}:make"}
    causal.content["workload"]["sequence_length"] = None
    with pytest.raises(InputError, match=r"is a function of yours, with data of its own\. Train it in Python"):
        causal.train(DATA / "alice.txt")


def test_a_vocabulary_too_small_for_the_data(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForCausalLM", tiny.LLAMA)
    with pytest.raises(InputError, match=r"the data has token ids up to \d+, but model knows 64 tokens"):
        case.train(DATA / "alice.txt")


def test_more_classes_than_the_model_has(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0})
    rows = [{"text": label, "label": label} for label in ("a", "b", "c")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="the data has 3 classes, but model has 2"):
        case.train(tmp_path / "a.jsonl")


def test_data_that_is_not_there(causal: Case) -> None:
    with pytest.raises(InputError, match=r"the data file .* is not there"):
        causal.train(causal.folder / "nothing.txt")


@pytest.mark.parametrize("content", [None, b"", b"no tensors"], ids=["none", "empty", "broken"])
def test_weights_that_cannot_be_loaded(causal: Case, content: bytes | None) -> None:
    weights = causal.folder / "weights"
    weights.mkdir()
    if content is not None:
        (weights / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"the weights in .*weights cannot be loaded: .*Give a directory") as caught:
        causal.train(DATA / "alice.txt", weights=weights)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_loaded(causal: Case) -> None:
    weights = causal.folder / "weights"
    weights.mkdir()
    (weights / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"the tokenizer in .*weights cannot be loaded"):
        causal.train(DATA / "alice.txt", weights=weights)
