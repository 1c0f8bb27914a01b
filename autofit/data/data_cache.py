"""Folders of what was made of data files: tokens, decoded images.

They lie in the user's cache, each under a name of all that it depends on, with the checksums of its
files. A damaged one is made anew. Those that were not used for longest go when all take too much.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autofit.core.errors import InputError, describe_error
from autofit.core.files import (
    cache_file,
    check_regular,
    checksum,
    digest,
    locked,
    read_cache,
    write_cache,
)
from autofit.data.failures import failing_as
from autofit.data.folders import SAVED, is_litter

MOST_BYTES = 2**34  # of all folders, beside the one that is used
_SUMS = "sums.json"
_POLL_SECONDS = 0.2
_PART = ".part"
_LOCK = ".lock"


def content_digest(path: Path) -> str:
    """A name for what a data file or a directory of such holds; about a second for each GB."""
    files = [path]
    if path.is_dir():
        is_saved = any((path / name).exists() for name in SAVED)
        found = path.iterdir()
        if is_saved:
            found = path.rglob("*")
        files = sorted(file for file in found if not is_litter(file.relative_to(path)))

    sums = []
    problem = f"the data in {path} cannot be read"
    with failing_as(problem, "Check the file.", reason=describe_error):
        for file in files:
            if file.is_dir():
                continue

            with check_regular(file).open("rb") as content:
                summed = hashlib.file_digest(content, "sha256")
            sums.append((str(file), summed.hexdigest()))

    return digest(repr(sums))


def code_digest() -> str:
    """A name for the code of this room, on which all that it makes depends."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return digest("".join(source.read_text(encoding="utf-8") for source in sources))


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder of that name with what `build` writes into an empty one.

    It is in the user's cache; where nothing can be kept there, for as long as this process runs.
    Another process that wants the same waits for the one that makes it.

    Raises:
        InputError: there is no room for it.
    """
    folder = cache_file("data", name)
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_waiting_for(_with_suffix(folder, _LOCK)))
        except OSError:  # no home, or one that cannot be written to
            temporary = Path(tempfile.mkdtemp(prefix="autofit-data-"))
            _delete_after_this_process(temporary)
            _build(temporary / name, build)

            return temporary / name

        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder, build)

        with contextlib.suppress(OSError):
            os.utime(folder / _SUMS)  # by which it is known what was used last
        _prune(folder)

    return folder


def _delete_after_this_process(folder: Path) -> None:
    """Have a folder deleted when this process ends, also where a signal ends it.

    What deletes it is a process that reads until nobody can write any more: this process, and those
    forked from it, which end with it.
    """
    reader, _ = os.pipe()
    os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", 'cat > /dev/null; exec rm -rf -- "$0"', str(folder)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)],
        setsid=True,  # a Ctrl-C in the terminal is not meant for it
    )
    os.close(reader)


@contextlib.contextmanager
def _waiting_for(lock: Path) -> Iterator[None]:
    """Hold a lock, once no other process does."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(lock))
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)

        yield


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    """Make a folder that is whole, or none."""
    part = _with_suffix(folder, _PART)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        build(part)
        write_cache(part / _SUMS, _sums(part))
        part.replace(folder)
    except OSError as error:
        message = f"what is made of the data cannot be written to {folder.parent}: {error}."
        remedy = "Make room there, or set XDG_CACHE_HOME to another directory."
        raise InputError(message, remedy) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sums(folder: Path) -> dict[str, int]:
    """The checksum of each file in a folder, by name."""
    files = [file for file in sorted(folder.iterdir()) if file.name != _SUMS]
    return {file.name: checksum(file) for file in files}


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds what was written into it."""
    with contextlib.suppress(OSError):
        return bool(_sums(folder) == read_cache(folder / _SUMS, dict[str, int]))
    return False


def _prune(used: Path) -> None:
    """Delete what killed processes left, and the folders that were not used for longest, where all
    take too much."""
    with contextlib.suppress(OSError):
        for part in used.parent.glob(f"*{_PART}"):
            _delete_unless_in_use(part, part.with_suffix(""))

        others = []
        for folder in used.parent.iterdir():
            sums = folder / _SUMS
            if folder == used or not sums.exists():
                continue

            last_used = sums.stat().st_mtime
            size = sum(file.stat().st_size for file in folder.iterdir())
            others.append((last_used, size, folder))

        total = 0
        for _, size, folder in sorted(others, reverse=True):
            total += size
            if total > MOST_BYTES:
                _delete_unless_in_use(folder, folder)


def _delete_unless_in_use(path: Path, folder: Path) -> None:
    """Delete a folder, or its unfinished part, unless a process is at work on it."""
    lock = _with_suffix(folder, _LOCK)
    with contextlib.suppress(BlockingIOError), locked(lock):
        shutil.rmtree(path, ignore_errors=True)
        lock.unlink(missing_ok=True)


def _with_suffix(folder: Path, suffix: str) -> Path:
    """A path beside a folder, by the folder's whole name."""
    return folder.with_name(folder.name + suffix)
