"""Progress: lines that change in place on terminals, plain lines elsewhere, nothing when quiet."""

import dataclasses
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autofit.core.events import Event, Note, SearchStarted
from autofit.report import LiveDisplay
from tests.report.screen import Screen

COLOURS = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|9[0-7]|38;)[0-9;]*m")
# A search as a user's terminal sees one, with what libraries print in between.
SCRIPT = """
import sys, warnings
from rich.console import Console
from autofit.core.events import Note, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.report import LiveDisplay
from tests.report.conftest import BUDGET, HARDWARE, measurement
import dataclasses

with LiveDisplay(Console(stderr=True), quiet="quiet" in sys.argv) as tell:
    tell(PhaseStarted("predicting 23 configs"))
    tell(SearchStarted("tiny-\u6a21\u578b", HARDWARE, BUDGET, 23, 9, None))
    tell(Note("a note about [this]"))
    best = None
    for number in range(9):
        rate = (0, 50, 100)[number % 3]
        one = dataclasses.replace(measurement(rate, 2.4 if not rate else 1.5, precision=f"bf{number}"), number=number)
        best = one if rate == 100 else best
        tell(ProbeStarted(number, one.config, expected_bytes=2**30))
        print(f"library {number}", file=sys.stderr)
        tell(ProbeFinished(one, best))
    tell(ProbeStarted(8, one.config, verifying=True))
    if "interrupted" in sys.argv:
        raise KeyboardInterrupt
    tell(ProbeFinished(one, None))
    tell(PhaseStarted("writing the report"))
print("the answer")
"""
ROOT = Path(__file__).resolve().parents[2]


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal or CI has set around the tests has no part in them."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def played(events: list[Event], *, terminal: bool, width: int = 80, quiet: bool = False) -> str:
    file = _Terminal() if terminal else StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=24, color_system=None)
    with LiveDisplay(console, quiet=quiet) as listener:
        for event in events:
            listener(event)
    return file.getvalue()


def in_a_terminal(*arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> str:
    """All that the script writes to a terminal of that size; in front of it, as a terminal gives it to a program."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
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


def test_what_is_refused_beforehand_is_told_apart_and_one_is_one(events: list[Event]) -> None:
    (started,) = (each for each in events if isinstance(each, SearchStarted))
    told = played([dataclasses.replace(started, space_size=28800, refused=14112, trials=1)], terminal=False)
    assert told.endswith(": 28,800 configs, 14,112 of them refused beforehand; at most 1 probe\n")


def test_without_a_terminal_every_phase_of_the_search_and_every_probe_is_one_line(events: list[Event]) -> None:
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


def test_a_pipe_that_is_to_have_colours_is_no_terminal(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_on_a_terminal_all_is_gone_at_the_end_but_what_was_told(columns: int) -> None:
    screen = Screen(columns)
    screen.write(in_a_terminal(columns=columns))
    assert screen.text.splitlines() == [
        "a note about [this]",
        *(f"library {number}" for number in range(9)),
        "the answer",
    ]


def test_on_a_terminal_no_more_rows_are_taken_than_it_has() -> None:
    for rows in (4, 12, 24):
        written = in_a_terminal(rows=rows)
        moved = max(int(each) for each in re.findall(r"\x1b\[(\d+)A", written))
        assert moved < rows, "the cursor would stop at the first row"


def test_nothing_is_cleared_to_be_drawn_again() -> None:
    """Lines are erased before others print above them, and at the end; between events they are written over."""
    written = in_a_terminal()
    assert not re.search(r"\x1b\[[0-9]*J|\x1b\[H|\x1b\[\?1049h", written)
    assert (
        len(re.findall(r"tiny-\S+ on a test's CPU", written)) <= 1 + 10
    )  # once, and below each line that others print


def test_colours_are_few_and_none_where_nobody_wants_them() -> None:
    assert COLOURS.search(in_a_terminal())
    assert not COLOURS.search(in_a_terminal(NO_COLOR="1"))


def test_an_interrupt_leaves_the_terminal_as_it_was() -> None:
    screen = Screen(80)
    screen.write(in_a_terminal("interrupted"))
    assert "KeyboardInterrupt" in screen.text
    assert "measuring" not in screen.text
    assert "?25" not in "".join(screen.codes)  # the cursor was never hidden: a killed search leaves it, too


def test_quiet_on_a_terminal() -> None:
    assert in_a_terminal("quiet").splitlines() == [*(f"library {number}" for number in range(9)), "the answer"]


def test_before_the_search_has_started_there_is_something_to_see() -> None:
    assert "loading PyTorch" in played([], terminal=True)


def test_time_passes_without_events(events: list[Event]) -> None:
    file, clock = _Terminal(), [0.0]
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    with LiveDisplay(console, seconds=lambda: clock[0]) as display:
        display(events[0])
        clock[0] = 7.0
        display._draw(display._region)  # type: ignore[arg-type]
    assert "looking at the model, 0:00" in file.getvalue()
    assert "looking at the model, 0:07" in file.getvalue()
