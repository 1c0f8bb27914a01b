"""A directory is whole or not there, whatever happens while it is written."""

import errno
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autofit.core.errors import InputError
from autofit.training import atomic_writes


def write(path: Path, text: str, needed_bytes: int = 0) -> None:
    with atomic_writes.atomic_directory(path, what="the thing", needed_bytes=needed_bytes) as aside:
        (aside / "one").write_text(text)
        torch.save({"text": text, "numbers": torch.zeros(1000)}, aside / "two.pt")
        safetensors.torch.save_file({"numbers": torch.zeros(1000)}, aside / "three.safetensors")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "thing"
    with atomic_writes.atomic_directory(path, what="the thing", needed_bytes=0) as aside:
        (aside / "file").write_text("a")
        assert list(atomic_writes.complete_entries(path.parent)) == []
    assert (path / "file").read_text() == "a"
    assert names(path.parent) == ["thing"]


def test_every_file_and_both_directories_are_on_the_disk_before_and_after_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path / "thing", "a")
    assert sorted(done[:3]) == ["one", "three.safetensors", "two.pt"]
    assert done[3:] == [".thing.part", "to thing", tmp_path.name]


NEEDED = 10**7


class Failing:
    """A disk that is full, or broken, from some write or sync on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, turn: int) -> None:
        self.left = turn
        error = OSError(number, os.strerror(number))

        def failing(function: Any) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                self.left -= 1
                if self.left < 0:
                    raise error
                return function(*args, **kwargs)

            return called

        monkeypatch.setattr(os, "fsync", failing(os.fsync))
        monkeypatch.setattr(Path, "write_text", failing(Path.write_text))
        monkeypatch.setattr(torch, "save", failing(torch.save))


@pytest.mark.parametrize("turn", random.Random(0).sample(range(6), 4))
def test_a_disk_that_becomes_full_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    write(tmp_path / "former", "a")
    with monkeypatch.context() as patched:
        Failing(patched, errno.ENOSPC, turn)
        with pytest.raises(
            InputError,
            match=r"there is no room for the thing in .*: it needs 0\.00931 GiB, and .* is free",
        ):
            write(tmp_path / "thing", "b", needed_bytes=NEEDED)
    assert names(tmp_path) == ["former"]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_what_else_goes_wrong_with_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    with monkeypatch.context() as patched:
        Failing(patched, errno.EIO, turn)
        with pytest.raises(
            InputError,
            match=r"the thing cannot be written to .*/thing: Input/output error\. Choose",
        ):
            write(tmp_path / "thing", "b")
    assert names(tmp_path) == []


SCRIPT = """
import sys
from pathlib import Path
import safetensors.torch, torch
from autofit.core.errors import InputError
from autofit.training import atomic_writes

numbers = torch.ones(2**21)
for folder, how in zip(map(Path, sys.argv[1:]), ("torch", "torch", "safetensors"), strict=True):
    try:
        with atomic_writes.atomic_directory(folder / "thing", what="the thing", needed_bytes=2**23) as aside:
            print("began")
            (folder / "others").write_bytes(bytes(6 * 2**20))
            if how == "safetensors":
                safetensors.torch.save_file({"a": numbers}, aside / "a.safetensors")
            else:
                with (aside / "a.pt").open("wb") as file:
                    torch.save(numbers, file)
    except InputError as error:
        print(error.message)
    print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    """For 8 MiB: found out before anything is written, or when somebody else has taken 6 MiB meanwhile."""
    (tmp_path / "script.py").write_text(SCRIPT)
    disks = [tmp_path / name for name in ("small", "shared", "also-shared")]
    mounts = []
    for disk, size in zip(disks, (4, 12, 12), strict=True):
        disk.mkdir()
        mounts.append(
            shlex.join(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(disk)])
        )
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own, mounts[0]], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount a disk of their own")
    run = shlex.join([sys.executable, str(tmp_path / "script.py"), *map(str, disks)])
    done = subprocess.run(
        [*own, " && ".join([*mounts, f"exec {run}"])],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    words = [
        f"there is no room for the thing in {disk}: it needs 0.00781 GiB, and " for disk in disks
    ]
    assert done.stdout.splitlines() == [
        *(f"{words[0]}0.00391 GiB is free.", "[]"),
        *("began", f"{words[1]}0.00586 GiB is free.", "['others']"),
        *("began", f"{words[2]}0.00586 GiB is free.", "['others']"),
    ]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError,
        match=r"the thing cannot be written to .*/file/thing: (Not a directory|File exists)",
    ):
        write(tmp_path / "file" / "thing", "a")
    with pytest.raises(
        InputError, match=r"cannot be written to /sys/kernel/thing: .*\. Choose an output directory"
    ):
        write(Path("/sys/kernel/thing"), "a")  # which not even root may


def test_an_error_of_another_kind_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    for error in (KeyError("x"), RuntimeError("of the model"), KeyboardInterrupt()):
        with (
            pytest.raises(type(error)) as caught,
            atomic_writes.atomic_directory(
                tmp_path / "thing", what="the thing", needed_bytes=0
            ) as aside,
        ):
            (aside / "file").write_text("a")
            raise error
        assert caught.value is error
        assert names(tmp_path) == []


def test_what_was_there_is_replaced_at_once(tmp_path: Path) -> None:
    write(tmp_path / "thing", "a")
    (tmp_path / "thing" / "old").write_text("")
    write(tmp_path / "thing", "b")
    assert (tmp_path / "thing" / "one").read_text() == "b"
    assert names(tmp_path / "thing") == ["one", "three.safetensors", "two.pt"]
    assert names(tmp_path) == ["thing"]


def test_a_crash_between_the_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "thing", "a")
    rename = Path.rename

    class Killed(BaseException):
        pass

    def once(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "rename", once)
        write(tmp_path / "thing", "b")
    assert [
        (name, (path / "one").read_text())
        for name, path in atomic_writes.complete_entries(tmp_path)
    ] == [("thing", "a")]
    atomic_writes.clean_up(tmp_path)
    assert names(tmp_path) == ["thing"]


def test_leftovers_are_removed_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    for name in (".a.part", ".b.former", ".c.former", ".d.gone", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert sorted(name for name, _ in atomic_writes.complete_entries(tmp_path)) == ["b", "c"]
    atomic_writes.clean_up(tmp_path)
    assert names(tmp_path) == ["b", "c"]
    assert (tmp_path / "b" / "file").read_text() == "b"
    atomic_writes.remove(tmp_path / "b")
    assert names(tmp_path) == ["c"]


def test_into_a_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "mine").write_text("old")
    with (
        pytest.raises(ZeroDivisionError),
        atomic_writes.atomic_files(tmp_path, what="it", needed_bytes=0) as aside,
    ):
        (aside / "mine").write_text(str(1 / 0))
    assert (tmp_path / "mine").read_text() == "old"
    with atomic_writes.atomic_files(tmp_path, what="it", needed_bytes=0) as aside:
        (aside / "mine").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "theirs": "theirs",
        "mine": "new",
    }
