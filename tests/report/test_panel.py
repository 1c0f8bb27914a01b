"""A running search: its state, built from events, and the lines that show it."""

import dataclasses
from collections.abc import Callable, Sequence
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from autofit.core.events import Event, PhaseStarted, ProbeFinished, ProbeStarted, SearchStarted
from autofit.core.measurement import Measurement, Outcome
from autofit.report.panel import Progress, panel

BAR = "\u2501"
Measured = Callable[..., Measurement]


class _Ascii(StringIO):
    encoding = "ascii"


def drawn(progress: Progress, now: float, columns: int, rows: int, *, ascii: bool = False) -> str:
    """The panel at some time, as a window shows it."""
    console = Console(
        file=_Ascii() if ascii else StringIO(), width=columns, height=rows, color_system=None
    )
    console.print(panel(progress, now, console))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(cell_len(line) <= columns for line in lines)
    return "\n".join(line.rstrip() for line in lines)


def lines(
    events: Sequence[Event],
    columns: int = 80,
    rows: int = 24,
    *,
    now: float = 75.0,
    ascii: bool = False,
) -> str:
    """The panel at some time after the last event; the search began at 0."""
    progress = Progress(0.0)
    for event in events:
        progress.update(event, 3.0)
    return drawn(progress, now, columns, rows, ascii=ascii)


def without_limit(events: Sequence[Event]) -> list[Event]:
    return [
        dataclasses.replace(each, time_limit=None) if isinstance(each, SearchStarted) else each
        for each in events
    ]


def test_a_search_on_eighty_columns(events: list[Event]) -> None:
    assert lines(events[:9], now=15.0).splitlines() == [
        "tiny-llama on a test's CPU within 2.00 GiB",
        "now       measuring probe 3, 0:12",
        "          bf16-mixed, micro-batch 8x1, adamw, sdpa attention",
        "",
        "best      3,200 tokens/s (probe 1)",
        "          fp32, micro-batch 8x1, adamw, sdpa attention",
        "time      0:15, 9:48 left",
        f"memory    {BAR * 30}    best 1.90 of 2.00 GiB",
        "",
        f"probes    {BAR * 16}                  2 of at most 4",
        "          1 fit, 1 out of memory",
        "latest    probe 2: out of memory: needs 2.40 GiB of 2.00, with bf16",
        "          probe 1: 3,200 tokens/s, the best so far",
    ]


@pytest.mark.parametrize(
    ("count", "doing"),
    [
        (0, "loading PyTorch, 1:15"),
        (1, "looking at the model, 1:12"),
        (4, "predicting 23 configs, 1:12"),
        (5, "measuring probe 1, 1:12"),
        (6, "choosing the next config, 1:12"),
        (11, "measuring probe 3 again, longer, 1:12"),
        (12, "choosing what to measure again, 1:12"),
        (13, "writing the result, 1:12"),
    ],
)
def test_at_any_time_it_says_what_goes_on(events: list[Event], count: int, doing: str) -> None:
    assert f"now       {doing}" in lines(events[:count]).splitlines()


def test_the_best_its_gain_and_its_way(events: list[Event]) -> None:
    shown = lines(events)
    assert "best      6,400 tokens/s (probe 3), 100 % faster than the first that fitted" in shown
    assert "progress  \u2581\u2581\u2588" in shown
    assert "probe 3 again: 6,400 tokens/s" in shown
    assert "probe 1: 50 % slower with fp32" in shown
    assert "progress" not in lines(events[:8])  # one height is no curve


def test_the_predicted_peak_of_what_is_measured_stands_beside_the_best(events: list[Event]) -> None:
    shown = lines([*events[:8], dataclasses.replace(events[4], number=2)])  # type: ignore[arg-type,type-var]
    assert "best 1.90 of 2.00 GiB" in shown
    assert f"{BAR * 16}{' ' * 18}now 1.00 GiB expected" in shown
    assert "expected" not in lines(events)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(75.0, "1:15, 8:48 left"), (700.0, "11:40, past the limit: still verifying the best")],
)
def test_the_time_that_is_left_of_a_limit(events: list[Event], seconds: float, told: str) -> None:
    assert f"time      {told}" in lines(events, now=seconds)


def test_without_a_limit_the_time_left_is_a_guess_or_open(events: list[Event]) -> None:
    free = without_limit(events)
    assert "time      1:15\n" in lines(free[:6])
    assert "1:15, about 70 s for the 2 probes left, then verifying" in lines(free[:8])
    assert "1:15, verifying what may be the best" in lines(free[:11])
    assert "time      1:15\n" in lines(free[:3])


def test_one_that_was_measured_again_twice_has_one_line(events: list[Event]) -> None:
    shown = lines([*events[:12], *events[10:12]])
    assert shown.count("probe 3 again") == 1
    assert shown.count("probe 3: ") == 1


def test_where_nothing_fits_that_is_said(events: list[Event]) -> None:
    miss = [events[6], ProbeFinished(events[7].measurement, None)]  # type: ignore[union-attr]
    assert "best      none yet" in lines(events[:5])
    assert "best      nothing that was measured fits, so far" in lines([events[1], *miss])


def test_probes_side_by_side_each_have_a_line_of_their_config(events: list[Event]) -> None:
    started = events[4]
    assert isinstance(started, ProbeStarted)
    several = [dataclasses.replace(started, number=number) for number in range(6)]
    shown = lines([*events[:2], *several], rows=40)
    assert [f"measuring probe {number}, " in shown for number in range(1, 7)] == [True] * 4 + [
        False
    ] * 2
    assert shown.count("fp32, micro-batch") == 4
    assert "and 2 more" in shown
    assert "measuring probe 2" in lines([*events[:2], *several[:2]])


