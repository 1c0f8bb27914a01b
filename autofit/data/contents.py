"""The content of a data file, a part at a time: decompressed, and refused where it is neither rows
nor text."""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow

from autofit.core.errors import InputError, as_input_error, describe_error, sentence
from autofit.core.files import check_regular
from autofit.data.failures import failing_as

READABLE = (
    "Give text, JSON, JSON lines, CSV, TSV, Parquet or Arrow; "
    "gzip, bzip2, xz and zstd are unpacked."
)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
PART = 2**22  # bytes that are read at once
HEAD = 2**13  # bytes in which a NUL means that a file is no text, as git has it
_READERS: dict[str, Callable[[Any], Any]] = {
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
    "zstd": partial(pyarrow.CompressedInputStream, compression="zstd"),
}
_BINARY = (  # what files of other formats begin with
    (b"PK\x03\x04", "a zip archive (as .xlsx, .docx, .npz and .pt are)"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x93NUMPY", "an array of NumPy's"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"Obj\x01", "an Avro file"),
    (b"\xd0\xcf\x11\xe0", "an old Office document"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"fLaC", "a sound file"),
    (b"OggS", "a sound file"),
)


def inner_name(path: Path) -> Path:
    """The name of what a file holds, without the suffix of a compression."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path
    return path.with_suffix("")


def head_of(path: Path) -> bytes:
    """The first bytes of a regular file."""
    problem = f"the data file {path} cannot be read"
    with failing_as(problem, "Check the file.", reason=describe_error):
        file = check_regular(path).open("rb")
    with file:
        return file.read(HEAD)


def compression_of(head: bytes) -> str | None:
    """What a file is compressed with that begins so, whatever its name says; None for nothing."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"

    # A text may begin with BZh: what follows is a block, or the end of all.
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bzip2"

    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"

    return None


def read_parts(path: Path, head: bytes) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, decompressed, a part at a time; and how far in the file it ends.

    Raises:
        InputError: it cannot be read, or not be decompressed.
    """
    kind = compression_of(head)
    failure = "read"
    if kind is not None:
        failure = "decompressed"

    def says(error: BaseException) -> str:
        return f"the data file {path} cannot be {failure}: {describe_error(error)}."

    failing = as_input_error(says, "Fetch or compress it again.", but=_is_end_of_reading)
    with failing, path.open("rb") as packed:
        file = packed
        if kind is not None:
            file = _READERS[kind](packed)
        while part := file.read(PART):
            yield part, packed.tell()


def _is_end_of_reading(error: BaseException) -> bool:
    """Whether nobody asks a generator for more."""
    return isinstance(error, GeneratorExit)


def decompressed(path: Path, head: bytes) -> bytes | None:
    """What a compressed file holds; None for one that is not compressed."""
    if compression_of(head) is None:
        return None
    return b"".join(part for part, _ in read_parts(path, head))


@dataclass(frozen=True)
class TextFile:
    """The text of a data file, read from its beginning each time.

    Attributes:
        parts: gives the text a part at a time, each with how many bytes of the file are read then.
        size: the bytes of the file.
    """

    path: Path
    parts: Callable[[], Iterator[tuple[str, int]]]
    size: int = 0

    def read(self) -> str:
        """All of it."""
        return "".join(part for part, _ in self.parts())

    def blocks(self) -> Iterator[tuple[str, int]]:
        """Parts that end with a line, or with the text."""
        begun: list[str] = []
        position = 0
        for part, position in self.parts():
            end = part.rfind("\n") + 1
            if end:
                yield "".join([*begun, part[:end]]), position
                begun = []

            begun.append(part[end:])

        if rest := "".join(begun):
            yield rest, position

    def lines(self) -> Iterator[str]:
        """Its lines, without their ends."""
        for block, _ in self.blocks():
            yield from block.removesuffix("\n").split("\n")


def text_file(path: Path, head: bytes) -> TextFile:
    """The text in a file, which may be compressed; an InputError for anything else.

    Args:
        head: what it begins with once it is decompressed.
    """
    for magic, what in _BINARY:
        if head.startswith(magic):
            message = f"the data file {path} is {what}, which holds no rows that autofit reads."
            raise InputError(message, READABLE)

    if head.startswith(b"version https://git-lfs"):
        message = f"the data file {path} is a pointer of Git LFS, not the data itself."
        raise InputError(message, "Fetch it with git lfs pull.")

    file = TextFile(
        path,
        partial(_decoded, path, head_of(path)),
        path.stat().st_size,
    )
    has_text = any(part.strip() for part, _ in file.parts())
    if b"\0" in head:
        raise InputError(f"the data file {path} is no text: it holds bytes of zero.", READABLE)
    if not has_text:
        raise InputError(f"the data file {path} is empty.")

    return file


def _decoded(path: Path, head: bytes) -> Iterator[tuple[str, int]]:
    """The text of a file, a part at a time, with \\n at the end of every line."""
    # A byte order mark, which some programs write, is no text.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines = io.IncrementalNewlineDecoder(decoder, translate=True)
    given = 0

    def says(error: BaseException) -> str:
        """The message for an error; of bytes that are no UTF-8, where in the file they are."""
        why = sentence(error)
        if isinstance(error, UnicodeDecodeError):
            # Python counts from the beginning of the part.
            place = given - len(error.object) + error.start
            byte = f"0x{error.object[error.start]:02x}"
            why = f"'utf-8' codec can't decode byte {byte} in position {place}: {error.reason}"

        return f"the data file {path} cannot be read as text: {why}."

    position = 0
    with as_input_error(says, "Give UTF-8 text.", but=_is_end_of_reading):
        for part, position in read_parts(path, head):
            given += len(part)
            yield lines.decode(part), position

        yield lines.decode(b"", final=True), position
