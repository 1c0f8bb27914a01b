"""What is neither rows nor text is refused in a sentence that says what it is, and damaged files are named."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from autofit.core.errors import InputError
from autofit.data import contents
from autofit.data.contents import (
    compression_of,
    head_of,
    inner_name,
    read_parts,
    text_file,
)


def text(path: Path) -> str:
    head = head_of(path)
    if compression_of(head):
        head = next(read_parts(path, head))[0]
    return text_file(path, head).read()


@pytest.mark.parametrize("content", ["a", "ä\n" * 10_000, "one\ntwo"])
def test_texts(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8-sig")
    assert text(path) == content
    path.write_bytes(content.replace("\n", "\r\n").encode())
    assert text(path) == content


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_of_a_text_are_cut_anywhere_and_blocks_after_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(contents, "PART", size)
    path = tmp_path / "a.txt"
    whole = "\ufeffäöü\r\n\n日本\n\rend\U0001f600"
    path.write_bytes(whole.encode())
    file = text_file(path, head_of(path))
    expected = "äöü\n\n日本\n\nend\U0001f600"
    assert file.read() == expected
    assert list(file.lines()) == expected.split("\n")
    blocks = [block for block, _ in file.blocks()]
    assert "".join(blocks) == expected
    assert all(block.endswith("\n") for block in blocks[:-1])


def test_a_byte_that_is_no_text_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PART", 4)
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffäbcdefgh".encode() + b"\xffi")
    told = r"'utf-8' codec can't decode byte 0xff in position 12: invalid start byte\. Give UTF-8"
    with pytest.raises(InputError, match=told):
        text_file(path, head_of(path)).read()


def test_names_without_the_suffix_of_a_compression() -> None:
    assert inner_name(Path("a/b.json.GZ")) == Path("a/b.json")
    assert inner_name(Path("a/b.json")) == Path("a/b.json")


@pytest.mark.parametrize(
    "compress",
    [
        gzip.compress,
        bz2.compress,
        lzma.compress,
        lambda each: pyarrow.compress(each, "zstd", asbytes=True),
    ],
)
def test_compressed_files(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a"
    whole = compress(b"some text" * 100)
    path.write_bytes(whole)
    assert text(path) == "some text" * 100
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        InputError, match=r"the data file .*/a cannot be decompressed: .*Fetch or compress it again"
    ):
        text(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04rest", r"is a zip archive \(as \.xlsx"),
        (b"%PDF-1.7", "is a PDF"),
        (b"\x89PNG\r\n\x1a\n", "is a PNG image"),
        (b"\xff\xd8\xff\xe0", "is a JPEG image"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"\x93NUMPY\x01\0", "is an array of NumPy's"),
        (b"\x80\x04\x95", "is a pickle"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (b"a\0b", "is no text: it holds bytes of zero"),
    ],
)
def test_other_formats_are_named_and_what_can_be_read(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(
        InputError,
        match=rf"a\.txt {words}.* Give text, JSON, JSON lines, CSV, TSV, Parquet or Arrow",
    ):
        text(tmp_path / "a.txt")


def test_a_pointer_of_git_lfs_is_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(
        InputError, match=r"is a pointer of Git LFS, not the data itself\. Fetch it"
    ):
        text(tmp_path / "a.jsonl")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(InputError, match=r"cannot be read: .*no regular file"):
        text(tmp_path / "a")
