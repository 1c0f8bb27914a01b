"""A saved result and a data file train the model it names; what does not go together is told in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from autofit.api.fit import Trained
from autofit.api.train import train
from autofit.cli import main as command_line
from autofit.core.errors import InputError, OutOfMemoryError, ProbeError
from autofit.core.events import Event, Note
from autofit.core.record import Record
from autofit.core.tasks import task_of_class
from autofit.probe import LocalExecutor
from tests import tiny
from tests.report.conftest import search_result

DATA = Path(__file__).parents[2] / "examples" / "data"
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

    def __init__(
        self, folder: Path, architecture: str, config: dict[str, Any], *, length: int | None = 32
    ) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(
            json.dumps({**config, "architectures": [architecture]})
        )
        self.result = folder / "result.yaml"
        task = task_of_class(architecture).name
        self.content: dict[str, Any] = {
            "autofit": 1,
            "model": "model",
            "workload": {"task": task, "sequence_length": length, "effective_batch_size": 8},
            "source": {"kind": "directory", "path": str(self.model)},
            "hardware": {"device": "cpu"},
            "config": {"micro_batch_size": 4, "precision": "bf16-mixed"},
        }

    def train(self, data: Path, *, events: list[Event] | None = None, **options: Any) -> Trained:
        self.result.write_text(yaml.safe_dump(self.content))
        listener = (events if events is not None else []).append
        return train(self.result, data, listener=listener, **{"lr": 3e-3, **options})


@pytest.fixture
def causal(tmp_path: Path) -> Case:
    return Case(tmp_path, "LlamaForCausalLM", BYTES)


def losses(trained: Trained) -> list[float]:
    return [report.loss for report in trained.history]


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of five words."""
    words = {"[UNK]": 0, "[END]": 1, "the": 2, "rabbit": 3, "hole": 4}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", eos_token="[END]", **special
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def two_passes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path, list[Event]]:
    """Two passes over a text from scratch: what was trained, where it was saved, and the events."""
    case, events = (
        Case(tmp_path_factory.mktemp("trained"), "LlamaForCausalLM", BYTES),
        list[Event](),
    )
    trained = case.train(DATA / "alice.txt", epochs=2, output=case.folder / "out", events=events)
    return trained, case.folder / "out" / "model", events


