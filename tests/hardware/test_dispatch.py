"""How fast the host calls small operators: measured, and then known."""

import itertools
from pathlib import Path

import pytest
import torch

from autofit.hardware import dispatch


def test_it_is_the_shortest_time_of_an_operator_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now, takes = [0.0], itertools.cycle([9.0, 4.0, 7.0])

    def chain(small: torch.Tensor) -> torch.Tensor:
        now[0] += next(takes)
        return small

    monkeypatch.setattr(dispatch, "chain", chain)
    monkeypatch.setattr(dispatch.time, "perf_counter", lambda: now[0])
    assert dispatch._measured() == 4.0 / 200  # a hundred additions and their gradients


def test_it_is_measured_once_for_each_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = iter([1e-6, 2e-6, 3e-6])
    monkeypatch.setattr(dispatch, "_measured", lambda: next(times))
    assert [dispatch.dispatch_seconds(name) for name in ("one", "one", "another", "one")] == [
        1e-6,
        1e-6,
        2e-6,
        1e-6,
    ]


def test_a_chain_is_of_as_many_operators_as_it_says() -> None:
    assert torch.equal(dispatch.chain(torch.zeros(3)), torch.full((3,), float(dispatch.OPERATORS)))
