"""How the scripts read data: packing, tokenizers, masking, padding, shuffling."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.data.labels import labels_from
from autofit.data.options import LabelRule
from autofit.data.rows import read_rows
from autofit.data.tokens import Encoding, encode
from tests.data.templates import CHATML, MISTRAL, of_trl, tokenizer_for
from tests.export.emitted import module_of

Emit = Callable[..., str]

# transformers and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def causal(emit: Callable[..., str]) -> ModuleType:
    return module_of(emit())


@pytest.fixture(scope="module")
def classifier(emit: Callable[..., str]) -> ModuleType:
    return module_of(emit("sequence-classification"))


class Words:
    """As much of a tokenizer as the scripts use."""

    eos_token_id, mask_token_id, pad_token_id = 9, 8, 7

    def __call__(self, text: str | list[str], **options: Any) -> dict[str, list[Any]]:
        if isinstance(text, list):
            return {"input_ids": [self(each, **options)["input_ids"] for each in text]}
        return {"input_ids": self.encode(text)[: options.get("max_length")]}

    def encode(self, text: str, **options: Any) -> list[int]:
        return [len(word) for word in text.split()]


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


ROWS = {
    "texts": [{"text": "<s>hello</s>"}, {"text": "hello"}, {"text": ""}],
    "completions": [
        {"prompt": "what", "completion": " hello"},
        {"prompt": "", "completion": "hi</s>"},
    ],
    "chats": [
        {
            "messages": [
                {"role": "user", "content": "what "},
                {"role": "assistant", "content": "h\u00e4"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d "},
            ],
        },
    ],
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("template", [CHATML, MISTRAL, of_trl("llama3"), of_trl("gemma_training")])
def test_rows_are_read_as_autofit_train_reads_them(
    emit: Emit, tmp_path: Path, form: str, template: str
) -> None:
    workload = {
        "task": "causal-lm",
        "sequence_length": 64,
        "effective_batch_size": 8,
        "packing": False,
    }
    script = module_of(emit(others={"workload": workload}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[form])))
    tokenizer = tokenizer_for(template)
    rows = encode(read_rows(path, CAUSAL_LM.rows), Encoding(tokenizer, 64))
    expected = [
        [list(ids), list(labels if len(labels) else ids)]
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
    ]
    found = [[each.tolist() for each in sample] for sample in script.read_samples(path, tokenizer)]
    assert found == expected


@pytest.mark.parametrize("packing", [None, True, False])
@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_a_table_is_not_learnt_as_text(
    emit: Emit, tmp_path: Path, packing: bool | None, suffix: str
) -> None:
    workload = {
        "task": "causal-lm",
        "sequence_length": 64,
        "effective_batch_size": 8,
        "packing": packing,
    }
    (tmp_path / f"rows{suffix}").write_text('[{"text": "a"}]')
    with pytest.raises(ValueError, match="is not read here"):
        module_of(emit(others={"workload": workload})).load_data(tmp_path / f"rows{suffix}", None)


def test_a_script_reads_the_file_that_its_search_knew(
    emit: Emit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    workload = {
        "task": "causal-lm",
        "sequence_length": 64,
        "effective_batch_size": 8,
        "packing": False,
    }
    script = emit(others={"workload": {**workload, "data": str(path), "form": "prompt+completion"}})
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "1"])
    module_of(script, "__main__")
    path.unlink()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="FileNotFoundError"):
        module_of(script, "__main__")


def test_a_chat_that_is_not_written_turn_by_turn_is_for_autofit_train(emit: Emit) -> None:
    workload = {
        "task": "causal-lm",
        "sequence_length": 64,
        "effective_batch_size": 8,
        "packing": True,
    }
    script = module_of(emit(others={"workload": workload}))
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ValueError, match="does not write one turn after the other"):
        # takes back the reasoning of old turns
        script.read_chat(turns, None, tokenizer_for(of_trl("qwen3")))


def test_documents_of_jsonl_end_in_the_tokenizers_end_token(
    causal: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "text.jsonl"
    separator = "\u2028"  # ends a line for str.splitlines, not for JSON
    rows = [
        json.dumps({"text": text}, ensure_ascii=False) for text in (f"a bb{separator}ccc", "dd")
    ]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    ids = causal.load_data(path, Words())["input_ids"]
    assert ids[0, :6].tolist() == [1, 2, 3, 9, 2, 9]


def stopped(script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> str:
    """What the script says as it stops before the first step."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        module_of(script, "__main__")
    return str(stop.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", "", "no text in it"),
        ("empty.jsonl", "", "no text in it"),
        ("chat.jsonl", '{"messages": []}', "'text'"),
        ("prompts.jsonl", '{"prompt": "a", "completion": "b"}', "'text'"),
        ("broken.jsonl", "{", "JSONDecodeError"),
        ("missing.txt", None, "FileNotFoundError"),
        ("folder", "/", "IsADirectoryError"),
    ],
)
def test_what_the_script_cannot_read_is_for_autofit_train(
    emit: Emit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str | None,
    reason: str,
) -> None:
    path = tmp_path / name
    if content == "/":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    said = stopped(emit(), monkeypatch, "--data", path)
    assert "no text, or .jsonl with texts: " in said
    assert reason in said
    assert said.endswith("; see `autofit train`")


