"""What is predicted where nothing could be measured reads as such in the terminal, in Markdown and on the page."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.estimate import PARTS, Estimate, Timeline
from autofit.core.hardware import GIB, Hardware
from autofit.core.pareto import Point
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.report.explain import explain, nothing_fits, nothing_fits_view
from autofit.report.html import pictures, report_page
from autofit.report.markdown import markdown
from autofit.report.predicted import predicted_lines, predicted_view

CARD = Hardware("cuda", "a card", 24 * GIB, 64 * GIB, 64 * GIB, 8, here=False)
BUDGET = Budget(24 * GIB, 51 * GIB)
CONFIG = Config(
    precision="bf16",
    lora_rank=8,
    lora_targets="all-linear",
    quantization="none",
    micro_batch_size=2,
)
FULL = CONFIG.replace(lora_rank=0, lora_targets=None)


def estimate(config: Config = CONFIG, *, high: float = 20.0, rate: float = 4000.0) -> Estimate:
    parts = dict.fromkeys(PARTS, 3 * GIB)
    return Estimate(
        *(config, 15 * GIB, 16 * GIB, 17 * GIB, int(high * GIB), parts),
        step_seconds=16.0,
        samples_per_second=rate / 2048,
        tokens_per_second=rate,
        bottleneck="compute",
        utilisation=0.5,
        notes=("a note on it.",),
        budget=BUDGET,
    )


def result(found: Estimate | None = None, others: dict[str, Estimate] | None = None) -> Result:
    point = Point(FULL, 30 * GIB, 1.0, 2048.0, measured=False)
    return Result(
        model="an-8b",
        workload={"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 32},
        source={"kind": "preset", "model": "an-8b"},
        hardware=CARD,
        budget=BUDGET,
        versions={"autofit": "0.1.0"},
        best=None,
        tiers={},
        trials=(),
        skipped={"predicted": 700, "refused": 100},
        stopped_by="prediction",
        space_size=1000,
        search_seconds=12.0,
        notes=("There is no GPU here.", "No card was named."),
        frontier={"full": (point,), "lora": (), "qlora": ()},
        predicted=True,
        predicted_best=found,
        predicted_tiers={"full": None, "lora": found, "qlora": None} | (others or {}),
        files={"result": "/runs/x/result.yaml", "report": "/runs/x/report.html"},
        run_directory="/runs/x",
    )


def test_the_terminal_says_first_that_nothing_was_measured(shown: Callable[..., str]) -> None:
    text = shown(predicted_view(result(estimate()), estimate()))
    head = "Predicted, not measured: about 4,000 tokens/s in 17.00-20.00 of 24.00 GiB"
    assert " ".join(text.split()).startswith(head)
    said = " ".join(text.split())
    assert "It fits by all that is predicted: 2.80 GiB are left" in text
    assert "Of all that was predicted, nothing fits that trains all weights." in text
    assert (
        "Of 1,000 configs 100 are refused beforehand, and 700 of those predicted do not fit 24.00 GiB;"
        in said
    )
    assert "the config, and what is predicted" in text
    assert "autofit train /runs/x/result.yaml" in text


def test_what_may_not_fit_is_told_with_what_is_missing() -> None:
    found = estimate(high=23.0)
    assert found.verdict == "maybe"
    (line, *_) = predicted_lines(result(found), found)
    assert (
        line == "It may or may not fit: its upper end is 0.20 GiB above the 22.80 that may be used."
    )


def test_the_other_tiers_are_points() -> None:
    found, full = estimate(), estimate(FULL, rate=900.0, high=23.0)
    lines = predicted_lines(result(found, {"full": full}), found)
    assert lines[1] == "The best predicted of the other tiers:"
    assert lines[2].startswith(
        "  - all weights: 900 tokens/s in 17.00-23.00 GiB, which may or may not fit: bf16"
    )
    assert len(lines) == 3


def test_sentences_and_markdown_and_the_page_say_the_same(tmp_path: Path) -> None:
    line = Timeline(
        CONFIG, ((1, 2, 3, 4, 5, 0, 0),) * 2, (0.0, 1.0), (("forward", 0.0),), True, 15, "forward"
    )
    record = Record(result(estimate()), timelines={"lora": line})
    told = explain(record.result)
    assert told.startswith(
        "Nothing was measured. Predicted for an-8b on a card within 24.00 GiB: bf16, LoRA 8"
    )
    assert "a note on it." in told
    text = markdown(record)
    assert "**Predicted, not measured:** about 4,000 tokens/s" in text
    assert "precision: bf16" in text
    page = report_page(record, tmp_path)
    assert "Predicted, not measured: about 4,000 tokens/s" in page
    assert "predicted, not measured</span>" in page
    assert "<h2>The prediction</h2>" in page
    for wrong in (
        "not verified",
        "Every trial",
        "Throughput against memory",
        "were measured",
        "measured 0",
    ):
        assert wrong not in page
    cell = record.result._repr_html_()
    assert "Nothing was measured. Predicted: about 4,000 tokens/s" in cell
    assert list(pictures(record)) == ["memory-breakdown", "memory-timeline-lora"]


def test_a_speed_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    found = dataclasses.replace(
        estimate(), step_seconds=None, samples_per_second=None, tokens_per_second=None
    )
    assert "\n17.00-20.00 of 24.00 GiB, the best" in explain(result(found))
    assert "/s in" not in explain(result(found))
    assert "? samples" in " ".join(
        report_page(Record(result(found)), tmp_path).replace("</strong>", "").split()
    )


@pytest.mark.parametrize(
    "tell", [explain, lambda each: markdown(Record(each))], ids=["sentences", "markdown"]
)
def test_where_nothing_is_predicted_to_fit_it_says_what_would(
    tell: Callable[[Result], str],
) -> None:
    text = " ".join(tell(result()).replace("\\", "").split())
    assert "Nothing is predicted to fit: an-8b on a card within 24.00 GiB." in text
    assert "The smallest budget in which anything is expected to fit is 31.58 GiB" in text
    assert "--gpu-mem 31.6" in text
    assert "There is no GPU here." in text


def test_nothing_fits_as_an_error_and_on_the_screen(shown: Callable[..., str]) -> None:
    assert nothing_fits(result()).message == "no config of the space is predicted to fit 24.00 GiB."
    assert "none was measured" in " ".join(shown(nothing_fits_view(result())).split())
