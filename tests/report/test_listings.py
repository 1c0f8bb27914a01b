"""Tables of plain data: of predictions the verdict comes first; all are readable on any terminal."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.hardware import GIB, Hardware
from autofit.report.listings import (
    around_table,
    cards_table,
    cleared_text,
    doctor_table,
    estimate_table,
    experts_line,
    models_table,
    spaces_table,
    tools_table,
)

Shown = Callable[..., str]


def standing(
    value: Any, *, package: str = "torch", searched: bool = True, reason: str | None = None
) -> dict[str, Any]:
    version = None if reason else "2.13.0"
    return {
        "value": value,
        "package": package,
        "version": version,
        "searched": searched,
        "reason": reason,
    }


DOCTOR: dict[str, Any] = {
    "hardware": Hardware(
        "cuda", "NVIDIA [H200]", 140 * GIB, 128 * GIB, 100 * GIB, 16, (9, 0)
    ).to_dict(),
    "budget_gib": 140.0,
    "versions": {"torch": "2.13.0", "peft": "0.21.2"},
    "broken": {},
    "calibration": {"memory": 1.04, "spread": None, "seconds": 1.25, "count": 6, "discounted": 2},
    "store": {"path": "/cache/[x].sqlite", "measurements": 1234, "models": 1, "trouble": None},
    "techniques": [
        {
            "name": "precision",
            "values": [standing("fp32"), standing("bf16"), standing("fp16-mixed", searched=False)],
        },
        {
            "name": "lora_rank",
            "values": [standing(0), standing(8, package="[peft]", reason="8 needs [peft]")],
        },
        {"name": "lora_targets", "values": [standing(None)]},
        {"name": "gradient_accumulation_steps", "values": []},
    ],
}


def test_doctor_shows_device_budget_and_reasons(shown: Shown) -> None:
    text = shown(doctor_table(DOCTOR), 140)
    assert "memory was 1.040 times what was predicted and steps took 1.25 times as long" in text
    assert "(median of 6 measurements, 2 of them long ago or on a busy machine)" in " ".join(
        text.split()
    )
    for words in (
        "NVIDIA [H200] (cuda)",
        "140.0 GiB",
        "100.0 GiB free of 128.0, 16 cores",
        "torch 2.13.0, peft 0.21.2",
    ):
        assert words in text
    assert "1,234 measurements of 1 model in /cache/[x].sqlite" in text
    assert "fp32, bf16" in text
    assert "torch 2.13.0" in text
    assert "available, but not searched on this device" in text
    assert "8 needs [peft]" in text
    assert "null" in text
    assert "derived from others" in text


def test_doctor_has_a_line_for_each_way_that_values_stand(shown: Shown) -> None:
    lines = [line.rstrip() for line in shown(doctor_table(DOCTOR), 80).splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("precision"))
    assert [" ".join(line.split()) for line in lines[start : start + 4]] == [
        "precision",
        "fp32, bf16 available (torch 2.13.0)",
        "fp16-mixed available, but not searched on this device (torch",
        "2.13.0)",
    ]


def test_tools_tell_their_command_whole_on_fifty_columns(shown: Shown) -> None:
    run = 'deepspeed.initialize(config="x")'
    rows = [{"name": "deepspeed", "versions": ["0.19.8"], "tasks": [], "run": run}]
    text = shown(tools_table(rows), 50)
    assert "anything; deepspeed 0.19.8" in text
    assert run in text


def test_doctor_tells_why_the_store_cannot_be_used(shown: Shown) -> None:
    broken = DOCTOR | {
        "store": DOCTOR["store"] | {"measurements": None, "trouble": "the store is damaged."}
    }
    assert "the store is damaged." in shown(doctor_table(broken), 140)


def test_what_was_cleared() -> None:
    def told(measurements: int | None, models: int | None) -> str:
        return cleared_text(
            {"cleared": {"path": "/x", "measurements": measurements, "models": models}}
        )

    assert told(2, 1) == "removed 2 measurements of 1 model from /x"
    assert told(0, 0) == "removed 0 measurements of 0 models from /x"
    assert told(None, None) == "removed what could not be read from /x"


def test_models_show_their_size_and_where_weights_are(shown: Shown) -> None:
    rows = [
        {
            "name": "llama-2-7b",
            "task": "causal-lm",
            "parameters": 6738415616,
            "hub": "meta-llama/Llama-2-7b-hf",
        },
        {"name": "tiny-llama", "task": "causal-lm", "parameters": 6917376, "hub": None},
        {"name": "micro", "task": "causal-lm", "parameters": 12345, "hub": None},
    ]
    text = shown(models_table(rows), 100)
    for words in ("6.74B", "6.92M", "12,345", "meta-llama/Llama-2-7b-hf"):
        assert words in text


def test_spaces_show_what_they_allow_and_how_much(shown: Shown) -> None:
    spaces = [
        ("exact", 1234, "exactly"),
        ("lora", 1_234_567, "at most"),
    ]
    rows = [
        {"name": n, "description": "Only what is\nthe same.", "configs": c, "counted": how}
        for n, c, how in spaces
    ]
    text = shown(spaces_table(rows, "for a model on a card"), 100)
    for words in ("Only what is the same.", " 1,234", "at most 1,234,567"):
        assert words in text
    assert "Counted without what is refused, for a model on a card." in text


@pytest.mark.parametrize("width", [10, 40])
def test_narrow_terminals_do_not_break_them(shown: Shown, width: int) -> None:
    shown(doctor_table(DOCTOR), width)
    shown(
        models_table([{"name": "a" * 30, "task": "causal-lm", "parameters": 1, "hub": "b" * 50}]),
        width,
    )


def change(
    knob: str, value: Any, *, gib: float, seconds: float | None, fits: str = "yes"
) -> dict[str, Any]:
    nbytes = {"low": int(gib * 0.95 * GIB), "high": int(gib * 1.05 * GIB)}
    return {
        "knob": knob,
        "value": value,
        "fits": fits,
        "device_bytes": nbytes,
        "step_seconds": seconds,
    }


ESTIMATE: dict[str, Any] = {
    "model": "llama-[8b]",
    "workload": {"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 32},
    "hardware": {"device": "cuda", "name": "NVIDIA [4090]"},
    "budget_bytes": 24 * GIB,
    "usable_bytes": int(22.8 * GIB),
    "config": {
        "precision": "bf16",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "lora_rank": 16,
    }
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
    lines = shown(estimate_table(ESTIMATE), 120).splitlines()
    assert (
        lines[0] == "llama-[8b]: 2048 tokens, effective batch 32, on NVIDIA [4090] within 24.00 GiB"
    )
    assert (
        lines[1] == "Fits: 19.00-21.00 GiB expected, 22.80 may be used (a margin of 5 % is kept)."
    )
    assert lines[2] == "Config: bf16, micro-batch 4x8, LoRA 16 all-linear."
    text = "\n".join(lines)
    for words in (
        "19.00 GiB of tensors at the peak, 19.50 reserved for them.",
        "A step takes 10 s: 6,554 tokens/s, 3.2 samples/s; bound by copies to and from the host, 41 % of the peak rate",
        "Note: compiled code [keeps] less.",
    ):
        assert words in text


def test_transfers_of_several_devices_are_between_them(shown: Shown) -> None:
    several = {**ESTIMATE, "config": {**ESTIMATE["config"], "data_parallel": "fsdp"}}
    assert "bound by what devices exchange" in shown(estimate_table(several), 120)


@pytest.mark.parametrize(("fits", "words"), [("maybe", "May fit: "), ("no", "Does not fit: ")])
def test_the_other_verdicts(shown: Shown, fits: str, words: str) -> None:
    assert shown(estimate_table({**ESTIMATE, "fits": fits}), 120).splitlines()[1].startswith(words)


def test_bars_are_as_long_as_their_shares(shown: Shown) -> None:
    lines = {
        line.split()[0]: line
        for line in shown(estimate_table(ESTIMATE), 120).splitlines()
        if line.strip()
    }
    assert lines["parameters"].count("#") == 40
    assert lines["activations"].count("#") == round(40 * 5 / 12)
    assert lines["optimizer"].split() == ["optimizer", "-"]


def test_on_a_cpu_nothing_is_reserved_and_no_margin_kept(shown: Shown) -> None:
    data = {**ESTIMATE, "usable_bytes": ESTIMATE["budget_bytes"], "reserved_bytes": None}
    text = shown(estimate_table(data), 120)
    assert "19.00 GiB of tensors at the peak.\n" in text
    assert "24.00 may be used.\n" in text


def test_a_speed_that_is_not_known_is_said_to_be_so(shown: Shown) -> None:
    unknown = dict.fromkeys(
        ("step_seconds", "samples_per_second", "tokens_per_second", "bottleneck", "utilisation")
    )
    data = copy.deepcopy(ESTIMATE) | unknown
    for each in data["alternatives"]:
        each["step_seconds"] = None
    assert "How long a step takes is not known." in shown(estimate_table(data), 120)
    rows = shown(around_table(data), 120)
    assert "optimizer_offload cpu" in rows
    assert next(line for line in rows.splitlines() if "optimizer_offload" in line).split()[-2:] == [
        "-",
        "yes",
    ]


def test_changes_are_told_as_savings_and_costs(shown: Shown) -> None:
    lines = shown(around_table(ESTIMATE), 120).splitlines()
    rows = [
        line.split()
        for line in lines
        if line.strip() and line.split()[-1] in ("yes", "maybe", "no")
    ]
    # not what changes nothing, and of a size only its neighbours
    assert rows == [
        ["activation_checkpointing", "none", "22.00", "+10%", "-20%", "maybe"],
        ["micro_batch_size", "2", "17.00", "-15%", "+5%", "yes"],
        ["micro_batch_size", "8", "24.00", "+20%", "-5%", "no"],
        ["optimizer_offload", "cpu", "18.00", "-10%", "+20%", "yes"],
    ]
    assert (
        lines[-1]
        == "Largest that fits, all else as it is: micro-batch 4, LoRA rank 256, sequence none."
    )


def test_what_adapters_on_experts_take(shown: Shown) -> None:
    sizes = {"low": round(24.3 * GIB), "high": round(26.1 * GIB)}
    line = shown(
        experts_line({"lora_targets": "attention+experts", "fits": "no", "device_bytes": sizes})
    )
    assert " ".join(line.split()).endswith(
        "experts too, it does not fit, 24.30-26.10 GiB expected."
    )


def test_what_is_cut_off_is_counted(shown: Shown) -> None:
    assert "2 more: --json --alternatives." in shown(around_table(ESTIMATE, rows=2), 120)
    assert "more:" not in shown(around_table(ESTIMATE), 120)


def test_nothing_known_of_other_configs(shown: Shown) -> None:
    text = shown(around_table({**ESTIMATE, "alternatives": [], "largest": {}}), 120)
    assert text.strip() == "Nothing is known of other configs."


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_terminals_lose_nothing(shown: Shown, width: int) -> None:
    text = shown(estimate_table(ESTIMATE), width)
    assert max(map(len, text.splitlines())) <= width
    assert "12.00" in text
    assert "#" in text
    around = shown(around_table(ESTIMATE), width)
    assert max(map(len, around.splitlines())) <= width
    for figure in ("22.00", "+20%", "maybe"):
        assert figure in around


def test_the_tables_are_plain_text_without_a_terminal(shown: Shown) -> None:
    text = shown(estimate_table(ESTIMATE), 100)
    assert text.isascii()
    assert "\x1b" not in text


def test_cards(shown: Shown) -> None:
    card = {
        "memory_bytes": int(23.6 * GIB),
        "title": "a card",
        "fits": "yes",
        "tokens_per_second": 1885.4,
    }
    card |= {
        "device_bytes": {"low": 18 * GIB, "high": 21 * GIB},
        "samples_per_second": 0.9,
        "reason": None,
    }
    card |= {
        "devices": 1,
        "nodes": 1,
        "dollars_per_billion_tokens": None,
        "dollars_per_million_samples": None,
    }
    reason = "precision: bf16 needs [8.0]."
    old = {**card, "fits": "no", "device_bytes": None, "tokens_per_second": None, "reason": reason}
    data = {
        **ESTIMATE,
        "cards": [{**old, "name": "t4"}, {**card, "name": "rtx-4090"}],
        "configs": [],
    }
    text = shown(cards_table(data), 100)
    rows = [line.split() for line in text.splitlines()]
    assert ["t4", "23.6", "no", "-", "-"] in rows
    assert ["rtx-4090", "23.6", "yes", "18.00-21.00", "1,885"] in rows
    assert "tokens/s" in text
    assert f"- {reason}" in text
    narrow = shown(cards_table(data), 40)
    assert "\u2026" not in narrow and "..." not in narrow  # no figure is cut
    assert "1,885" in narrow
    more = [
        {**each, "devices": 4, "nodes": 2, "dollars_per_billion_tokens": 152.4}
        for each in data["cards"]
    ]
    configs = [
        {"devices": 1, "config": {"data_parallel": None}},
        {"devices": 4, "config": {"data_parallel": "fsdp"}},
    ]
    text = shown(cards_table({**data, "cards": [*data["cards"], *more], "configs": configs}), 80)
    rows = [line.split() for line in text.splitlines()]
    assert ["rtx-4090", "2", "x", "4", "23.6", "yes", "18.00-21.00", "1,885", "152"] in rows
    assert not any(row[:1] == ["t4"] for row in rows)
    assert "2 more do not fit" in text
    assert "From 4 devices on: fsdp." in text
