"""Files that readers never find half-written, and the user's cache directory."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in every OSError raised inside; those of a full disk name no file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or the former one, also after a crash; an OSError names the file."""
    with naming(path):
        if path.is_dir():  # also ".", beside which nothing could be written
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # there only after an error


def cache_file(kind: str, name: str) -> Path:
    """The path of a file in the user's cache, by the XDG base directory specification."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autofit" / kind / name


def write_cache(path: Path, text: str) -> None:
    """Write a file of the cache; it holds only recomputable data, so write failures are ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def digest(text: str) -> str:
    """A short name for a file, the same for the same text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
