"""Rows of every form become token ids and labels, by the tokenizer's own constraints, and only once."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autofit.core.errors import InputError
from autofit.data.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from autofit.data.rows import COMPLETION, LABELLED, MESSAGES, TEXT, Rows
from autofit.data.tokens import Encoding, encode
from tests.data.letters import letters
from tests.data.templates import CHATML, of_trl, tokenizer_for

NO = -100
END, MASK, PAD, CLS, SEP = 1, 2, 3, 4, 5


def encoded(
    form: tuple[str, ...], *rows: tuple[str, ...], tokenizer: Any, **options: Any
) -> list[tuple[Any, ...]]:
    """Ids, labels and cut of each row."""
    columns = {name: [row[place] for row in rows] for place, name in enumerate(form)}
    places = [f"a.jsonl, line {number}" for number in range(1, len(rows) + 1)]
    options = {"length": None, **options}
    data = encode(Rows(form, columns, places), Encoding(tokenizer, **options))
    names = ("input_ids", "labels", "cut")
    rows_of = zip(*(data[name] for name in names), strict=True)
    return [(list(map(int, ids)), list(map(int, labels)), cut) for ids, labels, cut in rows_of]


def test_packed_texts_end_with_the_end_of_text() -> None:
    assert encoded(TEXT, ("ab",), ("",), tokenizer=letters()) == [
        ([6, 7, END], [], False),
        ([END], [], False),
    ]
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


def test_all_tokens_are_learnt_when_asked() -> None:
    rows = encoded(COMPLETION, ("ab", "c"), tokenizer=letters(), length=4, learn="all")
    assert rows == [([6, 7, 8, END], [6, 7, 8, END], False)]


def test_a_text_keeps_the_start_and_the_end_that_it_has() -> None:
    tokenizer = letters(framed=True)
    rows = encoded(TEXT, ("[CLS]ab[END]",), ("[END]a",), tokenizer=tokenizer, length=9)
    assert [ids for ids, _, _ in rows] == [[CLS, 6, 7, END], [CLS, END, 6, END]]
    assert encoded(TEXT, ("ab[END]",), ("[CLS]a",), tokenizer=tokenizer) == [
        ([6, 7, END], [], False),
        ([CLS, 6, END], [], False),
    ]
    pairs = encoded(COMPLETION, ("[CLS]a", "b[END]"), ("", "[CLS]b"), tokenizer=tokenizer, length=9)
    assert [ids for ids, _, _ in pairs] == [[CLS, 6, 7, END], [CLS, 7, END]]
    framed = encoded(LABELLED, ("[CLS]ab[SEP]", "x"), ("[SEP]", "y"), tokenizer=tokenizer, length=9)
    assert [ids for ids, _, _ in framed] == [[CLS, 6, 7, SEP], [CLS, SEP]]


def test_a_completion_is_tokenised_as_it_follows_its_prompt() -> None:
    # a space, and one before each text, as in Llama 2
    vocabulary = {"\u2581": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    rows = encoded(COMPLETION, ("a", "a"), ("a", " ab"), ("a", "b"), tokenizer=tokenizer)
    assert [[label for label in labels if label != NO] for _, labels, _ in rows] == [
        [1, 4],
        [0, 3, 4],
        [0, 2, 4],
    ]
    assert [ids for ids, _, _ in rows] == [[0, 1, 1, 4], [0, 1, 0, 3, 4], [0, 1, 0, 2, 4]]


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
    turns = [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    return (json.dumps(turns),)


def byte_chat() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_only_what_the_assistant_says_is_learnt() -> None:
    ((ids, labels, cut),) = encoded(
        MESSAGES, chat("Hä?", "日", "So", "ok"), tokenizer=byte_chat(), length=100
    )
    assert (
        bytes(ids).decode()
        == "user:\nHä?\x03\nassistant:\n日\x03\nuser:\nSo\x03\nassistant:\nok\x03\n"
    )
    assert bytes(label for label in labels if label != NO).decode() == "日\x03ok\x03"
    assert [label for label, own in zip(labels, ids, strict=True) if label not in (NO, own)] == []
    assert not cut


@pytest.mark.parametrize("name", ["llama3", "gemma", "qwen3_instruct_2507", "lfm2"])
def test_labels_without_marks_are_those_by_marks(name: str) -> None:
    contents = (
        "  H\u00e4? \n",
        "\n \u65e5\U0001f600  \n\n",
        "So",
        "",
        "<end_of_turn>",
        "<|im_end|>\nok<|eot_id|>",
    )
    own, by_marks = of_trl(name), of_trl(f"{name}_training")
    found = encoded(MESSAGES, chat(*contents), tokenizer=tokenizer_for(own))
    assert found == encoded(MESSAGES, chat(*contents), tokenizer=tokenizer_for(by_marks))
    ((ids, labels, _),) = found
    assert 0 < sum(label == own for label, own in zip(labels, ids, strict=True)) < len(ids)


class SlowTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that does not say which characters a token is of."""

    @property
    def is_fast(self) -> bool:
        return False


