"""Directories that survive a crash: filled aside, synced to the disk, then renamed, so that half of one is never seen.

A directory in the making ends in `.part`; one that is about to be replaced, or removed, is renamed first, for removing
a directory takes as long as it has files. What a crash leaves of either is put in order by the next one that writes.
What a failure means (a full disk, no right to write) is told here as one sentence, for everything that is kept.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, MIB

_PART, _FORMER, _GONE = ".part", ".former", ".gone"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK = 8 * MIB


@contextmanager
def written_whole(path: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """Give an empty directory to fill, which becomes `path` on leaving, in place of what was there.

    Args:
        what: what is written, for messages: "the checkpoint of step 200".
        needed_bytes: how much room it takes.

    Raises:
        InputError: the disk is full, or the place cannot be written to; nothing is left aside then.
    """
    aside = _aside(path, _PART)
    with _told(path, aside, what=what, needed_bytes=needed_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        put_in_order(path.parent)
        _begin(path, aside, what, needed_bytes)
        yield aside
        for file in (*aside.iterdir(), aside):
            sync(file)
        _put_in_place(aside, path)


@contextmanager
def written_into(path: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """The same for a directory that may hold files of others: each file takes its place whole, the others stay."""
    aside = path / _PART
    with _told(path, aside, what=what, needed_bytes=needed_bytes):
        path.mkdir(parents=True, exist_ok=True)
        _begin(path, aside, what, needed_bytes)
        yield aside
        for file in aside.iterdir():
            sync(file)
        for file in aside.iterdir():
            file.replace(path / file.name)
        sync(path)


@contextmanager
def _told(path: Path, aside: Path, *, what: str, needed_bytes: int) -> Iterator[None]:
    """One sentence about what goes wrong while something is written aside; nothing is left there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # the latter two are what libraries make of the first
        cause = _cause(error)
        free, written = _free_bytes(path.parent), _size(aside)
        if getattr(cause, "errno", None) in _FULL or (free is not None and free < needed_bytes - written):
            raise _no_room(path, what, needed_bytes, (free or 0) + written) from error
        if not isinstance(cause, OSError | SafetensorError):
            raise
        reason = getattr(cause, "strerror", None) or str(cause)
        message = f"{what} cannot be written to {path}: {reason}."
        raise InputError(message, "Choose an output directory that can be written to.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already where all went well


def _begin(path: Path, aside: Path, what: str, needed_bytes: int) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    free = _free_bytes(path.parent)
    if free is not None and free < needed_bytes:
        raise _no_room(path, what, needed_bytes, free)
    aside.mkdir()


def _aside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _put_in_place(aside: Path, path: Path) -> None:
    former = _aside(path, _FORMER)
    if path.exists():
        shutil.rmtree(former, ignore_errors=True)
        path.rename(former)
    aside.rename(path)
    sync(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a directory so that half of it is never seen."""
    gone = _aside(path, _GONE)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def whole(folder: Path) -> Iterator[tuple[str, Path]]:
    """What a folder holds, with its names: also what a crash left in the moment before it was replaced."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith("."):
            yield path.name, path
        elif path.suffix == _FORMER and not (folder / path.stem[1:]).exists():
            yield path.stem[1:], path


def put_in_order(folder: Path) -> None:
    """Take care of what a crash left in a folder: what is whole gets its name back, the rest is removed.

    For the one process that writes there; those that only look leave everything as it is.
    """
    for name, path in list(whole(folder)):
        path.rename(folder / name)
    for ending in (_PART, _FORMER, _GONE):
        for left in folder.glob(f".*{ending}"):
            shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """Have the system write a file, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """The CRC-32 of a file: about half a second for each GiB."""
    sum_so_far = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sum_so_far = zlib.crc32(chunk, sum_so_far)
    return sum_so_far


def _free_bytes(folder: Path) -> int | None:
    """What can still be written; None where the file system does not say, or the folder is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _cause(error: BaseException) -> BaseException:
    """The error of the system, or of the library, behind one; itself where there is none."""
    known: BaseException | None = error
    while known is not None and not isinstance(known, OSError | SafetensorError):
        known = known.__cause__ or known.__context__
    return known or error


def _no_room(path: Path, what: str, needed_bytes: int, free_bytes: int) -> InputError:
    sizes = f"it needs {needed_bytes / GIB:.3g} GiB, and {free_bytes / GIB:.3g} GiB is free"
    message = f"there is no room for {what} in {path.parent}: {sizes}."
    return InputError(message, "Make room there, or choose another output directory; what was kept before is whole.")
