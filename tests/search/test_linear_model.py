from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autofit.core.config import Config
from autofit.search.linear_model import Features, LinearModel, normal_below, normal_density

VALUES = {
    "precision": ("fp32", "bf16"),
    "micro_batch_size": (1, 2, 4, 8),
    "optimizer": ("adamw", "adamw-8bit"),
}
CONFIGS = [
    Config(dict(zip(VALUES, row, strict=True))) for row in itertools.product(*VALUES.values())
]


def truth(config: Config) -> float:
    effect = {"fp32": 0.6, "bf16": 0.0, "adamw": 0.3, "adamw-8bit": 0.0}
    size = config["micro_batch_size"]
    assert isinstance(size, int)
    return (
        20
        + effect[str(config["precision"])]
        + effect[str(config["optimizer"])]
        + 0.4 * math.log2(size)
    )


def prior(features: Features) -> LinearModel:
    return LinearModel.prior(np.zeros(features.width), slope=0.3, value=0.5)


def test_a_row_holds_an_intercept_a_slope_and_one_column_for_each_value() -> None:
    features = Features(VALUES)
    row = features.rows([Config(precision="bf16", micro_batch_size=8, optimizer="adamw")])[0]
    assert features.width == 2 + 8
    assert row[0] == 1
    assert row[1] == 1.5  # log2(8) beside the middle of 0, 1, 2, 3
    assert [name for name, on in zip(features.names, row[2:], strict=True) if on] == [
        ("precision", "bf16"),
        ("micro_batch_size", 8),
        ("optimizer", "adamw"),
    ]


def test_a_value_never_announced_is_unknown_not_an_error() -> None:
    row = Features(VALUES).rows(
        [Config(precision="fp8", micro_batch_size=None, optimizer="adamw")]
    )[0]
    assert sum(row[2:]) == 1


def test_without_measurements_it_says_the_prior() -> None:
    features = Features(VALUES)
    rows = features.rows(CONFIGS)
    mean, deviation = prior(features).learn(rows[:0], np.array([]), 0.1).predict(rows)
    assert not mean.any()
    assert (deviation > 1).all()


def test_learns_additive_effects_from_few_measurements() -> None:
    features = Features(VALUES)
    rows, values = features.rows(CONFIGS), np.array([truth(config) for config in CONFIGS])
    measured = [0, 3, 6, 9, 12, 13]
    mean, deviation = prior(features).learn(rows[measured], values[measured], 0.01).predict(rows)
    assert np.abs(mean - values).max() < 0.15
    assert (np.abs(mean - values) < 3 * deviation + 0.03).all()
    assert deviation[measured].max() < 0.011


def test_is_less_sure_of_values_it_has_not_seen() -> None:
    features = Features(VALUES)
    rows = features.rows(CONFIGS)
    seen = [place for place, config in enumerate(CONFIGS) if config["optimizer"] == "adamw"]
    unseen = [place for place in range(len(CONFIGS)) if place not in seen]
    values = np.array([truth(CONFIGS[place]) for place in seen])
    _, deviation = prior(features).learn(rows[seen], values, 0.01).predict(rows)
    assert deviation[unseen].min() > 10 * deviation[seen].max()


def test_learning_in_two_parts_is_learning_at_once() -> None:
    features = Features(VALUES)
    rows, values = features.rows(CONFIGS), np.array([truth(config) for config in CONFIGS])
    at_once = prior(features).learn(rows[:6], values[:6], 0.05)
    in_parts = prior(features).learn(rows[:3], values[:3], 0.05).learn(rows[3:6], values[3:6], 0.05)
    for one, two in zip(at_once.predict(rows), in_parts.predict(rows), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4)
    assert at_once.learnt == in_parts.learnt == 6
    assert at_once.surprise == pytest.approx(in_parts.surprise)


def test_of_many_measurements_no_more_is_kept_than_there_are_columns() -> None:
    features = Features(VALUES)
    rows = np.repeat(features.rows(CONFIGS), 3, axis=0)
    values = np.repeat([truth(config) for config in CONFIGS], 3) + np.tile(
        [-0.05, 0.0, 0.05], len(CONFIGS)
    )
    often = prior(features).learn(rows, values, 0.1)
    once = prior(features).learn(features.rows(CONFIGS), values[1::3], 0.1 / math.sqrt(3))
    assert len(rows) > len(often.gain) == features.width
    for one, two in zip(often.predict(rows), once.predict(rows), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_noise_may_be_common_to_some_measurements() -> None:
    features = Features(VALUES)
    rows, values = features.rows(CONFIGS), np.array([truth(config) for config in CONFIGS])
    apart = prior(features).learn(rows[:4], values[:4], np.full(4, 0.05))
    alike = prior(features).learn(rows[:4], values[:4], np.eye(4) * 0.05**2)
    np.testing.assert_allclose(alike.predict(rows), apart.predict(rows))
    # What two are off by together says nothing of how they differ.
    off = values[:4] + np.array([0.0, 0.0, 3.0, 3.0])
    together = np.eye(4) * 0.01**2
    together[2:, 2:] += 5.0**2
    mean, _ = prior(features).learn(rows[:4], off, together).predict(rows)
    assert mean[3] - mean[2] == pytest.approx(values[3] - values[2], abs=0.05)
    assert mean[:2] == pytest.approx(values[:2], abs=0.05)


def test_the_normal_distribution() -> None:
    z = np.array([-40.0, -1.0, 0.0, 1.0])
    assert normal_below(z) == pytest.approx([0.0, 0.158655, 0.5, 0.841345], abs=1e-6)
    assert normal_density(z) == pytest.approx([0.0, 0.241971, 0.398942, 0.241971], abs=1e-6)
