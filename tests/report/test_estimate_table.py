"""Predictions as tables: the verdict first, readable on any terminal."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.hardware import GIB
from autofit.report import around_table, cards_table, estimate_table

Shown = Callable[..., str]


def change(knob: str, value: Any, *, gib: float, seconds: float | None, fits: str = "yes") -> dict[str, Any]:
    nbytes = {"low": int(gib * 0.95 * GIB), "high": int(gib * 1.05 * GIB)}
    return {"knob": knob, "value": value, "fits": fits, "device_bytes": nbytes, "step_seconds": seconds}


DATA: dict[str, Any] = {
    "model": "llama-[8b]",
    "workload": {"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 32},
    "hardware": {"device": "cuda", "name": "NVIDIA [4090]"},
    "budget_bytes": 24 * GIB,
    "usable_bytes": int(22.8 * GIB),
    "config": {"precision": "bf16", "micro_batch_size": 4, "gradient_accumulation_steps": 8, "lora_rank": 16}
    | {"lora_targets": "all-linear"},
    "allocated_bytes": 19 * GIB,
    "reserved_bytes": int(19.5 * GIB),
    "device_bytes": {"low": 19 * GIB, "high": 21 * GIB},
    "breakdown": {"parameters": 12 * GIB, "gradients": GIB, "optimizer": 0, "activations": 5 * GIB}
    | {"temporary": GIB, "context": GIB // 2},
    "step_seconds": 10.0,
    "samples_per_second": 3.2,
    "tokens_per_second": 6553.6,
    "fits": "yes",
    "bottleneck": "transfer",
    "utilisation": 0.413,
    "notes": ["compiled code [keeps] less."],
    "alternatives": [
        change("activation_checkpointing", "none", gib=22, seconds=8.0, fits="maybe"),
        change("optimizer", "sgd", gib=20.02, seconds=10.01),
        change("micro_batch_size", 1, gib=15, seconds=11.0),
        change("micro_batch_size", 2, gib=17, seconds=10.5),
        change("micro_batch_size", 8, gib=24, seconds=9.5, fits="no"),
        change("micro_batch_size", 16, gib=40, seconds=9.4, fits="no"),
        change("optimizer_offload", "cpu", gib=18, seconds=12.0),
    ],
    "largest": {"micro_batch_size": 4, "lora_rank": 256, "sequence_length": None},
}


def test_the_verdict_comes_first_and_the_rest_says_why(shown: Shown) -> None:
    lines = shown(estimate_table(DATA), 120).splitlines()
    assert lines[0] == "llama-[8b]: 2048 tokens, effective batch 32, on NVIDIA [4090] within 24.00 GiB"
    assert lines[1] == "Fits: 19.00-21.00 GiB expected, 22.80 may be used (a margin of 5 % is kept)."
    assert lines[2] == "Config: bf16, micro-batch 4x8, LoRA 16 all-linear."
    text = "\n".join(lines)
    for words in (
        "19.00 GiB of tensors at the peak, 19.50 reserved for them.",
        "A step takes 10 s: 6,554 tokens/s, 3.2 samples/s; bound by copies to and from the host, 41 % of the peak rate",
        "Note: compiled code [keeps] less.",
    ):
        assert words in text


@pytest.mark.parametrize(("fits", "words"), [("maybe", "May fit: "), ("no", "Does not fit: ")])
def test_the_other_verdicts(shown: Shown, fits: str, words: str) -> None:
    assert shown(estimate_table({**DATA, "fits": fits}), 120).splitlines()[1].startswith(words)


def test_bars_are_as_long_as_their_shares(shown: Shown) -> None:
    lines = {line.split()[0]: line for line in shown(estimate_table(DATA), 120).splitlines() if line.strip()}
    assert lines["parameters"].count("#") == 40
    assert lines["activations"].count("#") == round(40 * 5 / 12)
    assert lines["optimizer"].split() == ["optimizer", "-"]


def test_on_a_cpu_nothing_is_reserved_and_no_margin_kept(shown: Shown) -> None:
    data = {**DATA, "usable_bytes": DATA["budget_bytes"], "reserved_bytes": None}
    text = shown(estimate_table(data), 120)
    assert "19.00 GiB of tensors at the peak.\n" in text
    assert "24.00 may be used.\n" in text


def test_a_speed_that_is_not_known_is_said_to_be_so(shown: Shown) -> None:
    unknown = dict.fromkeys(("step_seconds", "samples_per_second", "tokens_per_second", "bottleneck", "utilisation"))
    data = copy.deepcopy(DATA) | unknown
    for each in data["alternatives"]:
        each["step_seconds"] = None
    assert "How long a step takes is not known." in shown(estimate_table(data), 120)
    rows = shown(around_table(data), 120)
    assert "optimizer_offload cpu" in rows
    assert next(line for line in rows.splitlines() if "optimizer_offload" in line).split()[-2:] == ["-", "yes"]


def test_changes_are_told_as_savings_and_costs(shown: Shown) -> None:
    lines = shown(around_table(DATA), 120).splitlines()
    rows = [line.split() for line in lines if line.strip() and line.split()[-1] in ("yes", "maybe", "no")]
    assert rows == [
        ["activation_checkpointing", "none", "22.00", "+10%", "-20%", "maybe"],
        ["micro_batch_size", "2", "17.00", "-15%", "+5%", "yes"],
        ["micro_batch_size", "8", "24.00", "+20%", "-5%", "no"],
        ["optimizer_offload", "cpu", "18.00", "-10%", "+20%", "yes"],
    ]  # not what changes nothing, and of a size only its neighbours
    assert lines[-1] == "Largest that fits, all else as it is: micro-batch 4, LoRA rank 256, sequence none."


def test_what_is_cut_off_is_counted(shown: Shown) -> None:
    assert "2 more: --json --alternatives." in shown(around_table(DATA, rows=2), 120)
    assert "more:" not in shown(around_table(DATA), 120)


def test_nothing_known_of_other_configs(shown: Shown) -> None:
    text = shown(around_table({**DATA, "alternatives": [], "largest": {}}), 120)
    assert text.strip() == "Nothing is known of other configs."


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_terminals_lose_nothing(shown: Shown, width: int) -> None:
    text = shown(estimate_table(DATA), width)
    assert max(map(len, text.splitlines())) <= width
    assert "12.00" in text
    assert "#" in text
    around = shown(around_table(DATA), width)
    assert max(map(len, around.splitlines())) <= width
    for figure in ("22.00", "+20%", "maybe"):
        assert figure in around


def test_the_tables_are_plain_text_without_a_terminal(shown: Shown) -> None:
    text = shown(estimate_table(DATA), 100)
    assert text.isascii()
    assert "\x1b" not in text


def test_cards(shown: Shown) -> None:
    card = {"memory_bytes": int(23.6 * GIB), "title": "a card", "fits": "yes", "tokens_per_second": 1885.4}
    card |= {"device_bytes": {"low": 18 * GIB, "high": 21 * GIB}, "samples_per_second": 0.9, "reason": None}
    reason = "precision: bf16 needs [8.0]."
    old = {**card, "fits": "no", "device_bytes": None, "tokens_per_second": None, "reason": reason}
    data = {**DATA, "cards": [{**old, "name": "t4"}, {**card, "name": "rtx-4090"}]}
    text = shown(cards_table(data), 100)
    rows = [line.split() for line in text.splitlines()]
    assert ["t4", "23.6", "no", "-", "-"] in rows
    assert ["rtx-4090", "23.6", "yes", "18.00-21.00", "1,885"] in rows
    assert "tokens/s" in text
    assert f"- {reason}" in text
    narrow = shown(cards_table(data), 40)
    assert "\u2026" not in narrow and "..." not in narrow  # no figure is cut
    assert "1,885" in narrow
