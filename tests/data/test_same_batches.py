"""Data files of every kind give the same batches, in the same order, as when files were read as a whole.

`same_batches.json` holds what autofit read before it kept tokens on disk. Run as a script, this file writes it anew.
"""

import bz2
import gzip
import hashlib
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.options import DataOptions, LabelRule
from autofit.data.samples import FileLoader
from autofit.data.text import text_loader
from tests.data.letters import letters

EXPECTED = Path(__file__).with_name("same_batches.json")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
RANDOM = random.Random(0)


def word(most: int) -> str:
    return "".join(RANDOM.choices(LETTERS, k=RANDOM.randint(1, most)))


def chat(number: int) -> dict[str, Any]:
    turns = [
        {"role": ("user", "assistant")[turn % 2], "content": word(9)}
        for turn in range(2 + 2 * (number % 2))
    ]
    return {"messages": turns, **({"tools": [{"type": "function"}]} if number % 3 == 0 else {})}


def answer() -> dict[str, Any]:
    context = word(20)
    start = RANDOM.randrange(len(context))
    return {
        "question": word(4),
        "context": context,
        "answers": {"text": [context[start : start + 3]], "answer_start": [start]},
    }


TEXTS = [{"text": word(30), "id": number} for number in range(40)]
COMPLETIONS = [{"prompt": word(12), "completion": word(12)} for _ in range(40)]
CHATS = [chat(number) for number in range(30)]
INSTRUCTIONS = [{"instruction": word(9), "input": "", "output": word(9)} for _ in range(9)]
REVIEWS = [{"text": word(30), "label": word(1)[0] in "abcdefghijklm"} for _ in range(30)]
NAMED = [{"text": row["text"], "label": "yes" if row["label"] else "no"} for row in REVIEWS]
RATED = [{"text": word(30), "label": RANDOM.random()} for _ in range(30)]
PAIRS = [{"source": word(20), "target": word(20)} for _ in range(30)]
TWINS = [{"anchor": word(20), "positive": word(20)} for _ in range(30)]
TAGGED = [
    {"tokens": [word(2) for _ in range(6)], "tags": [RANDOM.choice("xyz") for _ in range(6)]}
    for _ in range(30)
]
ANSWERS = [answer() for _ in range(30)]
PLAIN = "\n".join(word(30) if number % 5 else "" for number in range(60))


def json_lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write_shards(folder: Path) -> Path:
    shards = folder / "shards"
    shards.mkdir()
    (shards / "a.jsonl").write_text(json_lines(TEXTS[:7]))
    (shards / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[7:]).encode()))
    return shards


