"""The end of a search: the answer first, then the table, what was not tried, other budgets and files."""

import dataclasses
import shlex
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.pareto import OtherBudget
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.table import result_table

Results = Callable[..., Result]
Records = Callable[..., Record]
Shown = Callable[..., str]


def test_the_answer_comes_first(result: Results, shown: Shown) -> None:
    lines = shown(result_table(result()), 120).splitlines()
    assert [line.rstrip() for line in lines[:6]] == [
        "6,400 tokens/s in 1.50 of 2.00 GiB: the best config for tiny-llama on a test's CPU, verified in longer runs.",
        "  bf16-mixed, micro-batch 2x4, adamw, sdpa attention",
        "A step takes 0.08 s (0.0784 to 0.0824).",
        "Train with it:",
        "  autofit train runs/x/result.yaml --data DATA --weights WEIGHTS --output OUT",
        "",
    ]


def test_then_every_config_with_its_reason_and_what_it_has_instead(
    result: Results, shown: Shown
) -> None:
    rows = [
        line.split(maxsplit=3)
        for line in shown(result_table(result()), 120).splitlines()
        if line.startswith(" ")
    ]
    told = {
        row[3].rstrip(): row[:3] for row in rows if len(row) == 4 and row[0][0] in "-0123456789"
    }
    assert told == {
        "best, verified": ["6,400", "0.0800", "1.50"],
        "tied within 3 %, takes more memory with adamw-foreach": ["6,464", "0.0792", "1.70"],
        "tied within 3 %, learns less faithfully with bf16; verified": ["6,272", "0.0816", "1.40"],
        "best of lora, 41 % slower with micro-batch 8x1, LoRA 16 all-linear": [
            "3,840",
            "0.133",
            "0.90",
        ],
        "51 % slower with fp32": ["3,200", "0.160", "1.90"],
        "out of memory: needs 2.40 GiB of 2.00, with fp32, micro-batch 8x1": ["-", "-", "2.40"],
        "out of memory: needs 3.10 GiB of 2.00, with fp32, micro-batch 8x1, adamw-foreach": [
            "-",
            "-",
            "3.10",
        ],
    }


def test_then_what_was_not_tried_what_more_memory_brings_and_where_it_is(
    record: Records, shown: Shown
) -> None:
    text = shown(result_table(record().result), 100)
    answer, table, rest = (
        text.index("Train with it"),
        text.index("tokens/s   "),
        text.index("Of 23 configs"),
    )
    budgets, files = text.index("With other budgets:"), text.index("Written to runs/x:")
    assert answer < table < rest < budgets < files
    assert "12 ruled out by what another one proved; 3 refused beforehand" in " ".join(text.split())
    assert "  - 4.00 GiB (twice as much), full: 30 % faster" in text
    assert "  result.yaml  the config" in text
    assert "  train.py     the same" in text
    assert "report.html" not in text  # it was not written
    assert text.count("runs/x/") == 1  # in the command


def test_eighty_columns(record: Records, shown: Shown) -> None:
    lines = shown(result_table(record().result), 80).splitlines()
    start, end = (
        next(place for place, line in enumerate(lines) if words in line)
        for words in ("step s", "Of 23")
    )
    column = lines[start].index("against the best")
    assert column < 36, "words have more than half of the width"
    assert sum(line[:column].strip() == "" for line in lines[start + 2 : end]) <= 7, (
        "a reason takes two lines at the most"
    )


def test_at_fifty_columns_the_step_gives_way(result: Results, shown: Shown) -> None:
    text = shown(result_table(result()), 50)
    assert "step s" not in text and "0.133" not in text
    assert "3,840" in text and "0.90" in text
    assert "41 % slower" in text


@pytest.mark.parametrize("width", [1, 10, 20, 40, 64, 80, 200])
def test_any_width_will_do(record: Records, shown: Shown, width: int) -> None:
    text = shown(result_table(record().result), width)
    assert "best" in text or width < 40


def test_a_long_command_goes_on_as_a_shell_reads_it(result: Results, shown: Shown) -> None:
    files = {"result": "/a/rather/long/way/down/to/a/run/result.yaml"}
    text = shown(result_table(result(files=files)), 64)
    command = text[text.index("autofit train") :].partition("\n\n")[0].partition("  tokens/s")[0]
    words = command.replace("\\\n", " ").split()[:9]
    assert words == [
        *(
            "autofit",
            "train",
            files["result"],
            "--data",
            "DATA",
            "--weights",
            "WEIGHTS",
            "--output",
            "OUT",
        ),
    ]


