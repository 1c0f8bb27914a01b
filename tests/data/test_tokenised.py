"""A data file becomes tokens on disk: a block at a time, in processes, once, and in bounded memory."""

import json
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data import contents, reading_bar, row_source, text_rows, tokenised, tokens
from autofit.data.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from autofit.data.options import DataOptions, LabelRule
from autofit.data.reading_bar import ReadingBar
from autofit.data.samples import FileLoader, Packed
from autofit.data.text import text_loader
from autofit.data.token_files import Joined, TokenFile, TokenWriter
from tests.data.letters import letters, lines
from tests.data.test_same_batches import EXPECTED, about
from tests.data.test_same_batches import loader as expected_loader
from tests.data.test_tokens import SlowTokenizer

SENTENCE = "The quick brown foxes, 12 of them, don't jump over the lazy dogs' heads.  So it is!\n\n"


def loader(path: Path, tokenizer: Any = None, length: int = 8, **options: Any) -> FileLoader:
    task = options.pop("task", "causal-lm")
    workload = Workload(
        model=torch.nn.Identity,
        batch=lambda n: None,
        task=task,
        sequence_length=length,
        effective_batch_size=4,
    )
    given = DataOptions(**{"labels": LabelRule(2), **options})
    return text_loader(workload, path, tokenizer or byte_tokenizer(), given)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few rows are read in many blocks."""
    monkeypatch.setattr(contents, "PART", 64)
    monkeypatch.setattr(row_source, "_BLOCK", 100)


@pytest.fixture
def processes(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size are tokenised in processes."""
    monkeypatch.setattr(tokenised, "_IN_PROCESSES", -1)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", ["chats", "tagged"])
def test_processes_make_the_same_batches(name: str, tmp_path: Path) -> None:
    assert (
        about(expected_loader(name, tmp_path), tmp_path) == json.loads(EXPECTED.read_text())[name]
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name", ["texts", "csv", "shards", "saved", "pairs", "packed chats", "reviews", "rated"]
)
def test_blocks_make_the_same_batches(name: str, tmp_path: Path) -> None:
    assert (
        about(expected_loader(name, tmp_path), tmp_path) == json.loads(EXPECTED.read_text())[name]
    )


@pytest.mark.usefixtures("processes")
def test_what_is_wrong_in_a_line_is_told_from_another_process(tmp_path: Path) -> None:
    path = lines(tmp_path, *({"text": "a" * 50} for _ in range(20)), {"text": 5}, {"text": 6})
    with pytest.raises(InputError, match=r"a\.jsonl, line 21: text must be text, not int\. Put it"):
        loader(path)


# Texts in pieces


