"""Atomic writes and the user's cache directory."""

import errno
import os
import secrets
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.errors import InputError
from autofit.core.files import (
    cache_file,
    check_output,
    check_readable,
    check_writable,
    checksum,
    digest,
    expanded,
    locked,
    read_cache,
    read_text,
    write_atomically,
    write_cache,
    write_cache_text,
)
from tests.processes import as_ordinary_user


def test_files_lie_where_the_user_wants_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file("rates", "a.json") == tmp_path / "autofit" / "rates" / "a.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # which the specification treats as unset
    assert cache_file("rates", "a.json") == Path.home() / ".cache" / "autofit" / "rates" / "a.json"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # of no user that the system knows
    assert cache_file("rates", "a.json") == Path("/nonexistent/autofit/rates/a.json")


def test_the_cache_holds_the_latest_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_cache_text(path, "one")
    write_cache_text(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_write_failures_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    write_cache_text(tmp_path / "file" / "below", "text")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


def test_only_what_was_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    assert read_cache(path, Any) is None
    write_cache(path, [1.5, {"a": None}])
    assert read_cache(path, Any) == [1.5, {"a": None}]
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_cache(path, Any) is None
    for text in ("", "[]", "3", "{}", '{"digest": 1, "data": 1}', "[" * 100_000, "\0"):
        path.write_text(text)
        assert read_cache(path, Any) is None
    path.unlink()
    os.mkfifo(path)
    write_cache(path, 1)
    assert read_cache(path, Any) is None


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (float, "1.5"),
        (float, [1.5]),
        (float, True),
        (Mapping[str, float], [1.5]),
        (Mapping[str, float], {"a": None}),
        (tuple[float, float], [1.5]),
        (Budget, {"device_bytes": "much"}),
        (Budget, {"unknown": 1}),
        (Budget, 3),
    ],
)
def test_a_right_digest_over_another_type_is_nothing(tmp_path: Path, kind: Any, data: Any) -> None:
    path = tmp_path / "file.json"
    write_cache(path, data)
    assert read_cache(path, kind) is None


def test_other_texts_have_other_names() -> None:
    assert digest("one") == digest("one") != digest("two")
    assert len(digest("one")) == 32


def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'") as caught:
        write_atomically(tmp_path / "x", "text")
    assert caught.value.filename == str(tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".", "", "/", "folder"])
def test_a_directory_is_no_file_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(Path(name), "text")


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, "größer\n")
    write_atomically(path, "kleiner\n")
    assert path.read_text(encoding="utf-8") == "kleiner\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_write_that_fails_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "x"
    write_atomically(path, "former")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, "a" * 10**6)
    assert caught.value.filename == str(path)
    assert path.read_text() == "former"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    texts = {letter * 200_000 for letter in "ab"}
    write_atomically(path, "a" * 200_000)
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for text in texts:
            write_atomically(path, text)
    done.set()
    reader.join()
    assert seen <= texts


def test_what_a_link_names_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/file")  # which need not be there yet
    for text in ("one", "two"):
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "far" / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()


