"""Rows of every form become token ids and labels, by the tokenizer's own constraints, and only once."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from autofit.core.errors import InputError
from autofit.data import tokens
from autofit.data.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, TEXT, Rows
from autofit.data.tokens import Encoding, encode, marks_assistant_turns
from tests.data.letters import letters

NO = -100
END, MASK, PAD, CLS, SEP = 1, 2, 3, 4, 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "autofit"


def encoded(form: tuple[str, ...], *rows: tuple[str, ...], tokenizer: Any, **options: Any) -> list[tuple[Any, ...]]:
    """Ids, labels and cut of each row."""
    columns = {name: [row[place] for row in rows] for place, name in enumerate(form)}
    places = [f"a.jsonl, line {number}" for number in range(1, len(rows) + 1)]
    options = {"length": None, **options}
    data = encode(Rows(form, columns, places), Encoding(tokenizer, **options), progress=False)
    return [(row["input_ids"], row["labels"], row["cut"]) for row in data]


def test_packed_texts_end_with_the_end_of_text() -> None:
    assert encoded(TEXT, ("ab",), ("",), tokenizer=letters()) == [([6, 7, END], [], False), ([END], [], False)]
    assert encoded(TEXT, ("ab",), tokenizer=letters(framed=True)) == [([6, 7, END], [], False)]
    assert encoded(TEXT, ("ä",), tokenizer=byte_tokenizer()) == [([0xC3, 0xA4], [], False)]


def test_padded_texts_begin_as_the_tokenizer_begins_and_are_cut() -> None:
    rows = encoded(TEXT, ("ab",), ("abcd",), tokenizer=letters(framed=True), length=4)
    assert rows == [([CLS, 6, 7, END], [], False), ([CLS, 6, 7, 8], [], True)]


def test_only_completions_are_learnt() -> None:
    rows = encoded(COMPLETION, ("ab", "c"), ("abc", "d"), ("", "a"), tokenizer=letters(), length=4)
    assert rows == [
        ([6, 7, 8, END], [NO, NO, 8, END], False),
        ([6, 7, 8, 9], [NO, NO, NO, 9], True),
        ([6, END], [6, END], False),
    ]


def test_texts_to_classify_keep_their_frame_when_they_are_cut() -> None:
    rows = encoded(LABELLED, ("abcd", "x"), ("a", "y"), tokenizer=letters(framed=True), length=4)
    assert rows == [([CLS, 6, 7, SEP], [], True), ([CLS, 6, SEP], [], False)]


def test_an_empty_text_to_classify_is_a_space() -> None:
    assert encoded(LABELLED, ("", "x"), tokenizer=byte_tokenizer(), length=4) == [([32], [], False)]


def test_the_frame_of_a_masked_text_is_not_guessed() -> None:
    rows = encoded(TEXT, ("ab",), tokenizer=letters(framed=True), length=4, masked=True)
    assert rows == [([CLS, 6, 7, SEP], [NO, 6, 7, NO], False)]


# Chats


def chat(*contents: str) -> tuple[str]:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return (json.dumps(turns),)


def byte_chat() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_only_what_the_assistant_says_is_learnt() -> None:
    ((ids, labels, cut),) = encoded(MESSAGES, chat("Hä?", "日", "So", "ok"), tokenizer=byte_chat(), length=100)
    assert bytes(ids).decode() == "user:\nHä?\x03\nassistant:\n日\x03\nuser:\nSo\x03\nassistant:\nok\x03\n"
    assert bytes(label for label in labels if label != NO).decode() == "日\x03ok\x03"
    assert [label for label, own in zip(labels, ids, strict=True) if label not in (NO, own)] == []
    assert not cut


def test_a_template_without_marks_learns_all() -> None:
    tokenizer = letters(chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert not marks_assistant_turns(tokenizer)
    assert marks_assistant_turns(byte_chat())
    assert encoded(MESSAGES, chat("ab", "c"), tokenizer=tokenizer, length=2) == [([6, 7], [6, 7], True)]


def test_messages_that_the_template_refuses() -> None:
    tokenizer = letters(chat_template="{{ raise_exception('roles must\n alternate.') }}")
    with pytest.raises(InputError, match=r"line 2: .*does not take these messages: roles must alternate\. Correct"):
        encoded(MESSAGES, chat("a"), chat("b"), tokenizer=_refusing_b(tokenizer))


def _refusing_b(tokenizer: Any) -> Any:
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'b' %}" + tokenizer.chat_template + "{% endif %}{{ messages[0]['content'] }}"
    )
    return tokenizer


# The cache


def test_what_was_tokenised_is_not_tokenised_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = encoded(TEXT, ("ab",), tokenizer=letters(), length=4)
    (file,) = cache.glob("*.arrow")
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_cut", None)  # would fail if it were called
        assert encoded(TEXT, ("ab",), tokenizer=letters(), length=4) == first
    assert list(cache.glob("*.arrow")) == [file]


@pytest.mark.parametrize("where", [10, 200, -10])
def test_what_was_damaged_is_tokenised_again(cache: Path, where: int) -> None:
    first = encoded(TEXT, ("ab",), tokenizer=letters(), length=4)
    (file,) = cache.glob("*.arrow")
    data = bytearray(whole := file.read_bytes())
    data[where] ^= 4
    file.write_bytes(data)
    assert encoded(TEXT, ("ab",), tokenizer=letters(), length=4) == first
    assert file.read_bytes() == whole


def test_anything_else_is_tokenised_anew(cache: Path) -> None:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("ab", {"tokenizer": letters(), "length": 4}),
        ("ac", {"tokenizer": letters(), "length": 4}),
        ("ab", {"tokenizer": letters(), "length": 2}),
        ("ab", {"tokenizer": letters(framed=True), "length": 4}),
        ("ab", {"tokenizer": letters(eos_token="[PAD]"), "length": 4}),
        ("ab", {"tokenizer": letters(), "length": 4, "masked": True}),
    ]
    for text, options in variants:
        encoded(TEXT, (text,), **options)
    assert len(list(cache.glob("*.arrow"))) == len(variants)


def test_a_tokenizer_that_was_used_is_still_the_same(cache: Path) -> None:
    tokenizer = letters(framed=True)
    for _ in range(2):
        encoded(LABELLED, ("abcdef", "x"), tokenizer=tokenizer, length=4)
    assert len(list(cache.glob("*.arrow"))) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot be written: .*set HF_DATASETS_CACHE"):
        encoded(TEXT, ("ab",), tokenizer=letters())


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bar_is_shown_when_asked(shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    encode(Rows(TEXT, {"text": ["ab"]}, ["a"]), Encoding(letters(), None), progress=shown)
    assert ("Tokenising: 100%" in capsys.readouterr().err) is shown
    assert not datasets.are_progress_bars_disabled()


def test_progress_bars_that_the_user_hid_stay_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    datasets.disable_progress_bars()
    try:
        encode(Rows(TEXT, {"text": ["ab"]}, ["a"]), Encoding(letters(), None), progress=True)
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()
    assert capsys.readouterr().err == ""