def bpe(**options: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([SENTENCE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **options)


def with_space() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text, as SentencePiece does."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=["</s>", "<unk>"], show_progress=False
    )
    made.train_from_iterator([SENTENCE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def by_parity() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens depend on where a text begins: pairs of characters."""
    pairs = {pair: number for number, pair in enumerate(("aa", "ab", "ba", "bb"), start=3)}
    made = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2, **pairs}, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def in_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, tokenizer: Any, part: int, around: int
) -> list[int]:
    """The tokens of a text that is read in parts of so many bytes."""
    (folder / "a.txt").write_text(text)
    monkeypatch.setattr(contents, "PART", part)
    monkeypatch.setattr(text_rows, "AROUND", around)
    samples = loader(folder / "a.txt", tokenizer).samples
    assert isinstance(samples, Packed)
    found = samples.tokens["input_ids"]
    return found[: len(found)].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [bpe, with_space, byte_tokenizer])
def test_pieces_of_a_text_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    tokenizer = make()
    text = SENTENCE * 40
    found = in_pieces(tmp_path, monkeypatch, text, tokenizer, 101, 80)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    assert found == whole + end


@pytest.mark.parametrize("slow", [True, False])
def test_texts_whose_pieces_would_have_other_tokens_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    tokenizer: Any = by_parity()
    if slow:
        backend = bpe().backend_tokenizer
        tokenizer = SlowTokenizer(tokenizer_object=backend, eos_token="</s>")
    text = "abba" * 60 + "a"
    found = in_pieces(tmp_path, monkeypatch, text, tokenizer, 33, 24)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found == [*whole, tokenizer.eos_token_id]


# The cache


def test_what_was_tokenised_is_not_tokenised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, {"text": "abcdefgh"})
    first = [batch["input_ids"].tolist() for batch in loader(path).in_order()]
    monkeypatch.setattr(tokens, "_cut", None)  # would fail if it were called
    assert [batch["input_ids"].tolist() for batch in loader(path).in_order()] == first


def test_anything_else_is_tokenised_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(
        tokenised,
        "cached_folder",
        lambda name, build, made=tokenised.cached_folder: built.append(name) or made(name, build),
    )
    variants: list[tuple[str, Any, dict[str, Any]]] = [
        ("ab", letters(), {"packing": False}),
        ("ac", letters(), {"packing": False}),
        ("ab", letters(), {"packing": False, "length": 2}),
        ("ab", letters(framed=True), {"packing": False}),
        ("ab", letters(eos_token="[PAD]"), {"packing": False}),
        ("ab", letters(), {"packing": False, "task": "masked-lm"}),
        ("ab", letters(), {"packing": False, "learn": "all"}),
        ("ab", letters(chat_template=CHAT_TEMPLATE), {"packing": False}),
    ]
    for text, tokenizer, options in variants:
        loader(lines(tmp_path, {"text": text}), tokenizer, **options)
    assert len(set(built)) == len(variants)


def test_a_tokenizer_that_was_used_is_still_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, {"text": "abcdefghijkl", "label": 1})
    tokenizer = letters(framed=True)
    loader(path, tokenizer, task="sequence-classification")
    monkeypatch.setattr(tokenised._Store, "fill", None)  # would fail if it were called
    loader(path, tokenizer, task="sequence-classification")


# Memory


@pytest.mark.parametrize("kind", ["rows", "text"])
def test_memory_does_not_grow_with_a_file(tmp_path: Path, kind: str) -> None:
    peaks = []
    for size in (9_000_000, 18_000_000):  # more than is read at once for a checksum
        path = tmp_path / f"{size}.{'jsonl' if kind == 'rows' else 'txt'}"
        line = "all work and no play " * 40
        if kind == "rows":
            line = json.dumps({"text": line})
        path.write_text(f"{line}\n" * (size // len(line)))
        tracemalloc.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenised, "_IN_PROCESSES", 2**40)  # where it can be counted
            patch.setattr(contents, "PART", 2**17)
            found = loader(path, length=1024)
            next(iter(found))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.samples.largest_id() == ord("y")
    assert peaks[1] - peaks[0] < 1_000_000, peaks


@pytest.mark.parametrize("on_terminal", [True, False])
def test_how_far_it_is_is_shown(
    on_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    monkeypatch.setattr(reading_bar, "_FIRST_LINE_SECONDS", 0.0)
    with ReadingBar("tokenising", 4_000_000, shown=True) as bar:
        bar.update(1_000_000, 1234)
        bar.update(2_000_000, 2345)
    shown = capsys.readouterr().err
    if on_terminal:
        assert "tokenising" in shown
    else:
        assert shown == "tokenising: 1,234 rows, 1 MB of 4 MB\n"
    with ReadingBar("tokenising", 4, shown=False) as bar:
        bar.update(1, 1)
    assert capsys.readouterr().err == ""


# Files of tokens


def test_tokens_take_the_smallest_type(tmp_path: Path) -> None:
    for most, kind in (255, "|u1"), (256, "<u2"), (2**16, "<u4"):
        assert TokenWriter(tmp_path / "a", 0, most).facts()["kind"] == kind
    for most, kind in (100, "|i1"), (255, "<i2"), (2**15, "<i4"):
        assert TokenWriter(tmp_path / "a", -100, most).facts()["kind"] == kind


def test_slices_of_a_file(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a", -100, 300)
    writer.write(np.array([1, -100, 300]))
    writer.write(np.array([], np.int64))
    writer.write(np.array([4]))
    file = TokenFile(tmp_path / "a", **writer.facts())
    assert (len(file), file.largest) == (4, 300)
    assert file[1:3].tolist() == [-100, 300]
    assert file[1:3].dtype == torch.int64
    assert file[3:3].tolist() == []
    assert file[2:9].tolist() == [300, 4]
    assert pickle.loads(pickle.dumps(file))[:4].tolist() == [1, -100, 300, 4]
    both = Joined(file, file)
    assert both[4:6].tolist() == [1, -100]
    assert both[2:4].tolist() == [300, 4]
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(InputError, match="it was cut off"):
        TokenFile(tmp_path / "a", "<i2", 4, 300)[0:4]


def test_tokens_that_somebody_deleted_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are first read, and once more where another process reads them."""
    TokenWriter(tmp_path / "a", 0, 300).write(np.array([1, 2]))
    file = TokenFile(tmp_path / "a", "<u2", 2, 2)
    (tmp_path / "a").unlink()
    with pytest.raises(InputError, match=r"cannot be read any more: .*No such file.*/a'"):
        pickle.loads(pickle.dumps(file))[0:2]

    path = tmp_path / "texts.txt"
    path.write_text("some text\n" * 9)
    monkeypatch.setattr(tokenised, "cached_folder", lambda *_: tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be read any more"):
        loader(path)
