"""What was made of data is made once, is whole or made anew, and never takes more room than there is for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from autofit.core.errors import InputError
from autofit.core.files import cache_file, locked
from autofit.data import data_cache
from autofit.data.cached_map import cached_map
from autofit.data.data_cache import cached_folder, content_digest


def writing(text: str) -> "Build":
    return Build(text)


class Build:
    """Writes a text, and counts how often it is asked to."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / "a").write_text(self.text)


def test_what_is_there_is_not_made_again() -> None:
    build = writing("text")
    for _ in range(2):
        folder = cached_folder("name", build)
        assert (folder / "a").read_text() == "text"
    assert build.times == 1
    assert folder.is_relative_to(cache_file("data", ""))


@pytest.mark.parametrize("name", ["a", "sums.json"])
def test_what_was_damaged_is_made_again(name: str) -> None:
    build = writing("text")
    folder = cached_folder("name", build)
    file = folder / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)
    assert (cached_folder("name", build) / "a").read_text() == "text"
    assert build.times == 2


def test_what_fails_leaves_nothing() -> None:
    def failing(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise InputError("wrong.")

    with pytest.raises(InputError, match="wrong"):
        cached_folder("name", failing)
    assert [path.name for path in cache_file("data", "").iterdir()] == ["name.lock"]


def test_no_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    told = r"what is made of the data cannot be written to .*No space left.* set XDG_CACHE_HOME"
    with pytest.raises(InputError, match=told):
        cached_folder("name", full)


def test_without_a_cache_it_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cached_folder("name", writing("text"))
    assert (folder / "a").read_text() == "text"
    assert not folder.is_relative_to(tmp_path)


def test_the_oldest_go_when_all_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("one", "two", "three")):
        folder = cached_folder(name, writing("x" * 1000))
        os.utime(folder / "sums.json", (number, number))
    killed = cache_file("data", "dead.part")
    killed.mkdir()
    (killed / "a").write_text("half")
    at_work = cache_file("data", "alive.part")
    at_work.mkdir()
    monkeypatch.setattr(data_cache, "MOST_BYTES", 1500)
    with locked(cache_file("data", "alive.lock")):
        cached_folder("four", writing("x" * 1000))
    left = {path.name for path in cache_file("data", "").iterdir() if path.is_dir()}
    assert left == {"three", "four", "alive.part"}


def test_another_process_waits_for_the_one_that_makes_it(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from autofit.data.data_cache import cached_folder
def build(folder):
    with open({str(tmp_path / "made")!r}, "a") as file:
        file.write("x")
    time.sleep(1)
    (folder / "a").write_text("text")
print((cached_folder("name", build) / "a").read_text())
"""
    command = [sys.executable, "-c", script]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["text\n"] * 2
    assert (tmp_path / "made").read_text() == "x"


def test_the_content_of_files_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("one")
    first = content_digest(tmp_path), content_digest(tmp_path / "a.txt")
    time.sleep(0.01)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("two")
    assert (content_digest(tmp_path), content_digest(tmp_path / "a.txt")) == first
    (tmp_path / "b.txt").write_text("")
    assert content_digest(tmp_path) != first[0]
    (tmp_path / "a.txt").write_text("two")
    assert content_digest(tmp_path / "a.txt") != first[1]


@pytest.mark.parametrize("shown", [True, False])
def test_a_map_is_shown_when_asked_and_made_once(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def double(rows: dict[str, list[int]]) -> dict[str, list[int]]:
        return {"double": [2 * number for number in rows["number"]]}

    for _ in range(2):
        found = cached_map(
            {"number": [1, 2]},
            double,
            features={"double": datasets.Value("int64")},
            key=shown,
            progress="Doubling" if shown else None,
        )
        assert list(found["double"]) == [2, 4]
    assert capsys.readouterr().err.count("Doubling: 100%") == int(shown)
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize(
    "end", ["sys.exit()", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)"]
)
def test_without_a_cache_what_is_made_goes_with_its_process(end: str, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from autofit.data.data_cache import cached_folder\n"
        "folder = cached_folder('name', lambda part: (part / 'a').touch())\n"
        "print(folder / 'a', (folder / 'a').exists(), flush=True)\n"
        f"{end}\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": "/dev/null/cache", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    assert told.stdout.startswith(f"{tmp_path}/autofit-data-")
    assert told.stdout.endswith("a True\n")
    limit = time.monotonic() + 10
    while any(tmp_path.iterdir()):
        assert time.monotonic() < limit
        time.sleep(0.02)
