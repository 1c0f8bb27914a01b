"""Tables of plain data."""

from collections.abc import Callable
from typing import Any

import pytest

from autofit.core.hardware import GIB, Hardware
from autofit.report import doctor_table, models_table, spaces_table

Shown = Callable[..., str]
DOCTOR: dict[str, Any] = {
    "hardware": Hardware("cuda", "NVIDIA [H200]", 140 * GIB, 128 * GIB, 100 * GIB, 16, (9, 0)).to_dict(),
    "budget_gib": 140.0,
    "versions": {"torch": "2.13.0", "peft": "0.21.2"},
    "techniques": [
        {"name": "precision", "choices": ["fp32", "bf16"], "unavailable": {}},
        {"name": "lora_rank", "choices": [0, 8], "unavailable": {"8": "needs [peft]"}},
        {"name": "lora_targets", "choices": [None], "unavailable": {}},
    ],
}


def test_doctor_shows_device_budget_and_reasons(shown: Shown) -> None:
    text = shown(doctor_table(DOCTOR), 100)
    for words in (
        "NVIDIA [H200] (cuda)",
        "140.0 GiB",
        "100.0 GiB free of 128.0, 16 cores",
        "torch 2.13.0, peft 0.21.2",
    ):
        assert words in text
    assert "fp32, bf16" in text
    assert "8: needs [peft]" in text
    assert "null" in text


def test_models_show_their_size_and_where_weights_are(shown: Shown) -> None:
    rows = [
        {"name": "llama-2-7b", "task": "causal-lm", "parameters": 6738415616, "hub": "meta-llama/Llama-2-7b-hf"},
        {"name": "tiny-llama", "task": "causal-lm", "parameters": 6917376, "hub": None},
        {"name": "micro", "task": "causal-lm", "parameters": 12345, "hub": None},
    ]
    text = shown(models_table(rows), 100)
    for words in ("6.74B", "6.92M", "12,345", "meta-llama/Llama-2-7b-hf"):
        assert words in text


def test_spaces_show_what_they_allow(shown: Shown) -> None:
    text = shown(spaces_table([{"name": "exact", "description": "Only what is\nthe same mathematics.", "path": "x"}]))
    assert "Only what is the same mathematics." in text


@pytest.mark.parametrize("width", [10, 40])
def test_narrow_terminals_do_not_break_them(shown: Shown, width: int) -> None:
    shown(doctor_table(DOCTOR), width)
    shown(models_table([{"name": "a" * 30, "task": "causal-lm", "parameters": 1, "hub": "b" * 50}]), width)
