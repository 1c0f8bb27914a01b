"""Data files as people have them: of any size, encoding, shape of rows, and state of preservation."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORDS = (
    "a",
    "word",
    "Straße",
    "naïve",
    "日本語",
    "🙂",
    "\u200b",
    "x" * 300,
    "<|end|>",
    "{}",
    "\\n",
)
_ENCODINGS = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252", "shift_jis")
_PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".md", ".pt", "")


def write_data(folder: Path, rng: random.Random) -> Path:
    """Draw a data file and write it to a folder."""
    suffix = rng.choice((".txt", ".jsonl", ".jsonl", ".json", ".csv"))
    rows = [_row(rng) for _ in range(rng.choice((0, 1, 2, 30, 30, 400)))]
    text = _text(suffix, rows, rng)
    content = text.encode(rng.choice(_ENCODINGS), errors="replace")
    if rng.random() < 0.15:
        packing = rng.choice(sorted(_PACKED))
        content = _PACKED[packing](content)
        suffix += packing
    if rng.random() < 0.3:
        content = _damaged(content, rng)
    if rng.random() < 0.1:
        suffix = rng.choice(_SUFFIXES)

    path = folder / f"data{suffix}"
    path.write_bytes(content)
    return path


def _row(rng: random.Random) -> Any:
    """A row of one of the shapes that are read, or of none."""
    text = " ".join(rng.choices(_WORDS, k=rng.choice((0, 1, 8, 60))))
    message = {"role": rng.choice(("user", "assistant", "tool", "")), "content": text}
    shapes: tuple[Any, ...] = (
        {"text": text},
        {"text": text},
        {"text": text, "more": [1, {"a": None}]},
        {"messages": [message, {"role": "assistant", "content": text}]},
        {"messages": []},
        {"prompt": text, "completion": text},
        {"prompt": text, "chosen": text, "rejected": text},
        {"text": rng.choice((None, 3, 1.5, [], [text], {"a": 1}, True))},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [-1, 2**40]},
        {},
        [text],
        text,
        None,
        7,
    )
    return rng.choice(shapes[:3]) if rng.random() < 0.6 else rng.choice(shapes)


def _text(suffix: str, rows: list[Any], rng: random.Random) -> str:
    """The rows in a format, with the line ends of some system."""
    line_end = rng.choice(("\n", "\n", "\r\n", "\r"))
    if suffix == ".json":
        return json.dumps(rows if rng.random() < 0.8 else {"data": rows})
    if suffix == ".jsonl":
        return line_end.join(map(json.dumps, rows)) + rng.choice(("", line_end))
    if suffix == ".txt":
        return line_end.join(str(row) for row in rows)

    file = io.StringIO()
    writer = csv.writer(file, delimiter=rng.choice(",;\t"), lineterminator=line_end)
    writer.writerow(rng.choice((["text"], ["text", "text"], ["a", "text"], [])))
    for row in rows:
        writer.writerow([row] if rng.random() < 0.9 else [row, row, row])
    return file.getvalue()


def _damaged(content: bytes, rng: random.Random) -> bytes:
    """The content cut short, with bytes of zero, twice, or with changed bits."""
    if not content:
        return content
    at = rng.randrange(len(content))
    return rng.choice(
        (
            content[:at],
            content[: min(3, at)],
            content[:at] + bytes(40) + content[at:],
            content * 2,
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        )
    )
