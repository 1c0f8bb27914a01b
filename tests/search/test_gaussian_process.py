from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.search.encoding import Encoding
from autofit.search.gaussian_process import GaussianProcess, Mixture

VALUES = {
    "precision": ("fp32", "bf16"),
    "micro_batch_size": (1, 2, 4, 8),
    "optimizer": ("adamw", "adamw-8bit"),
}
CONFIGS = [
    Config(dict(zip(VALUES, row, strict=True))) for row in itertools.product(*VALUES.values())
]
NOISE = 0.02
POOL = Encoding(CONFIGS)


def predict(measured: list[Config], values: np.ndarray, at: list[Config] | None = None) -> Mixture:
    return GaussianProcess(list(VALUES), POOL).predict(
        measured, values, NOISE**2 * np.eye(len(values)), at
    )


def deviation(mixture: Mixture) -> np.ndarray:
    """Of each config, over all scales."""
    second = mixture.weights @ (mixture.deviations**2 + mixture.means**2)
    return np.asarray(np.sqrt(second - mixture.mean**2))


def test_without_measurements_predictions_are_taken_as_they_are() -> None:
    found = predict([], np.array([]))
    assert not found.mean.any()
    assert found.weights.sum() == pytest.approx(1.0)
    assert (deviation(found) > 0.1).all()


@given(st.floats(-1, 1))
def test_what_all_predictions_are_off_by_is_mostly_learnt_from_one_probe(common: float) -> None:
    found = predict(CONFIGS[:1], np.array([common]))
    assert found.mean[0] == pytest.approx(common, abs=0.03)
    assert (0.5 * abs(common) <= np.abs(found.mean) + 1e-9).all()
    assert (np.abs(found.mean) <= abs(common) + 1e-9).all()


def test_what_is_measured_is_known_and_what_is_like_it_better_than_what_is_not() -> None:
    at = [Config(precision="bf16", micro_batch_size=2, optimizer="adamw")]
    at.append(Config(precision="fp32", micro_batch_size=2, optimizer="adamw"))
    found = predict(at, np.array([0.3, 0.0]))
    means, deviations = (
        dict(zip(CONFIGS, each.tolist(), strict=True)) for each in (found.mean, deviation(found))
    )
    neighbour, far = (
        at[0].replace(micro_batch_size=4),
        at[0].replace(micro_batch_size=8, optimizer="adamw-8bit"),
    )
    assert means[at[0]] == pytest.approx(0.3, abs=0.03)
    assert means[at[0]] > means[neighbour] > means[far] > 0.15
    assert deviations[at[0]] < 1.5 * NOISE < deviations[neighbour] < deviations[far]


def test_good_predictions_are_trusted_more_and_poor_ones_less() -> None:
    at = CONFIGS[::3]
    good, poor = (predict(at, np.array([size, -size] * 3)) for size in (0.01, 0.6))
    assert good.weights[0] > 0.5 > good.weights[-1]
    assert poor.weights[-1] > 0.9
    assert deviation(good).max() < deviation(poor).min() * 2


@given(st.lists(st.integers(0, len(CONFIGS) - 1), min_size=1, max_size=8, unique=True))
def test_the_order_of_measurements_says_nothing(places: list[int]) -> None:
    values = np.linspace(-0.2, 0.2, len(places))
    forth = predict([CONFIGS[place] for place in places], values)
    back = predict([CONFIGS[place] for place in reversed(places)], values[::-1])
    np.testing.assert_allclose(forth.mean, back.mean, atol=1e-6)
    np.testing.assert_allclose(deviation(forth), deviation(back), atol=1e-4)


def test_configs_that_the_pool_lacks_are_no_obstacle() -> None:
    other = Config(precision="fp8", micro_batch_size=None, optimizer="adamw")
    at = [CONFIGS[0], other]
    found = predict(at, np.array([0.1, 0.2]), [*CONFIGS, other])
    assert found.mean[-1] == pytest.approx(0.2, abs=0.03)
    with_pool = predict(at, np.array([0.1, 0.2]))
    np.testing.assert_allclose(with_pool.mean, found.mean[:-1])


@given(st.lists(st.integers(0, len(CONFIGS) - 1), min_size=1, max_size=8))
def test_it_is_the_textbook_s_process_also_where_something_is_measured_twice(
    places: list[int],
) -> None:
    """Algorithm 2.1 written out, scale by scale."""

    def alike(one: Config, other: Config) -> float:
        sizes = [float(np.log2(int(each["micro_batch_size"] or 1))) for each in (one, other)]
        apart = sum(one[knob] != other[knob] for knob in ("precision", "optimizer"))
        return float(0.75**apart * 0.85 ** abs(sizes[0] - sizes[1]))

    measured, values = [CONFIGS[place] for place in places], np.linspace(-0.3, 0.4, len(places))
    found, evidence = predict(measured, values), []
    for number, scale in enumerate((0.06, 0.13, 0.26, 0.52)):
        among = np.array([[scale**2 * alike(a, b) + 0.16 for b in measured] for a in measured])
        there = np.array([[scale**2 * alike(a, b) + 0.16 for b in CONFIGS] for a in measured])
        known = among + NOISE**2 * np.eye(len(places))
        solved = np.linalg.solve(known, there)
        np.testing.assert_allclose(found.means[number], values @ solved, atol=1e-6)
        variances = scale**2 + 0.16 - (there * solved).sum(axis=0)
        np.testing.assert_allclose(found.deviations[number] ** 2, variances, atol=1e-6)
        evidence.append(
            -0.5 * values @ np.linalg.solve(known, values) - 0.5 * np.linalg.slogdet(known)[1]
        )
    weights = np.array([0.15, 0.55, 0.2, 0.1]) * np.exp(np.array(evidence) - max(evidence))
    np.testing.assert_allclose(found.weights, weights / weights.sum(), atol=1e-6)


@pytest.mark.parametrize(("knob", "alone"), [("quantization", True), ("attention", False)])
def test_what_is_wrong_of_a_whole_models_kernels_is_not_believed_of_others(
    knob: str, alone: bool
) -> None:
    values = {knob: ("one", "other"), "optimizer": ("adamw", "adamw-8bit", "adafactor", "sgd")}
    configs = [
        Config(dict(zip(values, row, strict=True))) for row in itertools.product(*values.values())
    ]
    process = GaussianProcess(list(values), Encoding(configs))
    ones, others = configs[:4], configs[4:]
    found = process.predict(ones[:3], np.full(3, -0.6), NOISE**2 * np.eye(3))
    means, deviations = (
        dict(zip(configs, each.tolist(), strict=True)) for each in (found.mean, deviation(found))
    )
    assert means[ones[3]] == pytest.approx(-0.6, abs=0.06)  # of the same kind: the error is theirs
    assert all(means[config] > -0.5 for config in others) is alone
    assert (deviations[others[3]] > 2 * deviations[ones[3]]) is alone
