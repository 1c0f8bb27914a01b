"""The best of each tier side by side."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from autofit.core.config import Config
from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.report.tiers import learns_with, tier_rows, tiers_table

Results = Callable[..., Result]
Measured = Callable[..., Measurement]


@pytest.mark.parametrize(
    ("knobs", "trained", "words"),
    [
        ({"precision": "fp32"}, None, "all weights in 32 bits"),
        ({"precision": "bf16"}, 1000, "all weights, 1,000 parameters in 16 bits"),
        (
            {"lora_rank": 32, "precision": "bf16-mixed"},
            640,
            "rank 32, 640 parameters in 32 bits, beside 16-bit weights",
        ),
        (
            {"lora_rank": 8, "precision": "bf16", "quantization": "nf4-dq"},
            None,
            "rank 8 in 16 bits, beside 4-bit weights",
        ),
        ({"head_only": True}, None, "the head in 32 bits"),
    ],
)
def test_what_a_config_learns_with(knobs: dict[str, Any], trained: int | None, words: str) -> None:
    assert learns_with(Config(knobs), trained) == words


def test_tiers_stand_side_by_side_with_what_they_cost(result: Results, measured: Measured) -> None:
    qlora = measured(150, 0.5, precision="bf16", lora_rank=32, quantization="nf4")
    tiers = {**result().tiers, "qlora": qlora}
    rows = tier_rows(result(tiers=tiers, trained={"lora": 640}))
    assert [(row.title, row.memory, row.against) for row in rows] == [
        ("all weights", "1.50", "the most faithful"),
        ("LoRA", "0.90", "40 % slower"),
        ("QLoRA", "0.50", "50 % faster"),
    ]
    assert rows[1].learns_with.startswith("rank 16, 640 parameters in 32 bits")


def test_one_tier_alone_has_nothing_beside_it(result: Results) -> None:
    alone = {"full": result().best, "lora": None, "qlora": None}
    assert tiers_table(result(tiers=alone)) is None


def test_the_table_names_every_tier(result: Results) -> None:
    console = Console(width=100, record=True, file=None)
    with console.capture() as captured:
        console.print(tiers_table(result()))
    text = captured.get()
    assert "learns with" in text
    assert "all weights in 32 bits" in text
    assert "40 % slower" in text
