"""Tables of plain data."""

from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.hardware import GIB, Hardware
from autofit.report import cleared_text, doctor_table, models_table, spaces_table, tools_table

Shown = Callable[..., str]


def standing(value: Any, *, package: str = "torch", searched: bool = True, reason: str | None = None) -> dict[str, Any]:
    version = None if reason else "2.13.0"
    return {"value": value, "package": package, "version": version, "searched": searched, "reason": reason}


DOCTOR: dict[str, Any] = {
    "hardware": Hardware("cuda", "NVIDIA [H200]", 140 * GIB, 128 * GIB, 100 * GIB, 16, (9, 0)).to_dict(),
    "budget_gib": 140.0,
    "versions": {"torch": "2.13.0", "peft": "0.21.2"},
    "calibration": {"memory": 1.04, "spread": None, "seconds": 1.25, "count": 6, "discounted": 2},
    "store": {"path": "/cache/[x].sqlite", "measurements": 1234, "models": 1, "trouble": None},
    "techniques": [
        {"name": "precision", "values": [standing("fp32"), standing("bf16"), standing("fp16-mixed", searched=False)]},
        {"name": "lora_rank", "values": [standing(0), standing(8, package="[peft]", reason="8 needs [peft]")]},
        {"name": "lora_targets", "values": [standing(None)]},
        {"name": "gradient_accumulation_steps", "values": []},
    ],
}


def test_doctor_shows_device_budget_and_reasons(shown: Shown) -> None:
    text = shown(doctor_table(DOCTOR), 140)
    assert "memory was 1.040 times what was predicted and steps took 1.25 times as long" in text
    assert "(median of 6 measurements, 2 of them long ago or on a busy machine)" in " ".join(text.split())
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
    broken = DOCTOR | {"store": DOCTOR["store"] | {"measurements": None, "trouble": "the store is damaged."}}
    assert "the store is damaged." in shown(doctor_table(broken), 140)


def test_what_was_cleared() -> None:
    def told(measurements: int | None, models: int | None) -> str:
        return cleared_text({"cleared": {"path": "/x", "measurements": measurements, "models": models}})

    assert told(2, 1) == "removed 2 measurements of 1 model from /x"
    assert told(0, 0) == "removed 0 measurements of 0 models from /x"
    assert told(None, None) == "removed what could not be read from /x"


def test_models_show_their_size_and_where_weights_are(shown: Shown) -> None:
    rows = [
        {"name": "llama-2-7b", "task": "causal-lm", "parameters": 6738415616, "hub": "meta-llama/Llama-2-7b-hf"},
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
    rows = [{"name": n, "description": "Only what is\nthe same.", "configs": c, "counted": how} for n, c, how in spaces]
    text = shown(spaces_table(rows, "for a model on a card"), 100)
    for words in ("Only what is the same.", " 1,234", "at most 1,234,567"):
        assert words in text
    assert "Counted without what is refused, for a model on a card." in text


@pytest.mark.parametrize("width", [10, 40])
def test_narrow_terminals_do_not_break_them(shown: Shown, width: int) -> None:
    shown(doctor_table(DOCTOR), width)
    shown(models_table([{"name": "a" * 30, "task": "causal-lm", "parameters": 1, "hub": "b" * 50}]), width)
