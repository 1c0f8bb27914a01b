"""Files that readers never find half-written, and the user's cache directory."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
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
    """Write a file so that readers see all of it or the former one, also after a crash; an OSError names the file.

    What a symlink names is written, and the link stays. A FIFO or a device is written to, never replaced.
    """
    with naming(path):
        if path.is_dir():  # also ".", beside which nothing could be written
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if (path.exists() and not path.is_file()) or str(path.absolute()).startswith(("/dev/", "/proc/")):
            path.write_text(text, encoding="utf-8")  # /dev/stdout may name a regular file, which the shell holds open
            return
        path = Path(os.path.realpath(path))
        partial = path.with_name(f".{os.getpid()}-{path.name[:100]}.part")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # there only after an error


def read_text(path: Path, *, encoding: str = "utf-8", most: int = 2**34) -> str:
    """The text of a regular file of at most so many bytes; an OSError also for a FIFO, which would block, and for a
    device, which may never end."""
    with naming(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return path.read_text(encoding=encoding)


def expanded(path: str | Path) -> Path:
    """A path with ~ replaced; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, made where there is none; the system drops it however this process dies.

    Raises BlockingIOError where another process holds it, OSError where the file cannot be made.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


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
