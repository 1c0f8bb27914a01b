"""A step of a config written down by a child."""

import gzip
import json
from pathlib import Path

import pytest

from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB
from autofit.core.workload import Workload
from autofit.probe import LocalExecutor
from autofit.techniques import canonicalize
from tests import tiny

BUDGET = Budget(GIB, GIB)


def test_a_step_of_many_micro_batches_is_cut_to_four_and_an_update(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    workload = tiny.llama_workload(8)
    config = canonicalize({"micro_batch_size": 1}, workload, tiny.CPU)
    files = executor.trace(workload, config, tiny.CPU, BUDGET, directory=tmp_path)
    assert files["trace"] == str(tmp_path / "step_trace.json.gz")
    assert set(files) == {"trace", "operators", "tensorboard"}
    with gzip.open(files["trace"]) as file:
        names = [str(event.get("name", "")) for event in json.load(file)["traceEvents"]]
    assert sum(name == "aten::embedding" for name in names) == 4
    assert sum(name.startswith("Optimizer.step") for name in names) == 1


def test_a_step_that_cannot_be_run_is_told(executor: LocalExecutor, tmp_path: Path) -> None:
    plain = tiny.mlp_workload()
    workload = Workload(
        model=plain.model,
        batch=plain.batch,
        loss=lambda model, batch: 1 / 0,
        effective_batch_size=4,
    )
    config = canonicalize({}, workload, tiny.CPU)
    with pytest.raises(ProbeError, match="ended its process"):
        executor.trace(workload, config, tiny.CPU, BUDGET, directory=tmp_path)
    assert not list(tmp_path.iterdir())
