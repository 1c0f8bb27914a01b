"""How the scripts read data: packing, tokenizers, masking, padding, shuffling."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

# transformers and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def module_of(script: str) -> ModuleType:
    module = ModuleType("emitted")
    exec(compile(script, "emitted", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def causal(emit: Callable[..., str]) -> ModuleType:
    return module_of(emit())


@pytest.fixture(scope="module")
def classifier(emit: Callable[..., str]) -> ModuleType:
    return module_of(emit("sequence-classification"))


class Words:
    """As much of a tokenizer as the scripts use."""

    eos_token_id, mask_token_id, pad_token_id = 9, 8, 7

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()][: options.get("max_length")]}


def test_text_is_packed_without_a_gap(causal: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab" * 100)
    ids = causal.load_data(path, None)["input_ids"]
    assert ids.shape == (3, 64)
    assert bytes(ids.flatten().tolist()) == b"ab" * 96


def test_a_text_shorter_than_a_sequence_is_repeated(causal: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("hello")
    ids = causal.load_data(path, None)["input_ids"]
    assert bytes(ids[0].tolist()) == (b"hello" * 13)[:64]


def test_documents_of_jsonl_end_in_the_tokenizers_end_token(causal: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    separator = "\u2028"  # ends a line for str.splitlines, not for JSON
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (f"a bb{separator}ccc", "dd")]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    ids = causal.load_data(path, Words())["input_ids"]
    assert ids[0, :6].tolist() == [1, 2, 3, 9, 2, 9]


def test_an_empty_file_is_said_to_be_empty(causal: ModuleType, classifier: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("")
    for script in (causal, classifier):
        with pytest.raises(SystemExit, match="holds no"):
            script.load_data(path, None)


def test_a_tokenizer_of_another_model_is_noticed(causal: ModuleType) -> None:
    model = causal.build_model(None)
    causal.check_tokens(model, 255)
    with pytest.raises(SystemExit, match="token 256 is beyond the model's 256: check --tokenizer"):
        causal.check_tokens(model, 256)


def test_weights_without_a_tokenizer_mean_bytes(causal: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert causal.load_tokenizer(None, str(tmp_path)) is None
    assert "bytes of the text" in capsys.readouterr().out


def test_every_batch_is_full_and_every_epoch_sees_every_sample(causal: ModuleType) -> None:
    order = causal.shuffled(12, seed=0)
    batches = [next(order) for _ in range(3)]
    assert all(len(batch) == 8 for batch in batches)
    seen = torch.cat(batches)
    assert sorted(seen[:12].tolist()) == sorted(seen[12:].tolist()) == list(range(12))
    assert next(causal.shuffled(3, seed=0)).bincount().tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_masking_hides_fifteen_percent(emit: Callable[..., str]) -> None:
    script = module_of(emit("masked-lm"))
    ids = torch.randint(10, 256, (64, 64))
    batch = script.masked(ids, script.mask_token(None))
    predicted = batch["labels"] != -100
    assert predicted.float().mean().item() == pytest.approx(0.15, abs=0.03)
    assert torch.equal(batch["labels"][predicted], ids[predicted])
    assert torch.equal(batch["input_ids"][~predicted], ids[~predicted])
    assert (batch["input_ids"][predicted] == 1).float().mean().item() == pytest.approx(0.8, abs=0.1)
    assert script.mask_token(Words()) == 8


def test_labels_that_are_names_are_numbered_in_order(classifier: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "one two three", "label": "good"}, {"text": "x", "label": "bad"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = classifier.load_data(path, Words())
    assert data["labels"].tolist() == [1, 0]
    batch = classifier.padded(data, torch.tensor([0, 1]), 7)
    assert batch["input_ids"].tolist() == [[3, 3, 5], [1, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    numbered = [{"text": "a", "label": 5}, {"text": "b", "label": 2}]
    path.write_text("\n".join(map(json.dumps, numbered)))
    assert classifier.load_data(path, None)["labels"].tolist() == [5, 2]


def test_more_classes_than_measured_get_a_larger_head(classifier: ModuleType) -> None:
    assert classifier.build_model(None, 7).config.num_labels == 7
    assert classifier.build_model(None, 1).config.num_labels == 2


def test_images_are_read_without_running_code(emit: Callable[..., str], tmp_path: Path) -> None:
    script = module_of(emit("image-classification"))
    path = tmp_path / "images.pt"
    torch.save({"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 3])}, path)
    data = script.load_data(path)
    assert data["pixel_values"].shape == (4, 3, 32, 32)
    assert data["labels"].dtype == torch.long