def test_a_file_keeps_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("secret")
    path.chmod(0o600)
    write_atomically(path, "also secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("x" * 255), "text")
    with pytest.raises(OSError, match="File name too long"):
        write_atomically(tmp_path / ("x" * 256), "text")


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    write_atomically(path, "text")
    reader.join(10)
    assert read == ["text"]
    assert path.is_fifo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes, and may replace one")
def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "null"
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    try:
        path.write_text("")
    except PermissionError:
        pytest.skip("devices cannot be opened here")
    write_atomically(path, "text")
    assert path.is_char_device()


def test_the_standard_output_goes_where_the_shell_sends_it(tmp_path: Path) -> None:
    code = "from pathlib import Path; from autofit.core.files import write_atomically as w\n"
    code += "print('before', flush=True); w(Path('/dev/stdout'), 'text'); print(' after')"
    with (tmp_path / "out").open("a") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text().splitlines()[-1].endswith(" after")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock"), pytest.raises(BlockingIOError), locked(tmp_path / ".lock"):
        pass
    with locked(tmp_path / ".lock"):
        pass


def test_a_user_that_there_is_not_is_said() -> None:
    assert expanded("~/x") == Path.home() / "x"
    with pytest.raises(InputError, match=r"begins with ~nobody-of-that-name.*Write \./~nobody"):
        expanded("~nobody-of-that-name/x")


@pytest.mark.parametrize("path", [3, None, "", "a\0b", "\ud800", b"x"], ids=ascii)
def test_what_no_file_can_be_called(path: Any) -> None:
    with pytest.raises(InputError, match="output_dir cannot be "):
        expanded(path, "output_dir")


def test_what_can_be_read_is_a_file_or_a_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    check_readable(Path(__file__), "the file")
    check_readable(tmp_path, "the directory")
    for path, reason in {
        tmp_path / "none": "is not there",
        tmp_path / "fifo": "cannot be read: it is no regular file",
        Path("/dev/zero"): "cannot be read: it is no regular file",
        Path(__file__) / "x": "cannot be read: Not a directory",
        tmp_path / ("n" * 300): "cannot be read: File name too long",
    }.items():
        with pytest.raises(InputError, match=f"the data .* {reason}"):
            check_readable(path, "the data")


def test_what_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    check_writable(file, folder=False, remedy="")
    check_writable(tmp_path / "new" / "run", folder=True, remedy="")
    check_writable(Path("/dev/null"), folder=False, remedy="")
    (tmp_path / "link").symlink_to("new/file")
    check_writable(tmp_path / "link", folder=False, remedy="")
    (tmp_path / "loop").symlink_to("loop")
    for path, folder, reason in (
        (file, True, "file is a file, not a directory. Choose"),
        (file / "x", False, "file is a file, not a directory. Choose"),
        (tmp_path, False, "cannot be written: Is a directory. Choose"),
        (tmp_path / "loop", False, "cannot be written: Too many levels of symbolic links. Choose"),
    ):
        with pytest.raises(InputError, match=reason):
            check_writable(path, folder=folder, remedy="Choose another.")
    for directory, resume, reason in (
        (None, True, "must be named"),
        (tmp_path / "none", True, "no run to resume"),
    ):
        with pytest.raises(InputError, match=reason):
            check_output(directory, resume)
    check_output(None, resume=False)
    check_output(tmp_path / "zoë", resume=False)
    with pytest.raises(InputError, match="is no name in UTF-8"):
        check_output(tmp_path / os.fsdecode(b"\xff"), resume=False)


def test_what_utf_8_cannot_hold_is_written_as_an_escape(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file.py", "name = 'zoë \udcff'\n")
    assert (tmp_path / "file.py").read_text(encoding="utf-8") == "name = 'zoë \\udcff'\n"


def test_permissions() -> None:
    def test(folder: Path) -> None:
        file = folder / "file"
        file.touch(0)
        with pytest.raises(
            InputError, match=r"the data .*file cannot be read: Permission denied\."
        ):
            check_readable(file, "the data")
        with pytest.raises(InputError, match=r"file cannot be written: Permission denied\."):
            check_writable(file, folder=False, remedy="")
        with pytest.raises(InputError, match=r"/x/y cannot be written: Permission denied\."):
            check_writable(Path("/x/y"), folder=True, remedy="")
        write_atomically(Path("/dev/null"), "text")
        assert Path("/dev/null").is_char_device()

    as_ordinary_user(test)


def test_a_checksum_sees_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(20 * 2**20))
    before = checksum(path)
    assert before == checksum(path)
    with path.open("r+b") as file:
        file.seek(17 * 2**20)
        file.write(b"\x01")
    assert checksum(path) != before


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self/environ", "/proc/cpuinfo"])
def test_what_the_kernel_makes_up_is_no_file_to_read(tmp_path: Path, path: str) -> None:
    """Of /proc/kmsg there is never an end."""
    (tmp_path / "data.jsonl").symlink_to(path)
    for each in (Path(path), tmp_path / "data.jsonl"):
        with pytest.raises(OSError, match="it is no regular file"):
            read_text(each)
        with pytest.raises(InputError, match="cannot be read: it is no regular file"):
            check_readable(each, "the data file")


def test_a_name_that_others_made_a_link_is_never_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else may write to a directory guesses the name of the file that is written first, or sees it."""
    (tmp_path / "victim").write_text("precious")
    monkeypatch.setattr(secrets, "token_hex", lambda count: "guessed")
    for target in ("victim", "dangling"):
        (tmp_path / ".guessed.part").symlink_to(tmp_path / target)
        with pytest.raises(FileExistsError):
            write_atomically(tmp_path / "result.yaml", "mine")
        (tmp_path / ".guessed.part").unlink()
    assert (tmp_path / "victim").read_text() == "precious"
    assert {each.name for each in tmp_path.iterdir()} == {"victim"}


def test_names_of_files_that_are_written_first_differ_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        names.append(self.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
    for _ in range(3):
        write_atomically(tmp_path / "x", "text")
    assert len(set(names)) == 3


def test_a_new_file_is_for_whom_the_user_s_files_usually_are(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    other.touch()
    write_atomically(path, "text")
    assert path.stat().st_mode == other.stat().st_mode


def test_no_lock_is_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / ".lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["model", "checkpoints", "tensorboard"])
def test_a_file_where_a_training_will_make_a_folder_is_told_before_it(
    tmp_path: Path, name: str
) -> None:
    check_output(tmp_path, resume=False)
    (tmp_path / name).touch()
    with pytest.raises(
        InputError, match=rf"{name} is a file, not a directory\. Choose an output directory"
    ):
        check_output(tmp_path, resume=False)
