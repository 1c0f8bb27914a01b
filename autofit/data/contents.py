"""The bytes of a data file: decompressed, and refused where they are neither rows nor text."""

import bz2
import gzip
import io
import lzma
import os
from pathlib import Path

import pyarrow

from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.files import check_regular

READABLE = "Give text, JSON, JSON lines, CSV, TSV, Parquet or Arrow; gzip, bzip2, xz and zstd are unpacked."
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_LARGEST = 2**34  # bytes
HEAD = 2**13  # bytes in which a NUL means that a file is no text, as git has it
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
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def head_of(path: Path) -> bytes:
    """The first bytes of a regular file."""
    message = f"the data file {path} cannot be read: {{}}.".format
    with as_input_error(lambda error: message(describe_error(error)), "Check the file."):
        file = check_regular(path, _LARGEST).open("rb")
    with file:
        return file.read(HEAD)


def decompressed(path: Path, head: bytes) -> bytes | None:
    """What a compressed file holds; None for one that is not compressed, whatever its name says."""
    message = f"the data file {path} cannot be decompressed: {{}}.".format
    with as_input_error(
        lambda error: message(describe_error(error)), "Fetch or compress it again."
    ):
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                return file.read()

        # A text may begin with BZh: what follows is a block, or the end of all.
        if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
            with bz2.open(path) as file:
                return file.read()

        if head.startswith(b"\xfd7zXZ\x00"):
            with lzma.open(path) as file:
                return file.read()

        if head.startswith(b"\x28\xb5\x2f\xfd"):
            packed = pyarrow.memory_map(os.fsencode(path))
            with pyarrow.CompressedInputStream(packed, "zstd") as stream:
                return bytes(stream.read())

    return None


def text_of(path: Path, head: bytes, content: bytes) -> str:
    """The text of a file's content, which begins with `head`; an InputError for anything else."""
    for magic, what in _BINARY:
        if head.startswith(magic):
            message = f"the data file {path} is {what}, which holds no rows that autofit reads."
            raise InputError(message, READABLE)

    if head.startswith(b"version https://git-lfs"):
        message = f"the data file {path} is a pointer of Git LFS, not the data itself."
        raise InputError(message, "Fetch it with git lfs pull.")

    # A byte order mark, which some programs write, is no text.
    with as_input_error(
        lambda error: f"the data file {path} cannot be read as text: {error}.", "Give UTF-8 text."
    ):
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    if b"\0" in head:
        raise InputError(f"the data file {path} is no text: it holds bytes of zero.", READABLE)
    if not text.strip():
        raise InputError(f"the data file {path} is empty.")
    return text