def test_a_text_from_scratch(two_passes: tuple[Trained, Path, list[Event]]) -> None:
    trained, weights, events = two_passes
    seen = losses(trained)
    assert len(seen) == 2 * -(-len((DATA / "alice.txt").read_bytes()) // 32 // 8)
    assert seen[0] == pytest.approx(5.5, abs=0.3)  # ln 256
    assert mean(seen[len(seen) // 2 - 5 : len(seen) // 2]) < 0.75 * seen[0]
    assert json.loads((weights / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    assert notes(events) == [
        "no tokenizer beside the weights: the bytes of the text are its token ids."
    ]


def test_that_nothing_was_measured_is_told_before_all_else(causal: Case) -> None:
    events: list[Event] = []
    causal.train(DATA / "alice.txt", steps=1, events=events)
    assert not any("predicted" in each for each in notes(events))
    causal.content |= {"measured": None, "predicted": {"step_seconds": 0.1}}
    causal.train(DATA / "alice.txt", steps=1, events=events)
    told = [each for each in notes(events) if "predicted" in each]
    assert told == [
        "Nothing was measured of this config: it is predicted. It may need more memory, or be slower, than predicted."
    ]


def test_the_seed_decides_weights_and_order(causal: Case) -> None:
    first, again, other = (
        losses(causal.train(DATA / "alice.txt", steps=3, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_labelled_lines(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0})
    seen = losses(case.train(DATA / "reviews.jsonl", epochs=6))
    # a pass is five steps; from the seventh on, rounding decides
    assert mean(seen[-5:]) < 0.7 * mean(seen[:5])


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


def test_training_goes_on_from_saved_weights(
    causal: Case, two_passes: tuple[Trained, Path, list[Event]]
) -> None:
    trained, weights, _ = two_passes
    further = causal.train(DATA / "alice.txt", steps=2, weights=weights)
    assert losses(further)[0] == pytest.approx(mean(losses(trained)[-5:]), abs=0.2)


def test_warnings_of_the_build_reach_the_listener(causal: Case) -> None:
    causal.content["config"] = {"precision": "bf16"}
    events: list[Event] = []
    causal.train(DATA / "alice.txt", steps=1, events=events)
    assert any(
        isinstance(event, Note) and "bf16 weights lose updates" in event.text for event in events
    )


def test_the_tokenizer_beside_the_weights_is_used(causal: Case) -> None:
    causal.train(DATA / "alice.txt", steps=1, output=causal.folder / "out")
    weights = causal.folder / "out" / "model"
    words_tokenizer().save_pretrained(weights)
    (causal.folder / "a.txt").write_text("the rabbit hole " * 100)
    trained = causal.train(causal.folder / "a.txt", weights=weights, epochs=40)
    assert len(trained.history) == 40 * -(-(301 // 32) // 8)
    # four ids in turn are easily learnt, twelve bytes would not be yet
    assert losses(trained)[-1] < 0.5


def test_going_on_with_a_stopped_run(causal: Case) -> None:
    out = causal.folder / "out"
    causal.train(DATA / "alice.txt", steps=2, output=out)
    further = causal.train(DATA / "alice.txt", steps=4, output=out, resume=True)
    assert [report.step for report in further.history] == [1, 2, 3, 4]
    again = causal.train(DATA / "alice.txt", steps=4, output=out, resume=True)
    assert again.history == further.history


def test_a_disk_that_fills_as_the_tokenizer_is_saved_loses_nothing(
    causal: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tokenizers raises a plain Exception."""
    out = causal.folder / "out"

    def fill(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fill)
        with pytest.raises(InputError, match=r"No space left on device.*run the same command"):
            causal.train(DATA / "alice.txt", steps=2, output=out)

    again = causal.train(DATA / "alice.txt", steps=2, output=out, resume=True)
    assert [report.step for report in again.history] == [1, 2]
    assert (out / "model" / "tokenizer.json").exists()


# What is read, and with what


def test_completions_are_learnt_and_prompts_are_not(causal: Case) -> None:
    rows = [{"prompt": f"{letter}?", "completion": "yes"} for letter in "abcdefghijklmnop"]
    seen = losses(causal.train(jsonl(causal.folder / "a.jsonl", *rows), epochs=40))
    assert seen[-1] < 0.1  # the prompts, one in sixteen each, cannot be guessed


def test_all_tokens_are_learnt_when_asked(causal: Case) -> None:
    rows = [{"prompt": f"{letter}?", "completion": "yes"} for letter in "abcdefghijklmnop"]
    data = jsonl(causal.folder / "a.jsonl", *rows)
    alone, all_tokens = (
        losses(causal.train(data, learn=learn, steps=1))[0] for learn in ("assistant", "all")
    )
    assert alone != all_tokens


def test_chats_of_bytes_leave_a_tokenizer_that_can_write_the_next(causal: Case) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data, events = jsonl(causal.folder / "a.jsonl", *[{"messages": turns}] * 8), list[Event]()
    causal.train(data, steps=1, output=causal.folder / "out", events=events)
    assert any("no chat template" in note for note in notes(events))
    tokenizer = AutoTokenizer.from_pretrained(causal.folder / "out" / "model")
    ids = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
    assert bytes(ids) == b"user:\nHi\x03\nassistant:\n"
    events.clear()
    causal.train(data, steps=1, weights=causal.folder / "out" / "model", events=events)
    assert not notes(events)


def test_padding_and_packing_are_chosen_and_told(causal: Case) -> None:
    data = jsonl(causal.folder / "a.jsonl", {"text": "a" * 40}, *[{"text": "abc"}] * 7)
    events: list[Event] = []
    assert len(causal.train(data, packing=False, events=events).history) == 1
    assert "cut to 32 tokens: 1 of 8 samples." in notes(events)
    packed = causal.train(data, packing=True, epochs=2)
    assert [report.samples for report in packed.history] == [8, 8]


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_packed_samples_are_as_many_rows_as_they_fill(causal: Case, rows: int) -> None:
    """One row alone, in which positions start again, is one sample, too."""
    causal.content["workload"] |= {"packing": True, "document_tokens": 8}
    causal.content["config"]["precision"] = "fp32"
    data = jsonl(causal.folder / "a.jsonl", *[{"prompt": "ab", "completion": "cd" * 3}] * rows)
    seen = []
    for micro_batch_size in (1, 8):
        causal.content["config"]["micro_batch_size"] = micro_batch_size
        trained = causal.train(data, steps=2, eval_data=data)
        assert {report.samples for report in trained.history} == {8}
        seen.append([*losses(trained), *trained.evaluations])
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)


def test_the_tokenizer_beside_the_config_serves_a_model_from_scratch(causal: Case) -> None:
    words_tokenizer().save_pretrained(causal.model)
    (causal.folder / "a.txt").write_text("the rabbit hole " * 100)
    events: list[Event] = []
    trained = causal.train(causal.folder / "a.txt", output=causal.folder / "out", events=events)
    assert len(trained.history) == -(-(301 // 32) // 8)
    assert not notes(events)
    assert len(AutoTokenizer.from_pretrained(causal.folder / "out" / "model")) == 5


def test_weights_of_a_hub_id_come_from_its_cache(
    causal: Case, two_passes: tuple[Trained, Path, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, weights, _ = two_passes
    snapshot = causal.folder / "hub" / "models--org--name" / "snapshots" / "main"
    shutil.copytree(weights, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(causal.folder / "hub"))
    events: list[Event] = []
    further = causal.train(DATA / "alice.txt", steps=1, weights="org/name", events=events)
    assert losses(further)[0] == pytest.approx(mean(losses(trained)[-5:]), abs=0.2)
    assert not notes(events)  # its tokenizer was found, too


def test_a_hub_id_that_cannot_be_had(causal: Case) -> None:
    with pytest.raises(
        InputError, match=r"the weights in nobody/nothing cannot be loaded: .*Give a dir"
    ) as caught:
        causal.train(DATA / "alice.txt", weights="nobody/nothing")
    assert "\n" not in str(caught.value)


def test_evaluation_on_a_second_file(
    causal: Case, two_passes: tuple[Trained, Path, list[Event]]
) -> None:
    half = (DATA / "alice.txt").read_text()[:2000]
    (causal.folder / "eval.txt").write_text(half)
    trained = causal.train(DATA / "alice.txt", epochs=2, eval_data=causal.folder / "eval.txt")
    first, second = trained.evaluations
    assert second < first < 5.0
    # evaluation draws nothing that training would have drawn
    assert losses(trained) == losses(two_passes[0])


def test_what_fit_takes_is_passed_on(causal: Case) -> None:
    options = {"schedule": "linear", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.5}
    trained = causal.train(DATA / "alice.txt", steps=3, lr=1e-3, **options)
    assert [report.lr for report in trained.history] == pytest.approx([5e-4, 1e-3, 5e-4])
    plain = causal.train(DATA / "alice.txt", steps=3, lr=1e-3, schedule="linear", warmup_steps=1)
    assert losses(plain)[0] == losses(trained)[0]
    assert losses(plain)[2] != losses(trained)[2]
    with pytest.raises(InputError, match="schedule must be one of"):
        causal.train(DATA / "alice.txt", schedule="cosin")


@pytest.fixture
def classifier(tmp_path: Path) -> Case:
    return Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0})


def csv_of(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"{row}\n" for row in ("text,label", *rows)))
    return path


def test_the_names_of_classes_are_kept_in_the_model(classifier: Case) -> None:
    data = csv_of(classifier.folder / "a.csv", "x,good", "yy,bad", "zzz,good")
    other = csv_of(classifier.folder / "b.csv", "x,good")
    trained = classifier.train(data, eval_data=other, epochs=30, output=classifier.folder / "out")
    # numbered as in the training data, where good is not the first
    assert trained.evaluations[-1] < 0.3
    saved = AutoModelForSequenceClassification.from_pretrained(classifier.folder / "out" / "model")
    assert saved.config.id2label == {0: "bad", 1: "good"}
    assert saved.config.label2id == {"bad": 0, "good": 1}
    with pytest.raises(
        InputError,
        match=r"b\.csv, line 3: label 'fair' is not among the classes, which are bad, good",
    ):
        classifier.train(data, eval_data=csv_of(other, "x,good", "y,fair"))


def test_a_model_that_names_its_classes_numbers_them(tmp_path: Path) -> None:
    named = {"pad_token_id": 0, "id2label": {"0": "good", "1": "bad"}}
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | named)
    trained = case.train(csv_of(tmp_path / "a.csv", "x,bad", "y,good"), steps=1)
    assert trained.model.config.id2label == {0: "good", 1: "bad"}


def test_a_class_beyond_the_models_is_named_by_its_line(classifier: Case) -> None:
    with pytest.raises(
        InputError, match=r"a\.csv, line 3: label 2, but the model has classes 0 to 1"
    ):
        classifier.train(csv_of(classifier.folder / "a.csv", "x,0", "y,2"))


def test_the_padding_of_the_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 9})
    words_tokenizer(pad_token="[UNK]").save_pretrained(case.model)
    rows = [{"text": "the rabbit hole", "label": 0}, {"text": "the", "label": 1}]
    trained = case.train(jsonl(tmp_path / "a.jsonl", *rows), epochs=30)
    assert trained.model.config.pad_token_id == 0
    assert losses(trained)[-1] < 0.1


def test_a_model_of_one_class_learns_values(tmp_path: Path) -> None:
    case = Case(
        tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0, "num_labels": 1}
    )
    case.content["config"] = {"precision": "fp32"}
    seen = losses(case.train(csv_of(tmp_path / "a.csv", "a,0.5", "b,-1.5"), epochs=40))
    assert seen[-1] < 0.1 * seen[0]


def test_several_labels_at_once_are_for_python(tmp_path: Path) -> None:
    several = {"pad_token_id": 0, "problem_type": "multi_label_classification"}
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | several)
    with pytest.raises(InputError, match="model takes several labels for each sample"):
        case.train(DATA / "reviews.jsonl")


def test_a_folder_of_images_is_normalised_as_the_weights_were_trained(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    case = Case(tmp_path, "ViTForImageClassification", VIT, length=None)
    for number, name in enumerate(("cat", "cow", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        image.new("RGB", (9, 5), (100 * number,) * 3).save(tmp_path / "images" / name / "a.png")
    torch.save(
        {"pixel_values": torch.zeros(1, 3, 8, 8), "labels": torch.tensor([0])}, tmp_path / "a.pt"
    )
    case.train(tmp_path / "a.pt", output=tmp_path / "out")
    weights = tmp_path / "out" / "model"
    seen = losses(case.train(tmp_path / "images", weights=weights, epochs=40))
    assert seen[-1] < 0.5 * seen[0]
    (weights / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [1, 1, 1], "image_std": [2, 2, 2]})
    )
    other = losses(
        case.train(tmp_path / "images", weights=weights, steps=1, output=tmp_path / "other")
    )
    assert other[0] != seen[0]
    left = json.loads((tmp_path / "other" / "model" / "preprocessor_config.json").read_text())
    assert left["image_mean"] == [1, 1, 1]


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
        (
            lambda case: case.content["config"].update(precison=1),
            r"unknown knob 'precison'\. Did you mean 'precision'",
        ),
        (
            lambda case: case.content["workload"].update(effective_batch_size=6),
            "does not divide the effective batch of 6",
        ),
        (
            lambda case: case.content["hardware"].update(device="tpu"),
            "the device must be cpu or cuda, not 'tpu'",
        ),
    ],
    ids=["living", "kind", "gone", "no config", "schema", "knob", "batch", "device"],
)
def test_results_that_cannot_be_trained(
    causal: Case, change: Callable[[Case], None], words: str
) -> None:
    change(causal)
    with pytest.raises(InputError, match=words):
        causal.train(DATA / "alice.txt", steps=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_result_for_a_device_that_is_not_here(causal: Case) -> None:
    causal.content["hardware"]["device"] = "cuda"
    with pytest.raises(ProbeError, match="no CUDA device"):
        causal.train(DATA / "alice.txt", steps=1)


def test_a_function_that_a_result_names_is_not_run(causal: Case) -> None:
    (causal.folder / "mine.py").write_text(
        f"open({str(causal.folder / 'ran')!r}, 'w')\ndef make(): ...\n"
    )
    causal.content["source"] = {"kind": "function", "function": f"{causal.folder / 'mine.py'}:make"}
    with pytest.raises(
        InputError, match=r"no file has autofit run code\. Give the model in Python"
    ):
        causal.train(DATA / "alice.txt")
    assert not (causal.folder / "ran").exists()


def test_a_vocabulary_too_small_for_the_data(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForCausalLM", tiny.LLAMA)
    with pytest.raises(
        InputError, match=r"the data has token ids up to \d+, but model knows 64 tokens"
    ):
        case.train(DATA / "alice.txt")


def test_more_classes_than_the_model_has(tmp_path: Path) -> None:
    case = Case(tmp_path, "LlamaForSequenceClassification", BYTES | {"pad_token_id": 0})
    rows = [{"text": label, "label": label} for label in ("a", "b", "c")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match="the data has 3 classes, but the model has 2"):
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
    with pytest.raises(
        InputError, match=r"the weights in .*weights cannot be loaded: .*Give a directory"
    ) as caught:
        causal.train(DATA / "alice.txt", weights=weights)
    assert "\n" not in str(caught.value)


def test_weights_that_lack_some_of_the_model_are_refused_by_their_names(causal: Case) -> None:
    """They would start from random numbers in silence, as if they had been trained."""
    causal.train(DATA / "alice.txt", steps=1, output=causal.folder / "out")
    weights = causal.folder / "out" / "model"
    given = load_file(weights / "model.safetensors")
    del given["model.layers.0.mlp.up_proj.weight"]
    save_file(given, weights / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"lack model\.layers\.0\.mlp\.up_proj\.weight\. Check .* --allow-missing"
    ):
        causal.train(DATA / "alice.txt", steps=1, weights=weights)
    save_file(
        {"lm_head.weight": given["model.norm.weight"]},
        weights / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError):  # of another shape
        causal.train(DATA / "alice.txt", steps=1, weights=weights, allow_missing=True)


def test_a_new_head_on_old_weights_is_asked_for(causal: Case, tmp_path: Path) -> None:
    causal.train(DATA / "alice.txt", steps=1, output=causal.folder / "out")
    weights = causal.folder / "out" / "model"
    (tmp_path / "classes").mkdir()
    case = Case(
        tmp_path / "classes",
        "LlamaForSequenceClassification",
        BYTES | {"pad_token_id": 0, "num_labels": 2},
    )
    rows = csv_of(tmp_path / "a.csv", "a,0", "b,1")
    with pytest.raises(InputError, match=r"lack score\.weight\."):
        case.train(rows, weights=weights, steps=1)
    events: list[Event] = []
    case.train(rows, weights=weights, steps=1, allow_missing=True, events=events)
    assert any(
        "lack score.weight: that starts from random numbers" in note for note in notes(events)
    )


def test_an_adapter_is_no_model(causal: Case) -> None:
    causal.content["config"] = {"precision": "fp32", "lora_rank": 8, "lora_targets": "all-linear"}
    causal.train(DATA / "alice.txt", steps=1, output=causal.folder / "out")
    with pytest.raises(
        InputError, match=r"out/model holds a LoRA adapter, not the weights of a model\. Merge it"
    ):
        causal.train(DATA / "alice.txt", steps=1, weights=causal.folder / "out" / "model")


def test_weights_that_are_quantised_already(causal: Case) -> None:
    weights = causal.folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(
        InputError,
        match=r"quantised already \(bitsandbytes\), .* plain ones\. Give the unquantised",
    ):
        causal.train(DATA / "alice.txt", weights=weights)


def test_a_tokenizer_that_cannot_be_loaded(causal: Case) -> None:
    weights = causal.folder / "weights"
    weights.mkdir()
    (weights / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"the tokenizer in .*weights cannot be loaded"):
        causal.train(DATA / "alice.txt", weights=weights)


def test_the_code_of_a_tokenizer_is_not_run_unasked(causal: Case) -> None:
    weights = causal.folder / "weights"
    weights.mkdir()
    code = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (weights / "tokenizer_config.json").write_text(json.dumps(code))
    (weights / "own.py").write_text(f"open({str(weights / 'ran')!r}, 'w')")
    with pytest.raises(
        InputError, match=r"the tokenizer in .*weights cannot be loaded: .* contains custom code"
    ):
        causal.train(DATA / "alice.txt", weights=weights)
    assert not (weights / "ran").exists()


def test_what_its_search_measured_to_need_less_is_named_where_memory_runs_out(
    causal: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("memory ran out in a test.", "Search again.")

    monkeypatch.setattr("autofit.api.train.fit", run_out)
    found = search_result()
    assert found.best
    causal.content["config"] = dict(found.best.config)
    with pytest.raises(OutOfMemoryError, match=r"test\. Search again\.$"):
        causal.train(DATA / "alice.txt")
    causal.result.with_name("result.json").write_text(Record(found).to_text())
    with pytest.raises(
        OutOfMemoryError, match=r"Its search measured less memory with --set precision=bf16: .* GiB"
    ):
        causal.train(DATA / "alice.txt")


def test_a_torn_update_goes_on_in_a_fresh_process(tmp_path: Path, executor: LocalExecutor) -> None:
    """One without the patch that tore it, for it is started by its command line; it takes the place of a zygote's
    child, which has all imported."""
    case = Case(tmp_path, "LlamaForCausalLM", BYTES)
    case.train(DATA / "alice.txt", steps=1)  # writes the result
    out = tmp_path / "out"
    command = [
        "train",
        str(case.result),
        "--data",
        str(DATA / "alice.txt"),
        "--from-scratch",
        "--lr",
        "3e-3",
    ]
    command += ["--steps", "8", "--output", str(out), "--checkpoint-every", "4"]

    def train_torn(_: None) -> None:
        calls, step = [], torch.optim.AdamW.step

        def torn(self: Any, closure: Any = None) -> None:
            calls.append(1)
            if len(calls) == 6:
                self.param_groups[0]["params"][0].data.add_(1.0)
                raise torch.OutOfMemoryError("CUDA out of memory")
            step(self, closure)

        torch.optim.AdamW.step = torn
        command_line(command)

    # of the fresh process, which answers nobody
    with pytest.raises(ProbeError, match="exit code 0"):
        executor.run(train_torn, None, log="torn.log", timeout=120.0)
    said = (executor.logs / "torn.log").read_text()
    assert (
        "left weights half updated: training goes on in a fresh process, from the last checkpoint"
        in said
    )
    assert "memory ran out in this run before, so it goes on with micro_batch_size 2" in said
    assert said.splitlines()[-1].startswith("8 steps, loss")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    whole = losses(case.train(DATA / "alice.txt", steps=8))
    assert [row["loss"] for row in rows] == pytest.approx(whole, rel=0.02)


@pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")
def test_weights_in_mxfp4_are_trained_on_dequantised(tmp_path: Path) -> None:
    """Two values of 4 bits to a byte, in blocks of 32 that share an exponent."""
    mixture = tiny.mixture_workload("gpt_oss", vocab_size=256)
    case = Case(
        tmp_path,
        "GptOssForCausalLM",
        {**mixture.model.config, "quantization_config": {"quant_method": "mxfp4"}},
    )
    given, expected = {}, {}
    for name, values in mixture.model().state_dict().items():
        expected[name] = given[name] = values.contiguous()
        if values.dim() == 3:
            experts, inputs, outputs = given.pop(name).shape
            given[f"{name}_blocks"] = blocks = torch.randint(
                0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
            )
            given[f"{name}_scales"] = torch.full(
                (experts, outputs, inputs // 32), 127 - 6, dtype=torch.uint8
            )
            halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
            table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            expected[name] = (torch.cat((table, -table))[halves.long()] * 2.0**-6).mT
    save_file(given, case.model / "model.safetensors", metadata={"format": "pt"})
    case.content["config"] = {"micro_batch_size": 4}
    trained = case.train(DATA / "alice.txt", weights=case.model, steps=1, lr=1e-12)
    for name, values in trained.model.state_dict().items():
        torch.testing.assert_close(values.float(), expected[name], rtol=0.0, atol=1e-6)
