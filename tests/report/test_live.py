"""Progress: lines that change in place on terminals, plain lines elsewhere, nothing when quiet."""

import dataclasses
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from fcntl import ioctl
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autofit.core.events import (
    Event,
    Note,
    PhaseProgressed,
    PhaseStarted,
    ProbeFinished,
    ProbeStarted,
    SearchStarted,
)
from autofit.core.notebook import Cell
from autofit.report.live import LiveDisplay
from tests.report.conftest import BUDGET, HARDWARE, measurement
from tests.report.screen import Screen

COLOURS = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7]|38;)[0-9;]*m")
# A search as a user's terminal sees one, with what libraries print in between.
SCRIPT = """
import sys
from rich.console import Console
from tests.report.test_live import search
search(Console(stderr=True), sys.argv)
print("the answer")
"""
ROOT = Path(__file__).resolve().parents[2]


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal or CI has set around the tests has no part in them."""
    for name in (
        "CI",
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "COLUMNS",
        "LINES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def played(events: list[Event], *, terminal: bool, width: int = 80, quiet: bool = False) -> str:
    file = _Terminal() if terminal else StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=24, color_system=None)
    with LiveDisplay(console, quiet=quiet) as listener:
        for event in events:
            listener(event)
    return file.getvalue()


def search(console: Console, arguments: Sequence[str] = ()) -> None:
    """Show nine probes and a verification, with what libraries print in between."""
    with LiveDisplay(console, quiet="quiet" in arguments) as listener:
        listener(PhaseStarted("predicting 23 configs"))
        listener(SearchStarted("tiny-\u6a21\u578b", HARDWARE, BUDGET, 23, 9, None))
        listener(Note("a note about [this]"))
        best = None
        for number in range(9):
            rate = (0, 50, 100)[number % 3]
            one = measurement(
                rate, 1.5 if rate else 2.4, precision=f"bf{number}", others={"number": number}
            )
            best = one if rate == 100 else best
            listener(ProbeStarted(number, one.config, expected_bytes=2**30))
            sys.stderr.write(f"library {number}\n")
            listener(ProbeFinished(one, best))
        listener(ProbeStarted(8, one.config, verifying=True))
        if "interrupted" in arguments:
            raise KeyboardInterrupt
        listener(ProbeFinished(one, None))
        listener(PhaseStarted("writing the report"))


def on_a_terminal(columns: int = 80, rows: int = 24) -> str:
    """All that such a search writes to a terminal of that size."""
    console = Console(file=_Terminal(), force_terminal=True, width=columns, height=rows)
    search(console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def in_a_terminal(*arguments: str) -> str:
    """All that the script writes to a real terminal, as one gives it to a program."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(its)
    written = b""
    with os.fdopen(ours, "rb", buffering=0) as reading:
        while True:
            try:
                read = reading.read(65536)
            except OSError:  # the other side is closed
                break
            if not read:
                break
            written += read
    process.wait()
    return written.decode().replace("\r\n", "\n")


def test_before_the_search_has_started_there_is_something_to_see() -> None:
    assert "loading PyTorch" in played([], terminal=True)


def test_what_is_refused_beforehand_is_told_apart_and_one_is_one(events: list[Event]) -> None:
    (started,) = (each for each in events if isinstance(each, SearchStarted))
    told = played(
        [dataclasses.replace(started, space_size=28800, refused=14112, trials=1)], terminal=False
    )
    assert told.endswith(": 28,800 configs, 14,112 of them refused beforehand; at most 1 probe\n")


def test_without_a_terminal_every_phase_of_the_search_and_every_probe_is_one_line(
    events: list[Event],
) -> None:
    config = "micro-batch 8x1, adamw, sdpa attention"
    assert played(events, terminal=False).splitlines() == [
        "tiny-llama on a test's CPU within 2.00 GiB: 23 configs; at most 4 probes",
        "a note about [this]",
        "predicting 23 configs",
        f"probe 1 of 4: fits, 3,200 tokens/s, 1.90 of 2.00 GiB (best so far) - fp32, {config}",
        f"probe 2 of 4: out of memory: needs 2.40 GiB of 2.00 - bf16, {config}",
        f"probe 3 of 4: fits, 6,400 tokens/s, 1.50 of 2.00 GiB (best so far) - bf16-mixed, {config}",
        f"verifying probe 3: fits, 6,400 tokens/s, 1.50 of 2.00 GiB - bf16-mixed, {config}",
        "writing the result",
    ]


PROGRESS = [
    PhaseProgressed(0.0, None),
    PhaseProgressed(0.04, 60.0),
    PhaseProgressed(0.08, 50.0, {"precision": "bf16"}, 2.0, 4096.0),
    PhaseProgressed(0.12, 45.0, {"precision": "bf16"}, 2.0, 4096.0),
    PhaseProgressed(0.5, 20.0, {"precision": "fp8"}, 3.0, 6144.0),
]


def test_in_a_log_progress_is_a_line_now_and_then_and_the_first_answer_at_once(
    events: list[Event],
) -> None:
    now = [0.0]
    console = Console(file=StringIO(), width=300, color_system=None)
    with LiveDisplay(console, seconds=lambda: now[0]) as listener:
        for event in [events[1], PhaseStarted("predicting the best of 9 configs"), *PROGRESS]:
            listener(event)
            now[0] += 5
    assert console.file.getvalue().splitlines()[1:] == [  # type: ignore[attr-defined]
        "predicting the best of 9 configs",
        "less than 1 % done",
        "8 % done, about 50 s left; the best so far is predicted to train 4,096 tokens/s: bf16",
        "50 % done, about 20 s left; the best so far is predicted to train 6,144 tokens/s: fp8",
    ]


