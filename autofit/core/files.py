"""Files that readers never find half-written, and the user's cache directory."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from autofit.core.errors import InputError, shown
from autofit.core.plain import UNREADABLE, from_plain

_CHUNK = 2**23  # bytes
_MADE_UP = ("/proc/", "/sys/")  # the kernel makes these files up as they are read, of any size
# The output directory of a training, and the folders that it makes there.
_OF_OUTPUT = ("", "checkpoints", "model", "tensorboard")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in every OSError raised inside; those of a full disk name no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        del error.filename2  # of what is replaced; None would be shown
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see all of it or the former one, also after a crash.

    An OSError names the file. What a symlink names is written, and the link stays. A FIFO or a
    device is written to, never replaced.
    """
    if isinstance(content, str):  # which may hold names of files, and those what UTF-8 cannot
        content = content.encode(errors="backslashreplace")

    with naming(path):
        if path.is_dir():  # also ".", beside which nothing could be written
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

        # /dev/stdout may name a regular file, which the shell holds open.
        is_device = str(path.absolute()).startswith(("/dev/", "/proc/"))
        if is_device or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return

        path = Path(os.path.realpath(path))
        partial = path.with_name(f".{secrets.token_hex(16)}.part")
        descriptor = _not_through_links(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            try:
                if path.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


def _not_through_links(path: Path, flags: int) -> int:
    """Open a file by a name that others of a shared directory may have made a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_regular(path: Path, most: int = 2**63) -> Path:
    """The path, if it is a directory or a regular file of at most `most` bytes.

    Raises an OSError for a FIFO, which would block, for a device or a file of the kernel's, which
    may never end, and for more bytes.
    """
    with naming(path):
        status = path.stat()
        is_stored = stat.S_ISREG(status.st_mode) and not os.path.realpath(path).startswith(_MADE_UP)
        if not is_stored and not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")

        if status.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return path


def read_text(
    path: Path, *, encoding: str = "utf-8", most: int = 2**34, newline: str | None = None
) -> str:
    """The text of a regular file of at most so many bytes; an OSError names the file.

    Args:
        newline: as of `open`; "" keeps the ends of lines as they are written.
    """
    with naming(path), check_regular(path, most).open(encoding=encoding, newline=newline) as file:
        return file.read()


def checksum(path: Path) -> int:
    """The CRC-32 of a regular file: about half a second for each GiB."""
    crc = 0
    with check_regular(path).open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def check_readable(path: Path, what: str) -> None:
    """Raise an InputError, which calls it `what`, where a file or a directory cannot be read."""
    try:
        check_regular(path)
        if not os.access(path, os.R_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError as error:
        raise InputError(f"{what} {path} is not there.", "Check the path.") from error
    except OSError as error:
        message = f"{what} {path} cannot be read: {error.strerror}."
        raise InputError(message, "Check the path.") from error


def check_writable(path: Path, *, folder: bool, remedy: str) -> None:
    """Raise an InputError where a file, or a folder for files, surely cannot be made or written."""
    path = path.absolute()
    if not folder and not path.exists():  # what a link names need not be there yet
        path = Path(os.path.realpath(path))

    there = path  # or its nearest parent that is there
    while not os.path.lexists(there):
        there = there.parent
    is_folder = there.is_dir()
    is_file_wanted = there == path and not folder
    if not is_folder and not is_file_wanted:
        raise InputError(f"{there} is a file, not a directory.", remedy)

    reason = errno.EACCES
    if is_folder and is_file_wanted:
        reason = errno.EISDIR
    elif there.is_symlink() and not there.exists():
        reason = errno.ELOOP
    if reason == errno.EISDIR or not os.access(there, os.W_OK):
        raise InputError(f"{path} cannot be written: {os.strerror(reason)}.", remedy)


def check_output(directory: Path | None, resume: bool) -> None:
    """Raise an InputError where no training can write to a directory, or none be resumed there."""
    if directory is None:
        if resume:
            raise InputError("to resume, the directory must be named.", "Give output_dir.")
        return

    remedy = "Choose an output directory that can be written to."
    for name in _OF_OUTPUT:
        check_writable(directory / name, folder=True, remedy=remedy)

    name = str(directory)
    if name != name.encode(errors="replace").decode():  # safetensors and tokenizers open no other
        raise InputError(f"{shown(name)} is no name in UTF-8.", remedy)
    if resume and not directory.exists():
        message = f"there is no run to resume in {directory}."
        raise InputError(message, "Leave out resume, or check the directory.")


def expanded(path: str | Path, what: str = "a path") -> Path:
    """A user's path with ~ replaced; as it is for a user without a home.

    Raises an InputError for what can name no file, and for a ~ before a name that no user has.
    """
    try:
        possible = isinstance(path, str | Path) and path != "" and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        possible = False
    if not possible:
        raise InputError(f"{what} cannot be {shown(path)}.", "Give a path that a file can have.")

    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        if user == "~":
            return Path(path)
        remedy = f"Write ./{user} for a file of this name."
        raise InputError(
            f"{what} begins with {user}, and there is no such user.", remedy
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Hold the lock on a file, made where there is none.

    The system drops it however this process dies. Raises BlockingIOError where another process
    holds it, OSError where the file cannot be made.
    """
    if path.exists():
        check_regular(path)

    descriptor = _not_through_links(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def cache_file(kind: str, name: str) -> Path:
    """The path of a file in the user's cache, by the XDG base directory specification."""
    home = expanded("~/.cache")
    if not home.is_absolute():  # a user without a home, as in a container: nothing can be cached
        home = Path("/nonexistent")

    cache = Path(os.environ.get("XDG_CACHE_HOME") or home)
    return cache / "autofit" / kind / name


def cached_names(kind: str) -> list[str]:
    """The names of the files of a kind in the user's cache; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in cache_file(kind, "").iterdir())
    return []


def write_cache_text(path: Path, text: str) -> None:
    """Write a file of the cache; it holds only recomputable data, so write failures are ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            check_regular(path)
        write_atomically(path, text)


def write_cache(path: Path, data: Any) -> None:
    """Write plain data to a file of the cache, with its digest."""
    write_cache_text(path, json.dumps({"digest": digest(json.dumps(data)), "data": data}))


def read_cache(path: Path, kind: Any) -> Any:
    """The value of type `kind` that `write_cache` was given as plain data; None where there is
    none, or other than that, whatever its digest says."""
    try:
        written = json.loads(read_text(path))
        data = written["data"]
        if written["digest"] == digest(json.dumps(data)):
            return from_plain(kind, data)
    except (OSError, *UNREADABLE):
        pass
    return None


def digest(text: str) -> str:
    """A short name for a file, the same for the same text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
