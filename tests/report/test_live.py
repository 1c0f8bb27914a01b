"""Progress: a panel on terminals, lines elsewhere, nothing when quiet."""

import dataclasses
import re
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from autofit.core.events import Event, Note, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report import LiveDisplay

Measured = Callable[..., Measurement]


@pytest.fixture
def events(result: Callable[..., Result], measured: Measured) -> list[Event]:
    """A short search: one that fits, one that does not, a better one, and its verification."""
    made = result()
    first = dataclasses.replace(measured(50, 1.9), number=0)
    miss = dataclasses.replace(measured(0, 2.4, precision="bf16"), number=1)
    better = dataclasses.replace(measured(100, 1.5, precision="bf16-mixed"), number=2)
    return [
        SearchStarted("tiny-llama", made.hardware, made.budget, space_size=23, trials=4, time_limit=600.0),
        Note("a note about [this]"),
        ProbeStarted(0, first.config),
        ProbeFinished(first, first),
        ProbeStarted(1, miss.config),
        ProbeFinished(miss, first),
        ProbeStarted(2, better.config),
        ProbeFinished(better, better),
        ProbeStarted(2, better.config, verifying=True),
        ProbeFinished(dataclasses.replace(better, verified=True), None),
    ]


def played(events: list[Event], *, terminal: bool, width: int = 80, quiet: bool = False) -> str:
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=20, color_system=None)
    with LiveDisplay(console, quiet=quiet) as listener:
        for event in events:
            listener(event)
    return file.getvalue()


def test_without_a_terminal_every_probe_is_one_line(events: list[Event]) -> None:
    config = "micro-batch 8x1, adamw, sdpa attention"
    assert played(events, terminal=False).splitlines() == [
        "tiny-llama on a test's CPU within 2.00 GiB: 23 configs, at most 4 probes",
        "a note about [this]",
        f"probe 1 of 4: fits, 3,200 tokens/s, 1.90 of 2.00 GiB (best so far) - fp32, {config}",
        f"probe 2 of 4: out of memory: needs 2.40 GiB of 2.00 - bf16, {config}",
        f"probe 3 of 4: fits, 6,400 tokens/s, 1.50 of 2.00 GiB (best so far) - bf16-mixed, {config}",
        f"verifying probe 3: fits, 6,400 tokens/s, 1.50 of 2.00 GiB - bf16-mixed, {config}",
    ]


def test_a_line_is_not_broken_at_the_width_of_a_log(events: list[Event]) -> None:
    assert played(events, terminal=False, width=20) == played(events, terminal=False)


def test_on_a_terminal_the_panel_shows_best_memory_probes_and_time(events: list[Event]) -> None:
    text = played(events[:-1], terminal=True)
    for words in (
        "tiny-llama",
        "a test's CPU within 2.00 GiB",
        "probing",
        "verifying",
        "6,400 tokens/s",
        "1.50 of 2.00 GiB",
        "3 of 4, 2 fits, 1 out of memory",
        "left of 10 min",
        "a note about [this]",
    ):
        assert words in text
    assert "probe 1 of 4" not in text


def test_a_verification_is_no_further_probe(events: list[Event]) -> None:
    assert "4 of 4" not in played(events, terminal=True)


@pytest.mark.parametrize("width", [5, 12, 30, 80, 200])
def test_no_width_breaks_the_panel(events: list[Event], width: int) -> None:
    notes_apart = [event for event in events if not isinstance(event, Note)]
    text = played(notes_apart, terminal=True, width=width)
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r", "\n"))
    assert all(len(line) <= width for line in visible.splitlines())


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(events: list[Event], terminal: bool) -> None:
    assert played(events, terminal=terminal, quiet=True) == ""


def test_an_error_in_between_gives_the_terminal_back(events: list[Event]) -> None:
    file = StringIO()
    with pytest.raises(KeyboardInterrupt), LiveDisplay(Console(file=file, force_terminal=True, width=80)) as listener:
        listener(events[0])
        raise KeyboardInterrupt
    assert "\x1b[?25h" in file.getvalue()  # the cursor is shown again


def test_before_the_search_has_started_there_is_something_to_see() -> None:
    assert "looking at the model" in played([], terminal=True)


def test_of_probes_side_by_side_each_is_shown_and_those_that_ended_are_counted(events: list[Event]) -> None:
    search, _, begun, first, *_ = events
    assert isinstance(begun, ProbeStarted)
    assert isinstance(first, ProbeFinished)
    others = [dataclasses.replace(begun, number=number) for number in (1, 2)]
    third = ProbeFinished(dataclasses.replace(first.measurement, number=2), first.best)
    for running in ([begun], [begun, *others]):
        panel = played([search, *running], terminal=True).rpartition("\u256d")[2]  # as it was drawn last
        assert panel.count(" s, fp32") == len(running)
    ended = played([search, begun, *others, third], terminal=True)
    assert "1 of 4, 1 fits" in ended
    assert "3 of 4" not in ended
    assert "3 of 4, 3 fits" in played([search, begun, *others, third, first, _of(first, 1)], terminal=True)
    assert "probe 3 of 4: fits" in played([search, begun, *others, third], terminal=False)


def test_of_a_resumed_search_what_was_measured_before_is_counted(events: list[Event]) -> None:
    search, _, begun, first, *_ = events
    assert isinstance(begun, ProbeStarted)
    assert isinstance(first, ProbeFinished)
    later = [dataclasses.replace(begun, number=number) for number in (2, 3)]
    assert "3 of 4, 1 fits" in played([search, *later, _of(first, 3)], terminal=True)


def _of(event: Event, number: int) -> ProbeFinished:
    assert isinstance(event, ProbeFinished)
    return ProbeFinished(dataclasses.replace(event.measurement, number=number), event.best)
