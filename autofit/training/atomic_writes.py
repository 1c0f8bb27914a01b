"""Atomic writes: directories are filled aside, synced to disk, then renamed.

So a crash never leaves half of one. A directory being written ends in `.part`. One being replaced
or removed is renamed first, because deleting its files takes time; the next writer cleans up after
a crash. A full disk or a missing right becomes one sentence here.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.distributed import Ranks

_PART = ".part"
_FORMER = ".former"
_GONE = ".gone"


@contextmanager
def atomic_directory(path: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty directory to fill; on exit it becomes `path`, replacing what was there.

    `what` is for messages: "the checkpoint of step 200". Where writing fails (InputError), nothing
    partial stays.
    """
    part = _hidden(path, _PART)
    with _filling(part, path, what=what, needed_bytes=needed_bytes):
        yield part

        for file in (*part.iterdir(), part):
            sync(file)
        former = _hidden(path, _FORMER)
        if os.path.lexists(path):
            _discard(former)
            path.rename(former)
        part.rename(path)
        sync(path.parent)
        _discard(former)


@contextmanager
def directory_of_all(ranks: Ranks, path: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """An `atomic_directory` that several ranks fill, on a file system that all share.

    Where one of them fails, none has written.
    """
    with ExitStack() as stack:
        part = _hidden(path, _PART)
        with ranks.together(what):
            if ranks.is_first:
                making = atomic_directory(path, what=what, needed_bytes=needed_bytes)
                stack.enter_context(making)

        with ranks.together(what):
            try:
                yield part
            except OSError as error:
                if ranks.is_first:  # which tells it as it does of its own files
                    raise
                raise _unwritten(path, what, error.strerror or str(error)) from error

        with ranks.together(what):
            stack.close()


@contextmanager
def atomic_files(path: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """An `atomic_directory` that keeps other files: each new one replaces its namesake whole."""
    part = path / _PART
    with _filling(part, path, what=what, needed_bytes=needed_bytes):
        yield part

        for file in part.iterdir():
            sync(file)

        for file in part.iterdir():
            if file.is_dir():  # which replaces none that holds something
                _discard(path / file.name)
            file.replace(path / file.name)

        sync(path)


@contextmanager
def _filling(part: Path, path: Path, *, what: str, needed_bytes: int) -> Iterator[None]:
    """Make the directory to fill; turn a failed write into one sentence, and remove what was
    written."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        if part.parent == path.parent:  # else it holds files of others
            clean_up(path.parent)
        _discard(part)

        free = free_bytes(path.parent)
        if free is not None and free < needed_bytes:
            raise _no_room(path, what, needed_bytes, free)
        part.mkdir()
        yield
    # the latter two are what libraries make of the first
    except (OSError, RuntimeError, SafetensorError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError | SafetensorError):
            cause = cause.__cause__ or cause.__context__

        free = free_bytes(path.parent)
        written = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        is_full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if is_full or (free is not None and free < needed_bytes - written):
            raise _no_room(path, what, needed_bytes, (free or 0) + written) from error

        if cause is None:
            raise
        reason = getattr(cause, "strerror", None) or str(cause)
        raise _unwritten(path, what, reason) from error
    finally:
        _discard(part)


def _hidden(path: Path, ending: str) -> Path:
    """Where a directory is written, or waits to be removed."""
    return path.with_name(f".{path.name}{ending}")


def remove(path: Path) -> None:
    """Remove a directory so that half of it is never seen."""
    gone = _hidden(path, _GONE)
    _discard(gone)
    path.rename(gone)
    _discard(gone)


def _discard(path: Path) -> None:
    """Remove whatever is there, as far as that is possible: of a link the link alone."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def complete_entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """The names and paths in a folder.

    Includes what a crash left renamed, just before it was replaced.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        name = path.stem[1:]
        if not path.name.startswith("."):
            yield path.name, path
        elif path.suffix == _FORMER and not os.path.lexists(folder / name):
            yield name, path


def clean_up(folder: Path) -> None:
    """Restore the names of complete entries after a crash and remove the rest.

    Only for the process that writes.
    """
    for name, path in list(complete_entries(folder)):
        path.rename(folder / name)

    for ending in (_PART, _FORMER, _GONE):
        for leftover in folder.glob(f".*{ending}"):
            _discard(leftover)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int | None:
    """The free bytes; None where the file system does not say, or the folder does not exist."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    if not usage.total:
        return None
    return usage.free


def _unwritten(path: Path, what: str, reason: str) -> InputError:
    """The error for a failed write."""
    return InputError(
        f"{what} cannot be written to {path}: {reason}.",
        "Choose an output directory that can be written to.",
    )


def _no_room(path: Path, what: str, needed_bytes: int, free_bytes: int) -> InputError:
    """The error for a full file system."""
    return InputError(
        f"there is no room for {what} in {path.parent}: it needs {needed_bytes / GIB:.3g} GiB, "
        f"and {free_bytes / GIB:.3g} GiB is free.",
        "Make room there, or choose another output directory; earlier checkpoints are intact.",
    )