def write_texts(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(PLAIN)
    (texts / "b.txt").write_text(PLAIN[::-1])
    return texts


def write_saved(folder: Path) -> Path:
    datasets.Dataset.from_list(COMPLETIONS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_parquet(folder: Path) -> Path:
    datasets.Dataset.from_list(PAIRS).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def csv_of(rows: list[dict[str, Any]]) -> str:
    lines = [",".join(map(str, row.values())) for row in rows]
    return "\n".join([",".join(rows[0]), *lines, ""])


BLANKS = json_lines(TEXTS).replace("\n", "\r\n\r\n", 9)
WITH_SYSTEM = [{**row, "system": "be"} for row in CHATS]
# name: (file, task, tokenizer's options or None for bytes, data options)
Case = tuple[Callable[[Path], Path], str, dict[str, Any] | None, dict[str, Any]]
CASES: dict[str, Case] = {
    "texts": (as_file("a.jsonl", json_lines(TEXTS)), "causal-lm", {}, {}),
    "texts of bytes": (as_file("a.jsonl", json_lines(TEXTS)), "causal-lm", None, {}),
    "padded texts": (
        as_file("a.jsonl", json_lines(TEXTS)),
        "causal-lm",
        {"framed": True},
        {"packing": False},
    ),
    "apart": (as_file("a.jsonl", json_lines(TEXTS)), "causal-lm", {}, {"apart": True}),
    "blank lines": (as_file("a.jsonl", BLANKS), "causal-lm", None, {}),
    "plain": (as_file("a.txt", PLAIN), "causal-lm", None, {}),
    "plain by letters": (as_file("a.txt", PLAIN), "causal-lm", {}, {}),
    "plain by line": (as_file("a.txt", PLAIN), "causal-lm", None, {"packing": False}),
    "little": (as_file("a.txt", "abc"), "causal-lm", None, {"apart": True}),
    "folder of texts": (write_texts, "causal-lm", None, {"apart": True}),
    "document": (as_file("a.json", json.dumps(TEXTS, indent=1)), "causal-lm", {}, {}),
    "shards": (write_shards, "causal-lm", {}, {}),
    "csv": (as_file("a.csv", csv_of(COMPLETIONS)), "causal-lm", {}, {}),
    "bzip2": (
        as_file("a.jsonl.bz2", bz2.compress(json_lines(TEXTS).encode())),
        "causal-lm",
        {},
        {},
    ),
    "completions": (as_file("a.jsonl", json_lines(COMPLETIONS)), "causal-lm", {}, {}),
    "all of completions": (
        as_file("a.jsonl", json_lines(COMPLETIONS)),
        "causal-lm",
        {},
        {"learn": "all"},
    ),
    "packed completions": (
        as_file("a.jsonl", json_lines(COMPLETIONS)),
        "causal-lm",
        {},
        {"packing": True},
    ),
    "completions apart": (
        as_file("a.jsonl", json_lines(COMPLETIONS)),
        "causal-lm",
        None,
        {"packing": True, "apart": True},
    ),
    "saved": (write_saved, "causal-lm", {}, {}),
    "chats": (as_file("a.jsonl", json_lines(CHATS)), "causal-lm", None, {}),
    "packed chats": (
        as_file("a.jsonl", json_lines(WITH_SYSTEM)),
        "causal-lm",
        None,
        {"packing": True},
    ),
    "instructions": (as_file("a.jsonl", json_lines(INSTRUCTIONS)), "causal-lm", {}, {}),
    "masked": (as_file("a.jsonl", json_lines(TEXTS)), "masked-lm", {"framed": True}, {}),
    "masked by line": (
        as_file("a.jsonl", json_lines(TEXTS)),
        "masked-lm",
        {"framed": True},
        {"packing": False},
    ),
    "reviews": (
        as_file("a.jsonl", json_lines(NAMED)),
        "sequence-classification",
        {"framed": True},
        {},
    ),
    "numbered": (
        as_file("a.csv", csv_of([{**row, "label": int(row["label"])} for row in REVIEWS])),
        "sequence-classification",
        None,
        {},
    ),
    "rated": (
        as_file("a.jsonl", json_lines(RATED)),
        "sequence-classification",
        None,
        {"labels": LabelRule(1)},
    ),
    "pairs": (write_parquet, "seq2seq", {"framed": True}, {}),
    "twins": (as_file("a.jsonl", json_lines(TWINS)), "embed", {"framed": True}, {}),
    "tagged": (
        as_file("a.jsonl", json_lines(TAGGED)),
        "token-classification",
        {"framed": True},
        {"labels": LabelRule(3)},
    ),
    "answers": (
        as_file("a.jsonl", json_lines(ANSWERS)),
        "question-answering",
        {"framed": True},
        {},
    ),
}


LENGTHS = {"chats": 96, "instructions": 256}  # where 16 tokens hold no answer


def loader(name: str, folder: Path) -> FileLoader:
    write, task, tokenizer, options = CASES[name]
    workload = Workload(
        model=torch.nn.Identity,
        batch=lambda n: None,
        task=task,
        sequence_length=LENGTHS.get(name, 16),
        effective_batch_size=4,
    )
    made = byte_tokenizer() if tokenizer is None else letters(**tokenizer)
    given = DataOptions(**{"labels": LabelRule(2), **options})
    return text_loader(workload, write(folder), made, given)


def digest(batch: dict[str, torch.Tensor] | None) -> str:
    found = hashlib.sha256()
    for key, tensor in (batch or {}).items():
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def about(found: FileLoader, folder: Path) -> dict[str, Any]:
    """Two passes, all in order, the longest, and what is said."""
    torch.manual_seed(0)
    return {
        "passes": [[digest(batch) for batch in found] for _ in range(2)],
        "in order": [digest(batch) for batch in found.in_order()],
        "longest": digest(found.longest()),
        "notes": [note.replace(str(folder), "") for note in found.notes],
        "lengths": str(found.lengths),
        "padding": found.lengths and round(found.lengths.padding, 12),
        "names": dict(found.label_names),
        "form": found.form,
        "largest id": found.samples.largest_id(),
    }


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_files_read_as_a_whole(name: str, tmp_path: Path) -> None:
    expected = json.loads(EXPECTED.read_text())[name]
    assert about(loader(name, tmp_path), tmp_path) == expected


if __name__ == "__main__":
    made = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            made[case] = about(loader(case, place), place)
    EXPECTED.write_text(f"{json.dumps(made, indent=1)}\n")
