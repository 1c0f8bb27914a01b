from __future__ import annotations

from typing import Any

import pytest

from autofit.core.before_training import pass_note
from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import PREFERENCES as NAMES
from autofit.search.objectives.discounted import PREFERENCES, DiscountedSpeed
from autofit.search.ranking import Ranking

FULL: dict[str, Any] = {"precision": "bf16-mixed"}
LORA: dict[str, Any] = {"precision": "bf16", "lora_rank": 32}
LORA_8BIT = {**LORA, "optimizer": "adamw-8bit"}
QLORA = {**LORA, "quantization": "nf4"}
ROUNDED: dict[str, Any] = {"precision": "bf16"}


def chosen(prefer: str, *rows: tuple[dict[str, Any], float]) -> int:
    ranking = Ranking(0.03, lambda config: (), PREFERENCES[prefer])
    measurements = [
        Measurement(Config(knobs), Outcome.FITS, number, samples_per_second=speed)
        for number, (knobs, speed) in enumerate(rows)
    ]
    best = ranking.recommend(measurements)
    assert best is not None
    return best.number


def test_every_preference_has_its_rule() -> None:
    assert set(PREFERENCES) == set(NAMES)


@pytest.mark.parametrize(
    ("rival", "just_not", "enough"),
    [(LORA, 1.25, 1.4), (LORA_8BIT, 1.4, 1.5), (QLORA, 1.6, 1.8), (ROUNDED, 1.6, 1.8)],
)
def test_what_learns_less_faithfully_must_be_so_much_faster_than_full_training(
    rival: dict[str, Any], just_not: float, enough: float
) -> None:
    assert chosen("balanced", (FULL, 100.0), (rival, 100.0 * just_not)) == 0
    assert chosen("balanced", (FULL, 100.0), (rival, 100.0 * enough)) == 1


def test_by_speed_alone() -> None:
    assert chosen("fast", (FULL, 100.0), (QLORA, 104.0)) == 1


def test_by_faithfulness_before_any_speed() -> None:
    assert chosen("faithful", (FULL, 1.0), (LORA, 1000.0), (ROUNDED, 1000.0)) == 0
    assert chosen("faithful", (LORA, 1.0), (LORA_8BIT, 1000.0), (ROUNDED, 1000.0)) == 0
    assert chosen("faithful", (LORA, 100.0), (LORA, 120.0)) == 1


def test_within_a_tier_weights_that_keep_small_updates_win_unless_nothing_else_fits() -> None:
    assert chosen("balanced", (FULL, 100.0), (ROUNDED, 150.0)) == 0
    assert chosen("balanced", (ROUNDED, 150.0)) == 0


@pytest.mark.parametrize("objective", PREFERENCES.values())
@pytest.mark.parametrize(
    ("knobs", "share"),
    [
        ({"lora_rank": 0, "activation_checkpointing": "none"}, 1 / 3),
        ({"lora_rank": 0, "activation_checkpointing": "full"}, 1 / 4),
        ({"lora_rank": 8, "activation_checkpointing": "none"}, 1 / 2),
    ],
)
def test_a_pass_before_training_counts_as_in_one_epoch(
    objective: DiscountedSpeed, knobs: dict[str, Any], share: float
) -> None:
    def cost(reference: str) -> float:
        return objective.discount(Config({**knobs, "reference": reference}))

    assert cost("precomputed") == pytest.approx(cost("resident") * (1 + share))
    assert f"{share:.0%} of the time" in str(
        pass_note(Config({**knobs, "reference": "precomputed"}))
    )
    assert pass_note(Config({**knobs, "reference": "resident"})) is None
