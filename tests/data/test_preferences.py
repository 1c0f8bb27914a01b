"""Preferences in the shapes that data sets have: what is the prompt, what is learnt, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.options import DataOptions
from autofit.data.preferences import read_marked, read_pair
from autofit.data.samples import FileLoader
from autofit.data.text import text_loader
from tests.tiny import preference_workload

ASKED = {"role": "user", "content": "Hi"}
POLITE = {"role": "assistant", "content": "Hello!"}
RUDE = {"role": "assistant", "content": "Go away."}
PAIRS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
    "no prompt": {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
    "question": {"question": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [ASKED], "chosen": [POLITE], "rejected": [RUDE]},
    "no prompt": {"chosen": [ASKED, POLITE], "rejected": [ASKED, RUDE]},
    "a text beside whole chats": {
        "prompt": "Hi",
        "chosen": [ASKED, POLITE],
        "rejected": [ASKED, RUDE],
    },
    "a text as prompt": {"prompt": "Hi", "chosen": [POLITE], "rejected": [RUDE]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello!"},
        "rejected": {"from": "gpt", "value": "Go away."},
    },
    "answers as text": {"messages": [ASKED], "chosen": "Hello!", "rejected": "Go away."},
}


@pytest.mark.parametrize("shape", PAIRS)
def test_texts(shape: str) -> None:
    assert read_pair(PAIRS[shape], "row 1") == ("2 + 2 =", " 4", " 5")


@pytest.mark.parametrize("shape", CHATS)
def test_chats(shape: str) -> None:
    assert read_pair(CHATS[shape], "row 1") == ([ASKED], [POLITE], [RUDE])


def test_a_system_comes_first_and_an_input_follows_its_instruction() -> None:
    prompt, _, _ = read_pair({**CHATS["messages"], "system": "Be kind."}, "row 1")
    assert prompt == [{"role": "system", "content": "Be kind."}, ASKED]
    row = {"instruction": "Add.", "input": "1, 2", "chosen": "3", "rejected": "4"}
    assert read_pair(row, "row 1")[0] == "Add.\n1, 2"


@given(st.text(), st.text(), st.text())
def test_prompt_and_answers_make_up_what_was_written(begin: str, better: str, worse: str) -> None:
    row = {"chosen": begin + better, "rejected": begin + worse}
    prompt, chosen, rejected = read_pair(row, "row 1")
    assert (prompt + chosen, prompt + rejected) == (row["chosen"], row["rejected"])


MARKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    "a number": {"question": "2 + 2 =", "answer": " 4", "label": 1},
    "a word": {"prompt": "2 + 2 =", "response": " 4", "kto_tag": "true"},
}


@pytest.mark.parametrize("shape", MARKED)
def test_answers_that_are_good(shape: str) -> None:
    assert read_marked(MARKED[shape], "row 1") == ("2 + 2 =", " 4", 1)


def test_the_last_of_messages_is_judged() -> None:
    row = {"messages": [ASKED, RUDE], "label": False}
    assert read_marked(row, "row 1") == ([ASKED], [RUDE], 0)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, "line 1 lacks rejected"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": [RUDE]}, "one is text and the other"),
        ("dpo", {"prompt": "a", "chosen": 1, "rejected": "b"}, "chosen must be text or messages"),
        ("dpo", {"chosen": [POLITE], "rejected": [RUDE]}, "share no prompt"),
        ("kto", {"prompt": "a", "completion": "b"}, "lacks label"),
        ("kto", {"prompt": "a", "completion": "b", "label": "maybe"}, "true or false, not 'maybe'"),
        ("kto", {"completion": "b", "label": True}, "lacks a prompt or its completion"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, task: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        loader(tmp_path, task, row)


def test_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no rows\n")
    with pytest.raises(InputError, match="is not JSON"):
        text_loader(
            preference_workload("dpo", 2, 32), tmp_path / "a.txt", byte_tokenizer(), DataOptions()
        )


def loader(folder: Path, task: str, *rows: Any, length: int = 32) -> FileLoader:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return text_loader(preference_workload(task, 2, length), path, byte_tokenizer(), DataOptions())


def texts(batch: dict[str, torch.Tensor], *, learnt: bool = False) -> list[list[str]]:
    """What the texts of each sample are, or what is learnt of them, without the end of text."""
    found = []
    for sample in range(len(batch["input_ids"])):
        row = []
        for text in range(2):
            ids = batch["input_ids"][sample, text]
            chosen = batch["attention_mask"][sample, text] == 1
            if learnt:
                chosen &= batch["labels"][sample, text] != -100
            row.append(bytes(i for i in ids[chosen].tolist() if 31 < i < 256).decode())
        found.append(row)
    return found


def test_a_sample_has_both_answers_side_by_side(tmp_path: Path) -> None:
    other = {"prompt": "abc", "chosen": "de", "rejected": "fghi"}
    made = loader(tmp_path, "dpo", PAIRS["text"], other)
    batch = made.samples.batch(torch.arange(2))
    assert texts(batch) == [["2 + 2 = 4", "2 + 2 = 5"], ["abcde", "abcfghi"]]
    assert texts(batch, learnt=True) == [[" 4", " 5"], ["de", "fghi"]]
    assert made.longest()["input_ids"].shape[:2] == (1, 2)  # type: ignore[index]


def test_each_answer_stands_beside_that_of_the_next_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt, "completion": answer, "label": good}
        for prompt, answer, good in (("ab", "c", True), ("de", "f", False), ("gh", "i", True))
    ]
    batch = loader(tmp_path, "kto", *rows).samples.batch(torch.arange(3))
    assert texts(batch) == [["abc", "abf"], ["def", "dei"], ["ghi", "ghc"]]
    assert batch["desirable"].tolist() == [1, 0, 1]


def test_rows_without_room_for_both_answers_are_left_out(tmp_path: Path) -> None:
    long = {"prompt": "a" * 12, "chosen": "b", "rejected": "c"}
    made = loader(tmp_path, "dpo", PAIRS["text"], long, length=11)
    assert len(made.samples) == 1
    assert made.notes[-1] == "left out, without room for both answers: 1 of 2 samples."
    with pytest.raises(InputError, match="no sample"):
        loader(tmp_path, "dpo", long, length=11)
