"""A fake executor for the searches of these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.tuning import measured as tune
from tests import tiny
from tests.tuning.searching import TRAITS, Bench, FakeExecutor, by_micro_batch


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    executor = FakeExecutor(by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}), tiny.CPU, TRAITS)
    monkeypatch.setattr(tune, "LocalExecutor", lambda logs, timeout: executor)
    made = Bench(folder=tmp_path, executor=executor)
    made.space(micro_batch_size=[1, 2, 4, 8])
    yield made


# Verifying