@pytest.mark.parametrize("content", ["", '{"text": "a"}', "[]"])
def test_rows_without_labels_are_for_autofit_train(
    emit: Emit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    said = stopped(emit("sequence-classification"), monkeypatch, "--data", path)
    assert "no .jsonl with text and label: " in said


def test_a_tokenizer_of_another_model_is_noticed(
    emit: Emit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    said = stopped(
        emit().replace("vocab_size=256", "vocab_size=110"),
        monkeypatch,
        "--data",
        tmp_path / "text.txt",
    )
    assert said == "the data has tokens that the model does not know: check --tokenizer"


def test_a_byte_order_mark_is_no_text(causal: ModuleType, tmp_path: Path) -> None:
    for name, content in (("text.txt", "hello"), ("text.jsonl", '{"text": "hello"}')):
        (tmp_path / name).write_text(f"\ufeff{content}", encoding="utf-8")
        assert (
            bytes(causal.load_data(tmp_path / name, None)["input_ids"][0, :5].tolist()) == b"hello"
        )


def test_labels_are_numbered_as_autofit_train_numbers_them(
    classifier: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    for labels in ([10, 2, 0], ["b", "a", "b"], [True, False]):
        path.write_text("\n".join(json.dumps({"text": "a", "label": label}) for label in labels))
        places = [str(path)] * len(labels)
        assert (
            classifier.load_data(path, None)["labels"].tolist()
            == labels_from(labels, places, LabelRule()).numbers.tolist()
        )


def test_more_classes_than_measured_are_noticed(
    emit: Emit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"text": "a", "label": name}) for name in ("x", "y", "z")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    said = stopped(emit("sequence-classification"), monkeypatch, "--data", tmp_path / "rows.jsonl")
    assert said == "the data has more classes than the model: change NUM_LABELS"
    three = module_of(
        emit("sequence-classification").replace("\nNUM_LABELS = 2 ", "\nNUM_LABELS = 3 ")
    )
    assert three.build_model(None).config.num_labels == 3


def test_weights_without_a_tokenizer_mean_bytes(
    emit: Emit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    stopped(emit(), monkeypatch, "--data", tmp_path / "missing.txt", "--weights", tmp_path)
    assert "tokenizer: none, bytes are token ids" in capsys.readouterr().out


def test_every_batch_is_full_and_every_pass_sees_every_sample_anew(causal: ModuleType) -> None:
    endless = causal.batches({"labels": torch.arange(12)}, 0)
    passes = [torch.cat([next(endless)["labels"] for _ in range(2)]) for _ in range(2)]
    for seen in passes:
        assert len(seen) == 16
        assert sorted(seen[:12].tolist()) == list(range(12))
        assert torch.equal(seen[12:], seen[:4])
    assert not torch.equal(*passes)
    assert next(causal.batches({"labels": torch.arange(3)}, 0))["labels"].bincount().tolist() in (
        [3, 3, 2],
        [3, 2, 3],
        [2, 3, 3],
    )


def test_masking_hides_fifteen_percent(emit: Callable[..., str]) -> None:
    script = module_of(emit("masked-lm"))
    ids = torch.randint(10, 256, (64, 64))
    batch = script.masked(ids, 1, torch.Generator().manual_seed(0))
    predicted = batch["labels"] != -100
    assert predicted.float().mean().item() == pytest.approx(0.15, abs=0.03)
    assert torch.equal(batch["labels"][predicted], ids[predicted])
    assert torch.equal(batch["input_ids"][~predicted], ids[~predicted])
    assert (batch["input_ids"][predicted] == 1).float().mean().item() == pytest.approx(0.8, abs=0.1)


def test_labels_that_are_names_are_numbered_in_order(
    classifier: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "one two three", "label": "good"}, {"text": "x", "label": "bad"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = classifier.load_data(path, Words())
    assert data["labels"].tolist() == [1, 0]
    assert data["input_ids"].tolist() == [[3, 3, 5], [1, 7, 7]]
    assert data["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_images_are_read_without_running_code(emit: Callable[..., str], tmp_path: Path) -> None:
    script = module_of(emit("image-classification"))
    path = tmp_path / "images.pt"
    torch.save(
        {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 3])}, path
    )
    data = script.load_data(path)
    assert data["pixel_values"].shape == (4, 3, 32, 32)
    assert data["labels"].dtype == torch.long
