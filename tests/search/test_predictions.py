import math

import numpy as np

from autofit.core.config import Config
from autofit.search.predictions import Predictions

SMALL, LARGE, UNKNOWN = (Config({"knob": value}) for value in ("small", "large", "unknown"))
EXPECTED = Predictions.of([SMALL, LARGE, UNKNOWN], [1e9, 9e9, math.nan], [1.0, 4.0, math.nan])


def test_only_what_is_far_too_large_is_surely_so() -> None:
    assert EXPECTED.surely_exceeds(LARGE, 5e9)
    assert not EXPECTED.surely_exceeds(LARGE, 8e9)  # predictions may be a quarter too high
    assert not EXPECTED.surely_exceeds(UNKNOWN, 1.0)


def test_throughput_is_the_other_way_round_than_time() -> None:
    fast, slow = EXPECTED.log_throughput([SMALL, LARGE])
    assert math.isclose(fast - slow, math.log(4.0))


def test_what_is_not_known_counts_as_the_middle() -> None:
    known = EXPECTED.log_bytes([SMALL, LARGE])
    assert EXPECTED.log_bytes([UNKNOWN])[0] == np.log(5e9)
    assert known[0] < EXPECTED.log_bytes([UNKNOWN])[0] < known[1]


def test_nothing_known_at_all_is_no_error() -> None:
    nothing = Predictions.of([UNKNOWN], [math.nan], [math.nan])
    assert np.isfinite(nothing.log_bytes([UNKNOWN, SMALL])).all()


def test_the_most_promising_fit_and_are_fast() -> None:
    knobs = [(1e9, 3.0), (1e9, 1.0), (9e9, 0.1), (1e9, 2.0), (7e9, 0.1)]  # bytes and seconds
    configs = [Config(number=number) for number in range(len(knobs))]
    expected = Predictions.of(configs, *zip(*knobs, strict=True))

    def numbers(limit: float, most: int) -> list[object]:
        return [config["number"] for config in expected.most_promising(configs, limit, most)]

    assert numbers(5e9, 2) == [1, 3]
    assert numbers(5e9, 4) == [0, 1, 3, 4]  # of those that are too large, the smallest
    assert numbers(math.inf, 2) == [2, 4]
    assert numbers(1e8, 9) == [0, 1, 2, 3, 4]
