"""Files become batches of the effective size, for every task, and a file that cannot is told in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.training.data import IGNORED_LABEL
from autofit.training.text import FileLoader, file_loader, masked

DATA = Path(__file__).parents[2] / "examples" / "data"


def workload(task: str = "causal-lm", length: int | None = 8, size: int = 4) -> Workload:
    return Workload(
        model=torch.nn.Identity,
        batch=lambda n: None,
        task=task,
        sequence_length=length,
        effective_batch_size=size,
        name="any",
    )


class Letters:
    """A tokenizer of lower-case letters, a as 10, with what a tokenizer of transformers has."""

    eos_token_id: int | None = 2
    mask_token_id: int | None = 4
    pad_token_id: int | None = 3

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") + 10 for letter in text][: options.get("max_length")]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def samples(path: Path, *, tokenizer: Any = None, **given: Any) -> dict[str, torch.Tensor]:
    return file_loader(workload(**given), path, tokenizer=tokenizer).samples


# Batches


def loader_of(count: int, size: int) -> FileLoader:
    return FileLoader({"rows": torch.arange(count)}, size)


def passes(loader: FileLoader) -> list[torch.Tensor]:
    return [batch["rows"] for batch in loader]


@pytest.mark.parametrize(("count", "size", "batches"), [(8, 4, 2), (9, 4, 3), (3, 4, 1), (1, 4, 1), (3, 8, 1)])
def test_every_batch_is_whole_and_every_sample_is_in_one(count: int, size: int, batches: int) -> None:
    loader = loader_of(count, size)
    seen = passes(loader)
    assert len(loader) == len(seen) == batches
    assert [len(batch) for batch in seen] == [size] * batches
    assert set(torch.cat(seen).tolist()) == set(range(count))
    assert torch.equal(torch.cat(seen)[:count].sort().values, torch.arange(count))


def test_every_pass_has_an_order_of_its_own_which_the_seed_decides() -> None:
    loader = loader_of(100, 100)
    torch.manual_seed(3)
    (first,), (second,) = passes(loader), passes(loader)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    (again,) = passes(loader)
    assert torch.equal(first, again)


def test_masks_change_from_pass_to_pass() -> None:
    loader = FileLoader({"input_ids": torch.arange(10, 110).view(1, 100)}, 1, mask_id=4)
    (first,), (second,) = loader, loader
    assert not torch.equal(first["labels"], second["labels"])


def test_masking_is_as_bert_was_trained() -> None:
    ids = torch.arange(10, 110).repeat(400, 10)
    generator = torch.Generator().manual_seed(0)
    batch = masked(ids, 4, generator)
    chosen = batch["labels"] != IGNORED_LABEL
    shown = batch["input_ids"]
    assert torch.equal(batch["labels"][chosen], ids[chosen])
    assert torch.equal(shown[~chosen], ids[~chosen])
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.005)
    hidden, kept = (shown == 4)[chosen].float().mean(), (shown == ids)[chosen].float().mean()
    assert hidden == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.101, abs=0.01)  # one in a hundred of the replaced ones is the same by chance


# Causal and masked language models


def test_bytes_of_a_text_are_packed_into_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrs", encoding="utf-8")
    found = samples(tmp_path / "a.txt")
    assert bytes(found["input_ids"].flatten().tolist()) == b"abcdefghijklmnop"
    assert found["input_ids"].shape == (2, 8)
    assert torch.equal(found["labels"], found["input_ids"])


def test_a_text_too_short_for_one_sequence_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("äb", encoding="utf-8")
    assert bytes(samples(tmp_path / "a.txt")["input_ids"][0].tolist()) == "äbäbäb".encode()[:8]


def test_texts_of_json_lines_end_with_the_tokenizers_end(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "abc", "other": 1}, {"text": "de"}, {"text": "f"})
    assert samples(path, tokenizer=Letters())["input_ids"].tolist() == [[10, 11, 12, 2, 13, 14, 2, 15]]
    without = Letters()
    without.eos_token_id = None
    assert samples(path, tokenizer=without, length=3)["input_ids"].tolist() == [[10, 11, 12], [13, 14, 15]]


def test_blank_lines_and_line_separators_inside_text_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\u2028cd"}\n\n  \n{"text": "e"}', encoding="utf-8")
    assert bytes(samples(path, length=4)["input_ids"].flatten().tolist()) == "ab\u2028cde".encode()


def test_masked_language_models_hide_by_the_tokenizers_mask(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 100, encoding="utf-8")
    for tokenizer, mask in ((None, 1), (Letters(), 4)):
        loader = file_loader(workload("masked-lm"), tmp_path / "a.txt", tokenizer=tokenizer)
        ids = torch.cat([batch["input_ids"] for batch in loader])
        assert (ids == mask).any()


def test_a_tokenizer_without_a_mask_cannot_train_a_masked_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd")
    without = Letters()
    without.mask_token_id = None
    with pytest.raises(InputError, match="the tokenizer has no mask token"):
        samples(tmp_path / "a.txt", tokenizer=without, task="masked-lm")


# Classification


def test_labelled_texts_are_padded_and_their_labels_numbered(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "abc", "label": "good"},
        {"text": "abcdefghijklmn", "label": "bad"},
        {"text": "a", "label": "good"},
    )
    found = samples(path, tokenizer=Letters(), task="sequence-classification")
    assert found["labels"].tolist() == [1, 0, 1]
    assert found["input_ids"].tolist() == [
        [10, 11, 12, 3, 3, 3, 3, 3],
        [10, 11, 12, 13, 14, 15, 16, 17],
        [10, 3, 3, 3, 3, 3, 3, 3],
    ]
    assert found["attention_mask"].sum(dim=1).tolist() == [3, 8, 1]


def test_labelled_bytes(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "ab", "label": 0}, {"text": "", "label": 1})
    found = samples(path, task="sequence-classification")
    assert found["input_ids"].tolist() == [[97, 98], [32, 0]]
    assert found["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_images(tmp_path: Path) -> None:
    images = {"pixel_values": torch.rand(3, 1, 2, 2), "labels": torch.tensor([0, 1, 0])}
    torch.save({**images, "names": ["a"]}, tmp_path / "a.pt")
    found = samples(tmp_path / "a.pt", task="image-classification", length=None)
    assert found.keys() == images.keys()
    assert torch.equal(found["pixel_values"], images["pixel_values"])


@pytest.mark.parametrize(("name", "task"), [("alice.txt", "causal-lm"), ("reviews.jsonl", "sequence-classification")])
def test_the_shipped_examples_are_read(name: str, task: str) -> None:
    loader = file_loader(workload(task, 64), DATA / name, tokenizer=None)
    assert len(loader) >= 10
    batch = next(iter(loader))
    assert {len(tensor) for tensor in batch.values()} == {4}


# What cannot be read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ('{"text": "a"}\n{"text": }', r"line 2 is not JSON: Expecting value\."),
        ('{"text": "a"}\n{"label": 1}', "line 2 lacks text"),
        ('["text"]', "line 1 lacks text"),
        ('{"text": 5}', "line 1: text must be text, not int"),
        ('{"text": ""}', "holds no text"),
    ],
)
def test_a_file_of_no_texts(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(InputError, match=rf"a\.jsonl,? {words}"):
        samples(tmp_path / "a.jsonl")


def test_labels_are_needed_to_classify(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1 lacks text and label"):
        samples(lines(tmp_path / "a.jsonl", {"t": "a"}), task="sequence-classification")


@pytest.mark.parametrize("task", ["causal-lm", "sequence-classification", "image-classification"])
def test_a_file_that_is_not_there(tmp_path: Path, task: str) -> None:
    with pytest.raises(InputError, match=r"the data file .*a\.txt is not there\. Check the path\."):
        samples(tmp_path / "a.txt", task=task)


@pytest.mark.parametrize("task", ["causal-lm", "image-classification"])
def test_a_directory_is_no_file(tmp_path: Path, task: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        samples(tmp_path, task=task)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(InputError, match=r"cannot be read as text: .*Give UTF-8 text\."):
        samples(tmp_path / "a.txt")


@pytest.mark.parametrize("content", [b"", b"no tensors", b"hello world", b"PK\x03\x04abc"])
def test_a_file_of_no_tensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.pt cannot be read: .*Save it with torch\.save\."):
        samples(tmp_path / "a.pt", task="image-classification")


class Harmful:
    """Reading this with plain pickle would run code."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_a_file_of_tensors_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"pixel_values": Harmful()}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="cannot be read"):
        samples(tmp_path / "a.pt", task="image-classification")


@pytest.mark.parametrize("content", [torch.ones(2), {"pixel_values": torch.ones(2)}, {"pixel_values": 1, "labels": 2}])
def test_tensors_by_other_names(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match="must hold pixel_values and labels"):
        samples(tmp_path / "a.pt", task="image-classification")


def test_batches_train_the_model_they_are_for() -> None:
    """The shape of a real batch is that of the synthetic ones that were measured."""
    model = tiny.llama_workload(sequence_length=16)
    loader = file_loader(model, DATA / "alice.txt", tokenizer=None)
    real, synthetic = next(iter(loader)), model.batch(4)
    assert {name: tensor.shape for name, tensor in real.items()} == {
        name: synthetic[name].shape for name in ("input_ids", "labels")
    }