def test_lines_do_not_jump_between_two_probes(events: list[Event]) -> None:
    between, during = (lines(events[:count]).splitlines() for count in (8, 9))
    assert between.index("best      3,200 tokens/s (probe 1)") == during.index(
        "best      3,200 tokens/s (probe 1)"
    )


@pytest.mark.parametrize("columns", [1, 5, 12, 30, 50, 80, 200])
@pytest.mark.parametrize("ascii", [False, True])
def test_any_width_will_do(events: list[Event], columns: int, ascii: bool) -> None:
    progress = Progress(0.0)
    for event in events:
        progress.update(event, 3.0)
        drawn(progress, 5.0, columns, 24, ascii=ascii)


def test_on_few_rows_the_answer_stays(events: list[Event]) -> None:
    shown = "\n".join(lines(events[:9], rows=9).splitlines()[:7])
    assert "measuring probe 3" in shown
    assert "3,200 tokens/s" in shown
    assert "left" in shown
    assert "probe 2" not in shown and "probes    " not in shown


def test_on_fifty_columns_the_reasons_can_be_read(events: list[Event]) -> None:
    shown = lines(events, 50)
    assert "probe 2: out of memory: needs 2.40 GiB" in shown
    assert "1.50 of 2.00 GiB" in shown
    assert "3 of at most 4" in shown


def test_a_terminal_that_knows_ascii_only_gets_no_more(events: list[Event]) -> None:
    shown = lines(events, ascii=True)
    assert shown.isascii()
    assert "-" * 24 + " " * 10 + "best 1.50 of 2.00 GiB" in shown


def test_wide_signs_and_codes_of_others_break_nothing(
    events: list[Event], measured: Measured
) -> None:
    search = dataclasses.replace(events[1], model="\u6a21\u578b\x1b[2J" * 20)  # type: ignore[arg-type,type-var]
    failed = {
        "outcome": Outcome.OUT_OF_MEMORY,
        "peak_bytes": None,
        "reason": "\u6a21\x1b[31m\u578b" * 40,
    }
    one = measured(0, others=failed)
    for columns in (20, 50, 80):
        shown = lines([search, ProbeStarted(0, one.config), ProbeFinished(one, None)], columns)
        assert "\x1b" not in shown
        assert "\u6a21\u578b" in shown


def test_colour_only_repeats_what_words_say(events: list[Event]) -> None:
    progress = Progress(0.0)
    for event in events:
        progress.update(event, 3.0)
    console = Console(file=StringIO(), width=80, height=24, color_system=None)
    styles = {
        str(segment.style)
        for segment in console.render(panel(progress, 5.0, console))
        if segment.text.strip()
    }
    assert styles - {"none", "None"} == {"bold", "dim", "bold green", "yellow", "cyan"}


def after(events: Sequence[Event]) -> Progress:
    """A second passes before each."""
    progress = Progress(0.0)
    for second, event in enumerate(events, 1):
        progress.update(event, float(second))
    return progress


def test_a_whole_search(events: list[Event]) -> None:
    progress = after(events)
    assert progress.best and progress.best.throughput == 100
    assert progress.first and progress.first.throughput == 50
    assert progress.bests == [50, 50, 100]
    assert progress.counts == {Outcome.FITS: 2, Outcome.OUT_OF_MEMORY: 1}
    assert (progress.done, progress.verified) == (3, 1)
    assert list(progress.latest) == [(0, False), (1, False), (2, False), (2, True)]
    assert not progress.running
    assert progress.phase == ("writing the result", 13.0)


def test_a_probe_ends_the_phase_before_it(events: list[Event]) -> None:
    assert after([]).phase == ("loading PyTorch", 0.0)
    assert after(events[:4]).phase == ("predicting 23 configs", 4.0)
    progress = after(events[:5])
    assert progress.phase is None
    assert [since for _, since in progress.running.values()] == [5.0]


def test_a_probe_that_an_interrupt_cut_off_is_forgotten(events: list[Event]) -> None:
    assert not after([*events[:5], PhaseStarted("writing")]).running


def test_a_better_one_is_told_once(events: list[Event]) -> None:
    finished = [place for place, event in enumerate(events) if isinstance(event, ProbeFinished)]
    better = [after(events[:place]).is_new_best(events[place]) for place in finished]  # type: ignore[arg-type]
    assert better == [True, False, True, False]


@pytest.mark.parametrize(
    ("started", "ended", "done"),
    [
        ([0, 1, 2], [2], 1),
        ([0, 1, 2], [2, 0], 2),
        ([0, 1, 2], [2, 0, 1], 3),
        ([5, 6], [6], 6),
        ([5], [5], 6),
    ],
    ids=["the last first", "two", "all", "resumed", "resumed alone"],
)
def test_probes_side_by_side_and_those_of_before_a_resume_are_counted(
    measured: Measured, started: list[int], ended: list[int], done: int
) -> None:
    one = measured(50)
    starts = [ProbeStarted(number, one.config) for number in started]
    ends = [ProbeFinished(dataclasses.replace(one, number=number), one) for number in ended]
    progress = after([*starts, *ends])
    assert progress.done == done
    assert progress.side_by_side == len(started)


def test_the_curve_of_the_best_never_falls(events: list[Event], measured: Measured) -> None:
    # the leader, where the machine has drifted
    slower = dataclasses.replace(measured(90, precision="bf16"), number=3)
    progress = after([*events[:10], ProbeStarted(3, slower.config), ProbeFinished(slower, slower)])
    assert progress.bests == [50, 50, 100, 100]
    assert progress.best == slower


def test_the_pace_is_known_after_two_probes(events: list[Event]) -> None:
    assert after(events[:6]).seconds_per_probe(10.0) is None
    assert after(events[:8]).seconds_per_probe(10.0) == 2.5  # since second 5, when the first began
