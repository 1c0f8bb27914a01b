"""Texts are packed into whole sequences or padded one by one, and what is lost on the way is said."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from autofit.data.options import DataOptions, LabelRule
from autofit.data.samples import FileLoader
from autofit.data.text import text_loader
from tests.data.letters import letters, lines

NO = -100
NO_END = "the tokenizer has no end-of-text token, so where a text ends is not learnt."
END = 1
PAIR = {"prompt": "ab", "completion": "c"}
CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}


def workload(task: str = "causal-lm", length: int = 8) -> Workload:
    return Workload(
        model=torch.nn.Identity,
        batch=lambda n: None,
        task=task,
        sequence_length=length,
        effective_batch_size=4,
    )


def loader(
    path: Path, *, tokenizer: Any = None, packing: bool | None = None, **given: Any
) -> FileLoader:
    options = DataOptions(packing=packing, labels=LabelRule(2))
    return text_loader(workload(**given), path, tokenizer or byte_tokenizer(), options)


def samples(path: Path, **given: Any) -> dict[str, torch.Tensor]:
    """All samples in the order of the file."""
    found = loader(path, **given).samples
    return found.batch(torch.arange(len(found)))


# Packing


def test_bytes_of_a_text_are_packed_into_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrs", encoding="utf-8")
    found = samples(tmp_path / "a.txt")
    assert bytes(found["input_ids"].flatten().tolist()) == b"abcdefghijklmnop"
    assert found["input_ids"].shape == (2, 8)
    assert torch.equal(found["labels"], found["input_ids"])
    assert found["input_ids"].dtype == torch.int64
    assert loader(tmp_path / "a.txt").notes == ()


def test_a_text_too_short_for_one_sequence_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("äb", encoding="utf-8")
    assert bytes(samples(tmp_path / "a.txt")["input_ids"][0].tolist()) == "äbäbäb".encode()[:8]


def test_texts_of_json_lines_end_with_the_tokenizers_end(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "abc", "other": 1}, {"text": "de"}, {"text": "f"})
    assert samples(path, tokenizer=letters())["input_ids"].tolist() == [
        [6, 7, 8, END, 9, 10, END, 11]
    ]
    without = letters(eos_token=None)
    assert samples(path, tokenizer=without, length=3)["input_ids"].tolist() == [
        [6, 7, 8],
        [9, 10, 11],
    ]


def test_packed_completions_keep_what_is_learnt(tmp_path: Path) -> None:
    found = samples(lines(tmp_path, PAIR, PAIR), tokenizer=letters(), packing=True)
    assert found["input_ids"].tolist() == [[6, 7, 8, END, 6, 7, 8, END]]
    assert found["labels"].tolist() == [[NO, NO, 8, END, NO, NO, 8, END]]


def test_packed_sequences_without_anything_to_learn_are_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a" * 16, "completion": "bcdefghi"})
    found = loader(path, packing=True)
    assert len(found.samples) == 1
    assert found.notes == ("left out, without a label to learn within 8 tokens: 2 of 3 samples.",)


# Padding


def test_completions_are_padded_unless_told_otherwise(tmp_path: Path) -> None:
    path = lines(
        tmp_path, PAIR, {"prompt": "a", "completion": ""}, {"prompt": "abcd", "completion": "ef"}
    )
    found = samples(path, tokenizer=letters())
    assert found["input_ids"].tolist() == [
        [6, 7, 8, 1, 3, 3, 3],
        [6, 1, 3, 3, 3, 3, 3],
        [6, 7, 8, 9, 10, 11, 1],
    ]
    assert found["labels"].tolist() == [
        [NO, NO, 8, 1, *[NO] * 3],
        [NO, 1, *[NO] * 5],
        [*[NO] * 4, 10, 11, 1],
    ]
    assert found["attention_mask"].sum(dim=1).tolist() == [4, 2, 7]


def test_what_is_cut_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "a" * 8, "completion": "b"},
        {"prompt": "a", "completion": "b" * 8},
        PAIR,
    )
    found = loader(path)
    assert len(found.samples) == 2
    assert found.samples.batch(torch.arange(2))["input_ids"].shape == (2, 8)
    assert found.notes == (
        NO_END,
        "cut to 8 tokens: 2 of 3 samples.",
        "left out, without a label to learn within 8 tokens: 1 of 3 samples.",
    )


def test_a_single_token_predicts_nothing(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "a"}, {"text": "ab"})
    assert len(loader(path, packing=False).samples) == 1
    assert len(loader(path, packing=False, task="masked-lm").samples) == 2


def test_lines_of_a_text_are_padded_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\n\nabc\n")
    found = samples(tmp_path / "a.txt", packing=False)
    assert found["input_ids"].tolist() == [[97, 98, 0], [97, 98, 99]]
    assert found["labels"].tolist() == [[97, 98, NO], [97, 98, 99]]


@pytest.mark.parametrize(
    ("texts", "told"), [("ab ab abcdefg abcdefg ab", True), ("abc abc abcd ab ab", False)]
)
def test_how_much_of_padded_batches_is_padding_is_said(
    tmp_path: Path, texts: str, told: bool
) -> None:
    path = lines(tmp_path, *({"text": text} for text in texts.split()))
    assert any("is padding" in note for note in loader(path, packing=False).notes) is told
    assert loader(path, packing=True).notes == (NO_END,)


@pytest.mark.parametrize("packing", [True, False])
def test_how_long_samples_are_is_known_packed_or_not(tmp_path: Path, packing: bool) -> None:
    found = loader(
        lines(tmp_path, *({"text": "a" * n} for n in (1, 2, 4, 20))), packing=packing
    ).lengths
    assert found
    few = (1, 2) if packing else (2,)  # a single token predicts nothing
    lengths = [*few, 4, 8]
    assert (found.samples, found.shortest, found.longest) == (len(lengths), min(lengths), 8)
    assert found.padding == pytest.approx(1 - sum(lengths) / (8 * len(lengths)))


# Chats


def test_messages_without_a_template_are_written_in_a_simple_one_which_is_kept(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer()
    found = loader(lines(tmp_path, CHAT), tokenizer=tokenizer, length=64)
    assert found.notes == (
        "the tokenizer has no chat template: a turn is written as its role, a line break and its text.",
    )
    assert tokenizer.chat_template == CHAT_TEMPLATE
    (batch,) = found.in_order()
    assert bytes(batch["input_ids"][0].tolist()) == b"user:\nab\x03\nassistant:\nc\x03\n"
    assert [label for label in batch["labels"][0].tolist() if label != NO] == [ord("c"), 3]
    assert loader(lines(tmp_path, CHAT), tokenizer=tokenizer, length=64).notes == ()


CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_turns_that_end_with_nothing_are_said(tmp_path: Path) -> None:
    found = loader(lines(tmp_path, CHAT), tokenizer=letters(chat_template=CONTENTS))
    assert found.notes == (
        "the chat template writes nothing after a turn, so where one ends is not learnt.",
    )
    (batch,) = found.in_order()
    assert batch["labels"].tolist() == [[NO, NO, 8]]
    ended = CONTENTS.replace("['content']", "['content'] + eos_token")
    assert loader(lines(tmp_path, CHAT), tokenizer=letters(chat_template=ended)).notes == ()


def test_a_template_that_does_not_show_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"turns cannot be told from the rest of the chat template: .*--learn all"
    ):
        loader(lines(tmp_path, CHAT), tokenizer=letters(chat_template=CONTENTS + CONTENTS))
    path = lines(tmp_path, CHAT)
    tokenizer = letters(chat_template=CONTENTS + CONTENTS)
    found = text_loader(workload(), path, tokenizer, DataOptions(learn="all"))
    assert found.notes == ()
    (batch,) = found.in_order()
    assert batch["labels"].tolist() == [[6, 7, 8, 6, 7, 8]]


def test_tools_that_a_template_leaves_out_are_said(tmp_path: Path) -> None:
    path = lines(tmp_path, CHAT, {**CHAT, "tools": [{"type": "function"}]})
    ended = CONTENTS.replace("['content']", "['content'] + eos_token")
    told = loader(path, tokenizer=letters(chat_template=ended)).notes
    assert told == ("the chat template leaves out the tools, which 1 of 2 rows have.",)
    shows = letters(chat_template="{% if tools %}t{% endif %}" + ended)
    assert loader(path, tokenizer=shows).notes == ()


def test_what_is_to_be_learnt_is_checked() -> None:
    with pytest.raises(InputError, match=r"learn must be one of assistant, all, not 'some'"):
        DataOptions(learn="some")


def test_a_tokenizer_without_an_end_is_said(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "ab"}, {"text": "cd"})
    assert loader(path, tokenizer=letters(eos_token=None)).notes == (NO_END,)
    assert loader(path, tokenizer=letters()).notes == ()
    assert loader(lines(tmp_path, {"text": "ab"}), tokenizer=letters(eos_token=None)).notes == ()


# Masked language models


def test_masked_language_models_hide_by_the_tokenizers_mask(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd" * 100, encoding="utf-8")
    for tokenizer, mask in ((byte_tokenizer(), 1), (letters(), 2)):
        found = loader(tmp_path / "a.txt", tokenizer=tokenizer, task="masked-lm")
        ids = torch.cat([batch["input_ids"] for batch in found])
        assert (ids == mask).any()


def test_a_tokenizer_without_a_mask_cannot_train_a_masked_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(InputError, match="the tokenizer has no mask token"):
        samples(tmp_path / "a.txt", tokenizer=letters(mask_token=None), task="masked-lm")


def test_masked_models_take_text_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 1 lacks text"):
        samples(lines(tmp_path, PAIR), task="masked-lm")


# Classification


def test_labelled_texts_are_padded_and_their_labels_numbered(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"text": "abc", "label": "good"},
        {"text": "abcdefghijklmn", "label": "bad"},
        {"text": "a", "label": "good"},
    )
    found = loader(path, tokenizer=letters(), task="sequence-classification")
    assert found.label_names == {"bad": 0, "good": 1}
    assert found.notes == ("cut to 8 tokens: 1 of 3 samples.",)
    batch = found.samples.batch(torch.arange(3))
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["input_ids"].tolist() == [[6, 7, 8, *[3] * 5], list(range(6, 14)), [6, *[3] * 7]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 8, 1]


def test_labelled_bytes(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "ab", "label": 0}, {"text": "", "label": 1})
    found = samples(path, task="sequence-classification")
    assert found["input_ids"].tolist() == [[97, 98], [32, 0]]
    assert found["attention_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": ""}, r"the data in .*a\.jsonl holds no text"),
        (
            {"prompt": "a" * 9, "completion": "b"},
            r"no sample of .*a\.jsonl has a label to learn within 8 tokens",
        ),
    ],
)
def test_nothing_to_learn(tmp_path: Path, row: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        loader(lines(tmp_path, row))


# Pairs of texts, of which the second is written


def test_pairs_are_padded_apart(tmp_path: Path) -> None:
    path = lines(tmp_path, {"source": "ab", "target": "cdef"}, {"source": "abcd", "target": "c"})
    found = samples(path, task="seq2seq", tokenizer=letters(framed=True))
    assert found["input_ids"].tolist() == [[4, 6, 7, 5, 3, 3], [4, 6, 7, 8, 9, 5]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert found["labels"].tolist() == [[4, 8, 9, 10, 11, 5], [4, 8, 5, NO, NO, NO]]


def test_both_texts_of_a_pair_are_cut_within_their_frames(tmp_path: Path) -> None:
    path = lines(
        tmp_path, {"source": "abcdefghij", "target": "a"}, {"source": "a", "target": "abcdefghij"}
    )
    found = loader(path, task="seq2seq", tokenizer=letters(framed=True))
    assert found.notes == ("cut to 8 tokens: 2 of 2 samples.",)
    batch = found.samples.batch(torch.tensor([1]))
    assert batch["input_ids"].tolist() == [[4, 6, 5]]
    assert batch["labels"].tolist() == [[4, 6, 7, 8, 9, 10, 11, 5]]


def test_a_pair_without_a_token_to_write_is_left_out(tmp_path: Path) -> None:
    rows = (
        {"source": "ab", "target": "c"},
        {"source": "ab", "target": ""},
        {"source": "", "target": "d"},
    )
    found = loader(lines(tmp_path, *rows), task="seq2seq", tokenizer=letters())
    assert found.notes == ("left out, without a label to learn within 8 tokens: 1 of 3 samples.",)
    assert found.samples.batch(torch.arange(2))["labels"].tolist() == [[8], [9]]


# Words with tags, and pairs of texts that mean the same


def test_the_first_token_of_each_word_has_its_tag(tmp_path: Path) -> None:
    rows = {"tokens": ["ab", "c"], "ner_tags": ["LOC", "O"]}, {"tokens": ["d"], "ner_tags": ["O"]}
    found = loader(
        lines(tmp_path, *rows), task="token-classification", tokenizer=letters(framed=True)
    )
    assert found.label_names == {"LOC": 0, "O": 1}
    batch = found.samples.batch(torch.arange(2))
    assert batch["input_ids"].tolist() == [[4, 6, 7, 8, 5], [4, 9, 5, 3, 3]]
    assert batch["labels"].tolist() == [[NO, 0, NO, 1, NO], [NO, 1, NO, NO, NO]]


def test_words_beyond_the_length_are_cut(tmp_path: Path) -> None:
    found = loader(
        lines(tmp_path, {"tokens": [*"abcdefgh"], "tags": [0] * 8}), task="token-classification"
    )
    assert found.notes == ()
    path = lines(
        tmp_path,
        {"tokens": [*"abcdefghi"], "tags": [0] * 9},
        {"tokens": [*"abcde"], "tags": [1] * 5},
    )
    assert loader(path, task="token-classification").notes == ("cut to 8 tokens: 1 of 2 samples.",)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": ["a", "b"], "tags": [0]}, "line 1: 2 words have 1 tags"),
        (
            {"tokens": "ab", "tags": [0]},
            "line 1: tokens must be a list with an entry for each word, not str",
        ),
        ({"tokens": [1], "tags": [0]}, "line 1: a word of tokens must be text, not int"),
        ({"tokens": ["a"], "tags": [2]}, "line 1: label 2, but the model has classes 0 to 1"),
        ({"tokens": ["a"]}, "line 1 lacks tags or ner_tags or pos_tags or labels"),
    ],
)
def test_wrong_tags(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        loader(lines(tmp_path, row), task="token-classification")


def test_twins_stand_side_by_side(tmp_path: Path) -> None:
    rows = {"anchor": "ab", "positive": "c"}, {"query": "d", "answer": "efg"}
    found = loader(lines(tmp_path, *rows), task="embed", tokenizer=letters(framed=True))
    assert len(found) == 1
    batch = found.samples.batch(torch.tensor([1, 0]))
    assert batch["input_ids"].tolist() == [
        [[4, 9, 5, 3, 3], [4, 10, 11, 12, 5]],
        [[4, 6, 7, 5, 3], [4, 8, 5, 3, 3]],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[3, 5], [4, 3]]


# Answers within texts


def test_the_tokens_of_an_answer(tmp_path: Path) -> None:
    rows = [
        {
            "question": "ab",
            "context": "cde",
            "answers": {"text": ["de", "c"], "answer_start": [1, 0]},
        },
        {"question": "a", "context": "c", "answers": {"text": [], "answer_start": []}},
    ]
    tokenizer = letters(
        framed=True, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
    found = loader(lines(tmp_path, *rows), task="question-answering", tokenizer=tokenizer)
    batch = found.samples.batch(torch.arange(2))
    assert batch["input_ids"].tolist() == [[4, 6, 7, 5, 8, 9, 10, 5], [4, 6, 5, 8, 5, 3, 3, 3]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0]]
    assert batch["start_positions"].tolist() == [5, 0]
    assert batch["end_positions"].tolist() == [6, 0]


def test_answers_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    answers = [{"text": ["h"], "answer_start": [5]}, {"text": ["d"], "answer_start": [1]}]
    rows = [{"question": "ab", "context": "cdefgh", "answers": each} for each in answers]
    found = loader(
        lines(tmp_path, *rows), task="question-answering", tokenizer=letters(framed=True)
    )
    assert found.notes == (
        "cut to 8 tokens: 2 of 2 samples.",
        "left out, without a label to learn within 8 tokens: 1 of 2 samples.",
    )
    assert found.samples.batch(torch.arange(1))["start_positions"].tolist() == [5]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            {"text": ["d"], "answer_start": [0]},
            "line 1: the answer 'd' is not at character 0 of the context",
        ),
        ({"text": ["d"]}, "line 1: answers must be texts, and as many characters"),
        ("d", "line 1: answers must be texts, and as many characters"),
        (
            {"text": ["d"], "answer_start": [-1]},
            "line 1: answers must be texts, and as many characters",
        ),
    ],
)
def test_wrong_answers(tmp_path: Path, answers: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        loader(
            lines(tmp_path, {"question": "a", "context": "cd", "answers": answers}),
            task="question-answering",
        )
