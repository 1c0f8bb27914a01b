"""The link between ranks, measured."""

import time

import pytest
import torch

from autofit.core.links import Link
from autofit.distributed.measured_link import fitted, measured_link
from tests.ranks import on_ranks


def measured() -> tuple[Link, float]:
    began = time.perf_counter()
    return measured_link(torch.device("cpu")), time.perf_counter() - began


def test_ranks_measure_the_same_link_in_about_a_second() -> None:
    (one, took), (other, _) = on_ranks(2, measured)
    assert one == other
    assert 1e6 < one.bandwidth < 1e12
    assert 0 <= one.latency < 0.1
    assert took < 60


def test_a_line_is_found_again() -> None:
    sizes = [2.0**power for power in (11, 15, 18, 21, 23)]
    start, per_byte = fitted(sizes, [2e-4 + size / 1.7e9 for size in sizes])
    assert (start, per_byte) == (pytest.approx(2e-4), pytest.approx(1 / 1.7e9))
