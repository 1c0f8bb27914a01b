"""A data file as tokens on disk: read a block at a time, tokenised in processes where it is large,
and cached."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets.fingerprint import Hasher

from autofit.core.files import digest
from autofit.data.byte_tokenizer import is_byte_tokenizer
from autofit.data.data_cache import cached_folder, code_digest, content_digest
from autofit.data.encoder import Encoded, Encoder, Values
from autofit.data.labels import labels_from
from autofit.data.options import IGNORED_LABEL, LabelRule
from autofit.data.reading_bar import ReadingBar
from autofit.data.row_source import Block, Blocks, Piece
from autofit.data.rows import ANSWERS, TAGGED, Accounts, Form, Reading
from autofit.data.token_files import TokenFile, TokenWriter, readable
from autofit.data.tokens import Encoding, end_of_text
from autofit.data.workers import mapped

_IN_PROCESSES = 2**24  # bytes of data files; starting a process takes as long as 20 MB of them
_ABOUT = "about.json"


@dataclass(frozen=True)
class Tokenised:
    """The tokens of a data file.

    Attributes:
        rows: how many the file has.
        cut: how many of them are cut to the length.
        labels: None where they are the ids.
        spans: where each row begins and ends among the ids, [rows, 2].
        label_spans: the same among the labels.
        is_learnt: for each row whether it has a label that counts, [rows].
        classes: the class of each row, its measured value, or whether its answer is good, [rows];
            None where rows have none.
        tools: how many rows have tools, and the messages and tools of the first one, as JSON.
    """

    form: Form
    rows: int
    cut: int
    ids: TokenFile
    labels: TokenFile | None
    types: TokenFile | None
    spans: torch.Tensor
    label_spans: torch.Tensor
    is_learnt: torch.Tensor
    classes: torch.Tensor | None
    class_names: Mapping[str, int]
    tools: tuple[int, tuple[str, str] | None]
    notes: tuple[str, ...]


class _DisagreeingPiecesError(Exception):
    """A tokenizer makes other tokens of a part of a text than of the whole."""


def tokenised(
    path: Path,
    reading: Reading,
    reopened: Callable[[], Reading],
    encoding: Encoding,
    rule: LabelRule,
    *,
    shifted: bool,
    progress: bool,
) -> Tokenised:
    """The tokens of a data file, taken from the cache when they are there.

    Args:
        reading: of the file.
        reopened: begins to read it again.
        shifted: the first token of a row is not predicted.
        progress: show on stderr how far it is.
    """
    first = reading.first
    tokenizer = encoding.tokenizer
    key = (
        str(path),
        content_digest(path),
        code_digest(),
        Hasher.hash(encoding),
        repr((first.forms, reading.form, rule, shifted)),
    )

    def build(folder: Path) -> None:
        size = _bytes_of(path)
        encoder = Encoder(encoding, first, shifted)
        # Without offsets, nobody knows to which piece of a text a token belongs.
        is_whole = not (is_byte_tokenizer(tokenizer) or tokenizer.is_fast)
        with ReadingBar("tokenising", size, shown=progress) as bar:
            try:
                store = _Store(folder, tokenizer, reading.form)
                store.fill(reading, encoder, bar, size, is_whole=is_whole)
            except _DisagreeingPiecesError:
                for file in folder.iterdir():
                    file.unlink()
                again = reopened()
                store = _Store(folder, tokenizer, reading.form)
                store.fill(again, encoder, bar, size, is_whole=True)
                reading.notes[:] = again.notes

        store.close(rule, reading.notes)

    folder = cached_folder(digest(repr(key)), build)
    with readable():
        return _read(folder)


class _Store:
    """The files of a folder, while they are written."""

    def __init__(self, folder: Path, tokenizer: Any, form: Form) -> None:
        self._folder = folder
        self._form = form
        self._tokenizer = tokenizer

        most = max(tokenizer.get_vocab().values(), default=0)
        most_label = most
        if form in (ANSWERS, TAGGED):  # whose labels are no tokens
            most_label = np.iinfo(np.int32).max
        self._ids = TokenWriter(folder / "ids", 0, most)
        self._labels = TokenWriter(folder / "labels", IGNORED_LABEL, most_label)
        self._types = TokenWriter(folder / "types", 0, 255)

        # Arrays of one entry for each row, block by block; files are named by the keys.
        self._by_row: dict[str, list[Any]] = {}
        self._rows = 0
        self._cut = 0
        self._values = Values()
        self._accounts = Accounts()
        self._tools: tuple[int, Any] = (0, None)

        # Of a row that goes on in the next piece: its last token and its length so far.
        self._begun = np.zeros(0, np.int32)
        self._begun_length = 0
        self._end: Any = None  # of the piece before, as `encode_piece` gives it

    def fill(
        self,
        reading: Reading,
        encoder: Encoder,
        bar: ReadingBar,
        size: int,
        *,
        is_whole: bool,
    ) -> None:
        """Tokenise all blocks, and write what they hold.

        Args:
            size: of the files, in bytes.
            is_whole: texts are not tokenised in pieces.

        Raises:
            _DisagreeingPiecesError: they must not be.
        """
        located = _whole(reading.blocks) if is_whole else reading.blocks
        positions: list[int] = []

        def blocks() -> Iterator[Block]:
            for block, position in located:
                positions.append(position)
                yield block

        # A tokenizer with code of its own may not be importable elsewhere.
        is_known = type(self._tokenizer).__module__.startswith("transformers.")
        in_processes = size > _IN_PROCESSES and is_known
        for number, block in enumerate(mapped(encoder, blocks(), in_processes=in_processes)):
            self._add(block)
            bar.update(positions[number], self._rows)

    def _add(self, block: Encoded) -> None:
        """Write the rows of a block."""
        self._accounts.add(block.accounts)
        if block.piece is not None:
            self._add_piece(block, block.piece)
            return

        # The block numbers its own values; these are their numbers among those of the whole file.
        numbers = [self._values.number(value, location) for value, location in block.values]
        places = np.array(numbers, np.int64)
        labels = block.labels
        if self._form == TAGGED and len(labels):
            is_tag = labels >= 0
            labels[is_tag] = places[labels[is_tag]]

        classes = block.classes
        if classes is not None:
            if numbers:
                classes = places[classes]
            self._append("classes", classes)

        self._ids.write(block.ids)
        self._labels.write(labels)
        self._types.write(block.types)
        self._end_rows(block.lengths, block.label_lengths, block.is_learnt)
        self._cut += block.cut

        earlier, first = self._tools
        count, shown = block.tools
        self._tools = (earlier + count, first or shown)

    def _add_piece(self, block: Encoded, piece: Piece) -> None:
        """Write a part of a row; its last part closes it."""
        begin, end = block.ends
        if self._begun_length and begin != self._end:
            raise _DisagreeingPiecesError
        self._end = end
        if len(block.ids):
            self._begun = block.ids[-1:]
        self._ids.write(block.ids)
        self._begun_length += len(block.ids)
        if not piece.is_last:
            return

        added = end_of_text(self._tokenizer, self._begun)
        self._ids.write(added)
        length = np.array([self._begun_length + len(added)], np.int64)
        self._end_rows(length, np.zeros(1, np.int64), length > 1)
        self._begun = self._begun[:0]
        self._begun_length = 0

    def _end_rows(self, lengths: Any, label_lengths: Any, is_learnt: Any) -> None:
        """Note where rows end that are written."""
        self._append("lengths", lengths)
        self._append("label_lengths", label_lengths)
        self._append("is_learnt", is_learnt)
        self._rows += len(lengths)

    def _append(self, name: str, values: Any) -> None:
        """Add values of a block's rows to those of the rows before."""
        parts = self._by_row.setdefault(name, [])
        parts.append(values)

    def close(self, rule: LabelRule, file_notes: list[str]) -> None:
        """Number the classes, and write what is known of all rows."""
        names: Mapping[str, int] = {}
        by_row = {name: np.concatenate(parts) for name, parts in self._by_row.items()}
        if self._values.values:
            classes = labels_from(self._values.values, self._values.locations, rule)
            names = classes.names
            if self._form == TAGGED:
                self._labels.replace(classes.numbers.tolist())
            else:
                by_row["classes"] = classes.numbers.numpy()[by_row["classes"]]

        for name, values in by_row.items():
            np.save(self._folder / f"{name}.npy", values)
        about = {
            "form": self._form,
            "rows": self._rows,
            "cut": self._cut,
            "class_names": dict(names),
            "tools": self._tools,
            "notes": [*file_notes, *self._accounts.notes()],
            "ids": self._ids.facts(),
            "labels": self._labels.facts(),
            "types": self._types.facts(),
        }
        (self._folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _whole(blocks: Blocks) -> Blocks:
    """The same blocks, with each text in one piece."""
    text = ""
    for block, position in blocks:
        piece = block.rows
        if not isinstance(piece, Piece):
            yield block, position
            continue

        text += piece.text
        if piece.is_last:
            yield replace(block, rows=replace(piece, before="", text=text)), position
            text = ""


def _read(folder: Path) -> Tokenised:
    """What lies in a folder that is whole."""
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    files = {}
    for name in ("ids", "labels", "types"):
        if about[name]["count"]:
            files[name] = TokenFile(folder / name, **about[name])

    classes = None
    if (folder / "classes.npy").exists():
        classes = torch.from_numpy(np.load(folder / "classes.npy"))
    count, shown = about["tools"]

    return Tokenised(
        form=tuple(about["form"]),
        rows=about["rows"],
        cut=about["cut"],
        ids=TokenFile(folder / "ids", **about["ids"]),
        labels=files.get("labels"),
        types=files.get("types"),
        spans=_spans(np.load(folder / "lengths.npy")),
        label_spans=_spans(np.load(folder / "label_lengths.npy")),
        is_learnt=torch.from_numpy(np.load(folder / "is_learnt.npy")),
        classes=classes,
        class_names=about["class_names"],
        tools=(count, shown and (shown[0], shown[1])),
        notes=tuple(about["notes"]),
    )


def _spans(lengths: Any) -> torch.Tensor:
    """Where each row begins and ends, [rows, 2]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return torch.from_numpy(np.stack([ends - lengths, ends], axis=1))


def _bytes_of(path: Path) -> int:
    """The bytes of a file, or of the files of a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