def test_a_slow_tokenizer_learns_the_same() -> None:
    fast = tokenizer_for(CHATML)
    slow = SlowTokenizer(
        tokenizer_object=fast.backend_tokenizer, eos_token="</s>", chat_template=CHATML
    )
    rows = chat("what", "hello", "So", "ok")
    assert encoded(MESSAGES, rows, tokenizer=slow) == encoded(MESSAGES, rows, tokenizer=fast)


def test_a_slow_tokenizer_whose_tokens_go_over_the_end_of_a_turn_is_refused() -> None:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(InputError, match="does not say which characters a token is of"):
        encoded(
            MESSAGES,
            chat("a", "b"),
            tokenizer=SlowTokenizer(tokenizer_object=made, chat_template=template),
        )


def test_a_token_with_a_part_of_a_turn_is_learnt() -> None:
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)
    assert encoded(MESSAGES, chat("aa", "b"), tokenizer=tokenizer) == [([0, 2], [NO, 2], False)]


def test_all_tokens_of_chats_are_learnt_when_asked() -> None:
    tokenizer = letters(
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    assert encoded(MESSAGES, chat("ab", "c"), tokenizer=tokenizer) == [
        ([6, 7, 8], [NO, NO, 8], False)
    ]
    rows = encoded(MESSAGES, chat("ab", "c"), tokenizer=tokenizer, length=2, learn="all")
    assert rows == [([6, 7], [6, 7], True)]


def test_a_turn_that_is_not_to_be_learnt() -> None:
    turns = json.loads(chat("a", "b", "c", "d")[0])
    turns[1]["weight"] = 0
    tokenizer = letters(
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    assert encoded(MESSAGES, (json.dumps(turns),), tokenizer=tokenizer) == [
        ([6, 7, 8, 9], [NO, NO, NO, 9], False),
    ]


def test_tools_of_a_row_reach_the_template() -> None:
    template = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    tools = json.dumps([{"type": "function", "function": {"name": "xyz"}}])
    columns = {"messages": [*chat("a", "b"), *chat("a", "b")], "tools": [tools, ""]}
    rows = Rows(MESSAGES, columns, ["a.jsonl, line 1", "a.jsonl, line 2"])
    data = encode(rows, Encoding(letters(chat_template=template), None))
    assert [list(ids) for ids in data["input_ids"]] == [[29, 30, 31, 6, 7], [6, 7]]
    assert [list(labels) for labels in data["labels"]] == [[NO, NO, NO, NO, 7], [NO, 7]]


def test_a_row_whose_turns_cannot_be_found() -> None:
    counting = "{% for message in messages %}{{ message['content'] | length }}{{ message['content'] }}{% endfor %}"
    with pytest.raises(
        InputError, match=r"line 1: the assistant's turns cannot be told .*--learn all"
    ):
        encoded(MESSAGES, chat("a", "b"), tokenizer=letters(chat_template=counting))


def test_messages_that_the_template_refuses() -> None:
    tokenizer = letters(chat_template="{{ raise_exception('roles must\n alternate.') }}")
    with pytest.raises(
        InputError, match=r"line 2: .*does not take these messages: roles must alternate\. Correct"
    ):
        encoded(MESSAGES, chat("a"), chat("b"), tokenizer=_refusing_b(tokenizer))


def _refusing_b(tokenizer: Any) -> Any:
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'b' %}" + tokenizer.chat_template + "{% endif %}" + CHATML
    )
    return tokenizer