def test_on_a_terminal_progress_stands_below_its_phase(events: list[Event]) -> None:
    shown = played([events[1], PhaseStarted("predicting"), *PROGRESS[:2]], terminal=True, width=120)
    assert "4 % done, about 60 s left" in shown
    gone = played([events[1], *PROGRESS[:2], PhaseStarted("writing")], terminal=True, width=120)
    assert "% done" not in gone.rpartition("writing")[2]


def test_a_line_is_not_broken_at_the_width_of_a_log(events: list[Event]) -> None:
    assert played(events, terminal=False, width=20) == played(events, terminal=False)


def test_nothing_moves_a_cursor_or_colours_in_a_log(events: list[Event]) -> None:
    codes = Note("\x1b[31mred\x1b[0m and \x07\x1b[2J\r back")
    lines = played([*events, codes], terminal=False).splitlines()
    assert lines[-1] == "red and back"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    "environment",
    [{"CI": "true"}, {"TERM": "dumb"}, {"TERM": "unknown"}],
    ids=lambda each: "=".join(*each.items()),
)
def test_where_lines_cannot_change_or_nobody_watches_they_stay_plain(
    events: list[Event], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert played(events, terminal=True) == played(events, terminal=False)


def test_a_pipe_that_is_to_have_colours_is_no_terminal(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=StringIO(), width=80)
    assert console.is_terminal
    with LiveDisplay(console) as listener:
        for event in events:
            listener(event)
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(events: list[Event], terminal: bool) -> None:
    assert played(events, terminal=terminal, quiet=True) == ""


LEFT = ["a note about [this]", *(f"library {number}" for number in range(9))]


@pytest.mark.parametrize("columns", [20, 50, 80, 120])
def test_on_a_terminal_all_is_gone_at_the_end_but_what_was_printed(columns: int) -> None:
    screen = Screen(columns)
    screen.write(on_a_terminal(columns))
    assert screen.text.splitlines() == LEFT


@pytest.mark.parametrize("rows", [1, 2, 4, 12, 24])
def test_on_a_terminal_no_more_rows_are_taken_than_it_has(rows: int) -> None:
    written = on_a_terminal(rows=rows)
    lines = [
        max((part.count("\x1b[1A") for part in re.split(r"[^\x1b\[\dAK\r]", written)), default=0)
    ]
    assert max(lines) < rows or rows == 1, "the cursor would stop at the first row"


def test_a_real_terminal_is_never_cleared_and_its_cursor_stays() -> None:
    written = in_a_terminal()
    screen = Screen(80)
    screen.write(written)
    assert screen.text.splitlines() == [*LEFT, "the answer"]
    assert not re.search(r"\x1b\[[0-9]*J|\x1b\[H|\x1b\[\?1049h", written)
    # a killed search leaves it
    assert written.index("\x1b[?25h") - written.index("\x1b[?25l") == len("\x1b[?25l")
    assert COLOURS.search(written)


def test_no_colours_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not COLOURS.search(on_a_terminal())


def test_an_interrupt_leaves_the_terminal_as_it_was() -> None:
    screen = Screen(80)
    screen.write(in_a_terminal("interrupted"))
    assert "KeyboardInterrupt" in screen.text
    assert "measuring" not in screen.text


def test_quiet_on_a_terminal() -> None:
    assert in_a_terminal("quiet").splitlines() == [*LEFT[1:], "the answer"]


class _Watched:
    """A display on a screen."""

    def __init__(self) -> None:
        self.screen, self.now = Screen(60), 0.0
        self.console = Console(
            file=_Terminal(), force_terminal=True, width=60, height=20, color_system=None
        )
        self.display = LiveDisplay(self.console, seconds=lambda: self.now)
        self._read = 0

    def tick(self) -> list[str]:
        """A second passes; what the screen shows then."""
        self.now += 1
        self.display._refresh()
        return self.shown()

    def shown(self) -> list[str]:
        text: str = self.console.file.getvalue()[self._read :]  # type: ignore[attr-defined]
        self._read += len(text)
        self.screen.write(text)
        return self.screen.text.splitlines()


@pytest.fixture
def watched() -> _Watched:
    return _Watched()


def test_time_passes_without_events(watched: _Watched) -> None:
    with watched.display:
        assert watched.shown() == ["now       loading PyTorch, 0:00"]
        assert watched.tick() == ["now       loading PyTorch, 0:01"]
    assert watched.shown() == []


def test_what_others_print_comes_above_and_output_goes_where_it_went_before(
    watched: _Watched,
) -> None:
    before = sys.stdout, sys.stderr
    with watched.display:
        watched.console.print("a note")
        sys.stderr.write("a warning\n")
        # under pytest no terminal: nothing of it can disturb the lines
        assert sys.stdout is before[0]
        assert watched.tick() == ["a note", "a warning", "now       loading PyTorch, 0:01"]
    assert watched.shown() == ["a note", "a warning"]
    assert (sys.stdout, sys.stderr) == before


def test_a_notebook_has_the_lines_as_html_and_the_last_stay(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(Cell, "show", lambda self, text, html: shown.append((text, html)))
    with LiveDisplay(Cell(), seconds=lambda: 0.0) as display:
        for event in events:
            display(event)
    during, after = shown[-2][0], shown[-1][0]
    assert "writing the result" in during
    assert "writing the result" not in after
    assert "tiny-llama on a test's CPU within 2.00 GiB" in after
    assert "6,400 tokens/s (probe 3)" in after
    assert shown[-1][1].startswith("<pre")
    assert (
        '<span style="font-weight: bold">tiny-llama on a test&#x27;s CPU within 2.00 GiB</span>'
        in shown[-1][1]
    )
    assert not any("a note about" in text or "\x1b" in text + html for text, html in shown)