def test_a_command_is_never_cut_where_the_console_does_not_crop(
    result: Results, tmp_path: Path
) -> None:
    path = "/" + "deep/" * 40 + "result.yaml"
    console = Console(file=StringIO(), width=50, color_system=None)
    console.print(result_table(result(files={"result": path})), crop=False)
    assert f"autofit train {path}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_run_directory_nothing_is_said_of_one(result: Results, shown: Shown) -> None:
    text = shown(result_table(result(files={})))
    assert "Written" not in text and "Train" not in text


def test_one_config_alone(result: Results, shown: Shown) -> None:
    made = result(trials=(), tiers={}, runner_up=None)
    text = " ".join(shown(result_table(made), 120).split())
    assert "bf16-mixed, micro-batch 2x4, adamw" in text
    assert "best, verified" in text


def test_a_best_that_was_not_verified_is_not_called_so(result: Results, shown: Shown) -> None:
    best = result().best
    assert best
    text = shown(result_table(result(best=dataclasses.replace(best, verified=False))), 120)
    assert "the best config for tiny-llama on a test's CPU, not verified." in text


def test_workloads_without_tokens_are_told_in_samples(
    result: Results, measured: Callable[..., Measurement], shown: Shown
) -> None:
    images = measured(12, others={"tokens_per_second": None})
    text = shown(
        result_table(result(best=images, trials=(images,), tiers={"full": images}, runner_up=None))
    )
    assert "12 samples/s in" in text
    assert "samples/s   step s" in text


def test_brackets_and_codes_in_a_reason_are_nothing_but_words(
    result: Results, measured: Callable[..., Measurement], shown: Shown
) -> None:
    reason = {
        "outcome": Outcome.FAILED,
        "peak_bytes": None,
        "reason": "no [red]\x1b[31m eager here",
    }
    text = shown(result_table(result(trials=(measured(others=reason, attention="eager"),))), 120)
    assert "failed: no [red] eager here, with" in text
    assert "\x1b" not in text


def test_what_one_rank_stood_for_is_not_called_verified(result: Results, shown: Shown) -> None:
    best = result().best
    assert best
    best = dataclasses.replace(best, communication_seconds=0.012)
    text = " ".join(shown(result_table(result(best=best, tiers={"full": best}))).split())
    assert "rank 0 measured in longer runs, communication predicted." in text
    assert "; 0.012 s of it are predicted communication." in text
    assert "best, rank 0 measured again" in text


def test_a_card_standing_in_for_another_is_named(result: Results, shown: Shown) -> None:
    hardware = dataclasses.replace(
        result().hardware, device="cuda", name="RTX 4090", measured_on="NVIDIA H200"
    )
    text = shown(result_table(result(hardware=hardware)))
    assert "Speed measured on NVIDIA H200, memory for RTX 4090." in text


def test_a_best_that_was_explored_at_another_speed_says_so(
    result: Results, measured: Callable[..., Measurement], shown: Shown
) -> None:
    words = "What is not verified was measured once, briefly, when the best reached"
    assert words not in shown(result_table(result()), 120)
    best = result().best
    assert best is not None
    explored = dataclasses.replace(
        best, verified=False, samples_per_second=150.0, tokens_per_second=9600.0
    )
    trials = (*(each for each in result().trials if each.config != best.config), explored)
    assert f"{words} 9,600 tokens/s." in shown(result_table(result(trials=trials)), 120)
    verified = tuple(
        dataclasses.replace(each, verified=each.fits)
        for each in trials
        if each.config != best.config
    )
    tiers = {"full": best}
    text = shown(
        result_table(result(trials=(*verified, explored), tiers=tiers, runner_up=None)), 120
    )
    assert words not in text, "all that is shown is verified"


def test_what_may_have_been_missed_is_told_below(result: Results, shown: Shown) -> None:
    assert "Nothing that was left" not in shown(result_table(result()), 120)
    told = " ".join(shown(result_table(result(bound=0.021)), 120).split())
    assert (
        "Nothing that was left is expected to be more than 2 % faster (at 95 %, by discounted speed)."
        in told
    )


def test_other_budgets_hang_below_their_dash(record: Records, shown: Shown) -> None:
    others = (OtherBudget("twice as much", 4 * GIB),)
    lines = shown(
        result_table(dataclasses.replace(record().result, other_budgets=others)), 40
    ).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("  - "))
    assert lines[first + 1].startswith("    ") and lines[first + 1].strip()


def test_a_command_goes_on_between_words_alone(result: Results, shown: Shown) -> None:
    folder = "my runs --data of 'mine'/with a name that takes a line"
    text = shown(result_table(result(files={"result": f"{folder}/result.yaml"})), 100)
    command = text[text.index("autofit train") : text.index("--output OUT")]
    assert " \\\n" in command.replace("  ", "")
    words = shlex.split(command.replace("\\\n", ""))
    assert words == [
        "autofit",
        "train",
        f"{folder}/result.yaml",
        "--data",
        "DATA",
        "--weights",
        "WEIGHTS",
    ]
