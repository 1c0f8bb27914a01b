"""The wording of figures and configs."""

from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes
from autofit.report.formatting import (
    POINT,
    about,
    budget_needed,
    changes,
    clock,
    close_call_note,
    describe,
    drift_note,
    gib,
    hanging,
    instead,
    knobs_that_differ,
    listed,
    little_seen_note,
    misled_note,
    more_or_less,
    number,
    packing_note,
    peak_bytes,
    percent,
    rate,
    source,
    speed,
    why_not,
)

Measured = Callable[..., Measurement]
BUDGET = Budget(2 * GIB, 6 * GIB)


def test_a_config_is_described_by_what_is_on() -> None:
    config = Config(
        precision="bf16",
        micro_batch_size=2,
        gradient_accumulation_steps=4,
        lora_rank=8,
        lora_targets="attention",
    )
    assert describe(config) == "bf16, micro-batch 2x4, LoRA 8 attention"
    assert describe(config.replace(lora_rank=0, lora_targets=None)) == "bf16, micro-batch 2x4"
    assert describe(config, ["precision"]) == "bf16"


def test_a_knob_of_a_new_technique_is_told_by_its_name() -> None:
    assert describe(Config(compile="none", memory_format=True)) == "memory_format true"


def test_where_all_is_off_that_is_said() -> None:
    assert describe(Config(lora_rank=0, lora_targets=None)) == "no LoRA"
    assert describe(Config(activation_checkpointing="none")) == "no checkpointing"
    assert describe(Config()) == ""


def test_knobs_that_differ() -> None:
    assert knobs_that_differ([Config(a=1, b=2), Config(a=1, b=3, c=4)]) == ["b", "c"]
    assert knobs_that_differ([Config(a=True), Config(a=1)]) == ["a"]


@pytest.mark.parametrize(
    ("figure", "text"),
    [(5120.3, "5,120"), (123.4, "123"), (12.345, "12.3"), (0.01234, "0.0123"), (0.0, "0")],
)
def test_numbers_keep_three_figures(figure: float, text: str) -> None:
    assert number(figure) == text


def test_sizes_and_shares() -> None:
    assert gib(3 * GIB // 2) == "1.50"
    assert gib(7 * GIB // 100) == "0.070"
    assert gib(GIB // 2048) == "0.00049"
    assert gib(21_000) == "0.00002"
    assert gib(0) == "0"
    assert percent(0.123) == "12 %"
    assert percent(0.001) == "less than 1 %"
    assert listed(["a", "b", "c"]) == "a, b and c"


def test_the_rate_is_of_tokens_where_there_are_tokens(measured: Measured) -> None:
    assert rate(measured(10)) == "640 tokens/s"
    assert rate(measured(10, others={"tokens_per_second": None})) == "10 samples/s"


def test_the_peak_held_against_the_budget_is_the_devices(measured: Measured) -> None:
    assert peak_bytes(measured(1, others={"peak_bytes": PeakBytes(1, 2, 3)})) == 3
    assert peak_bytes(measured(1, others={"peak_bytes": PeakBytes(1)})) == 1
    assert peak_bytes(measured(1, others={"peak_bytes": None})) is None


def test_the_budget_needed_includes_the_margin_on_cuda_only(measured: Measured) -> None:
    miss = measured(0, 19)
    cpu = Hardware("cpu", "x", GIB, GIB, GIB, 2)
    cuda = Hardware("cuda", "x", GIB, GIB, GIB, 2)
    assert budget_needed(miss, cpu, BUDGET) == 19 * GIB
    assert budget_needed(miss, cuda, BUDGET) == pytest.approx(20 * GIB, abs=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "out of memory: needs 2.40 GiB of 2.00"),
        ({"peak_bytes": None}, "out of memory: needs 2.40 GiB of 2.00 by the reason"),
        ({"peak_bytes": None, "reason": None}, "out of memory"),
        (
            {"outcome": Outcome.FAILED, "reason": "Traceback\n  ...\nValueError: [x]\n"},
            "failed: ValueError: [x]",
        ),
        ({"outcome": Outcome.TIMED_OUT, "reason": ""}, "timed out"),
    ],
)
def test_why_a_config_did_not_fit(measured: Measured, changes: dict[str, Any], text: str) -> None:
    reason = {"reason": "needs 2.40 GiB of 2.00 by the reason"}
    assert why_not(measured(0, 2.4, others={**reason, **changes}), BUDGET) == text


def test_a_machine_that_drifted_is_told_in_per_cent() -> None:
    assert "changed by 12 % during" in drift_note(0.12)


@pytest.mark.parametrize(
    ("factor", "words"), [(6.04, "6.0 times as long as"), (0.2, "5.0 times shorter than")]
)
def test_how_far_off_predicted_speeds_were(factor: float, words: str) -> None:
    assert f"Steps take {words} predicted" in misled_note(factor)


def test_changes_are_told_in_few_words_also_what_is_off() -> None:
    best = Config(
        precision="bf16",
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        loss="chunked",
        lora_rank=8,
        lora_targets="attention",
    )
    assert changes(best, best) == []
    assert changes(best.replace(micro_batch_size=2, gradient_accumulation_steps=4), best) == [
        "micro-batch 2x4"
    ]
    assert changes(best.replace(loss="standard", lora_targets="all-linear"), best) == [
        "standard loss",
        "LoRA 8 all-linear",
    ]
    assert changes(best.replace(lora_rank=0, lora_targets=None), best) == ["no LoRA"]


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (0.88, "12 % slower"),
        (1.14, "14 % faster"),
        (0.996, "as fast"),
        (1.004, "as fast"),
        (2, "100 % faster"),
    ],
)
def test_speeds_against_another(ratio: float, told: str) -> None:
    assert speed(ratio) == told


