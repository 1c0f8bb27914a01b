"""Lines that change in place: only what changed is written, and nothing is left behind."""

import sys
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from autofit.report.region import Region
from tests.report.screen import Screen


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class _Watched:
    """A region on a screen, and what was written to it since it was last asked."""

    def __init__(self, columns: int = 30) -> None:
        self.screen = Screen(columns)
        self.console = Console(file=_Terminal(), force_terminal=True, width=columns, height=20, color_system=None)
        self.region = Region(self.console)
        self._read = 0

    def draw(self, *lines: str) -> str:
        self.region.draw([Text(line) for line in lines])
        return self.written()

    def written(self) -> str:
        text: str = self.console.file.getvalue()[self._read :]  # type: ignore[attr-defined]
        self._read += len(text)
        self.screen.write(text)
        return text


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> _Watched:
    monkeypatch.setenv("TERM", "xterm")
    return _Watched()


def test_lines_come_change_grow_fewer_and_go(watched: _Watched) -> None:
    watched.region.start()
    for lines in (["one", "two"], ["one", "2"], ["0", "one", "two", "three"], ["a", "", "c"], ["x"], []):
        watched.draw(*lines)
        assert watched.screen.text == "\n".join(lines)
    watched.draw("last", "words")
    watched.region.stop()
    watched.written()
    assert watched.screen.text == ""


def test_only_what_changed_is_written(watched: _Watched) -> None:
    watched.region.start()
    watched.draw("the first line", "1 s", "the last line")
    written = watched.draw("the first line", "2 s", "the last line")
    assert "2 s" in written
    assert "line" not in written
    assert watched.draw("the first line", "2 s", "the last line") == ""
    watched.region.stop()


def test_what_others_print_comes_above(watched: _Watched) -> None:
    watched.region.start()
    watched.draw("working", "3 s")
    watched.console.print("a note")
    sys.stderr.write("a warning\n")
    watched.written()
    assert watched.screen.text == "a note\na warning\nworking\n3 s"
    watched.draw("working", "4 s")
    watched.region.stop()
    watched.written()
    assert watched.screen.text == "a note\na warning"


def test_a_narrower_terminal_leaves_no_rest(watched: _Watched) -> None:
    watched.region.start()
    watched.draw("a note", "x" * 25)
    watched.screen.narrow(20)
    watched.console.width = 20
    watched.draw("a note", "y")
    assert watched.screen.text == "a note\ny"
    watched.region.stop()


def test_what_a_terminal_shows_of_a_key_is_gone_with_the_lines(watched: _Watched) -> None:
    watched.region.start()
    watched.draw("working", "3 s")
    watched.screen.write("^C")
    watched.draw("working", "3 s", "x")
    assert watched.screen.text == "working\n3 s\nx"
    watched.screen.write("^C")
    watched.region.stop()
    watched.written()
    assert watched.screen.text == ""


def test_output_goes_where_it_went_before(watched: _Watched) -> None:
    before = sys.stdout, sys.stderr
    watched.region.start()
    assert sys.stderr is not before[1]
    assert sys.stdout is before[0]  # under pytest no terminal: nothing of it can disturb the lines
    watched.region.stop()
    assert (sys.stdout, sys.stderr) == before