def test_sizes_against_another() -> None:
    assert more_or_less(3 * GIB, 4 * GIB) == "1.00 GiB less"
    assert more_or_less(9 * GIB // 2, 4 * GIB) == "0.50 GiB more"
    assert more_or_less(4 * GIB + 1000, 4 * GIB) == "the same memory"


def test_figures_say_where_they_come_from() -> None:
    assert (source(True), source(False)) == ("(measured)", "(predicted)")


def test_what_a_config_has_instead_is_told_of_it_alone_or_of_the_whole(measured: Measured) -> None:
    best = measured(100, precision="bf16")
    assert instead(best.config, best) == ""
    assert (
        instead(best.config.replace(optimizer="sgd", loss="chunked"), best) == "sgd, chunked loss"
    )
    whole = "fp32, micro-batch 8x1, LoRA 8 all-linear, sgd, eager attention"
    others = {
        "precision": "fp32",
        "optimizer": "sgd",
        "attention": "eager",
        "activation_checkpointing": "none",
    }
    other = best.config.replace(**others, lora_rank=8, lora_targets="all-linear")
    assert instead(other.replace(activation_checkpointing="full"), best).count(",") == 5
    assert instead(other, None) == whole


def test_a_reason_is_printable(measured: Measured) -> None:
    reason = {"outcome": Outcome.FAILED, "reason": "ValueError: \x1b[31mno\x1b[0m\x1b[2J"}
    assert why_not(measured(0, others=reason), BUDGET) == "failed: ValueError: no"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.9, "0:59"), (61, "1:01"), (3661, "1:01:01")]
)
def test_times_that_run(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (53, "50 s"),
        (100, "1.7 min"),
        (1234, "21 min"),
        (9000, "2.5 h"),
        (90_000, "25 h"),
    ],
)
def test_guesses_of_times_have_few_figures(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_a_long_point_stays_right_of_its_dash(shown: Callable[..., str]) -> None:
    lines = shown(
        hanging(["A title:", POINT + "one two three four", POINT + "[five]\x1b[31m"]), 14
    ).splitlines()
    assert [line.rstrip() for line in lines] == [
        "A title:",
        "  - one two",
        "    three four",
        "  - [five]",
    ]


@pytest.mark.parametrize(
    ("packing", "padding", "told"),
    [
        (True, 0.5, "Samples are packed: all 1,000 tokens a second count; padded, 500 would."),
        (True, 0.0, "Samples are packed: all 1,000 tokens a second count; padded, as many would."),
        (False, 0.1, "Samples are padded: of 1,000 tokens a second 900 count."),
        (None, 0.0, None),
    ],
)
def test_how_many_tokens_of_the_users_data_count(
    packing: bool | None, padding: float, told: str | None
) -> None:
    measured = Measurement(Config(), Outcome.FITS, tokens_per_second=1000.0)
    assert packing_note({"packing": packing, "padding": padding}, measured) == told


def test_what_little_was_seen_of_is_named() -> None:
    assert little_seen_note({}) is None
    note = little_seen_note({"full": 0, "qlora": 1})
    assert note == (
        "Little was seen of all weights (0 good probes) and QLoRA (1 good probe): the best "
        "of it may be much faster."
    )


def test_a_close_call_is_told() -> None:
    assert close_call_note(0, 0.03) is None
    note = close_call_note(2, 0.03)
    assert note
    assert note.startswith("Too close to call: 2 other configs came within 3 % of the best.")
