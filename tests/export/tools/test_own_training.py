"""Every tool trains, by its own command, from what is exported for it: loss, memory and the optimizer's state are those
of our own run, or the export says otherwise.

`pytest -m tools -n 0 tests/export/tools/test_own_training.py`; 20 s a case. `python -m benchmarks.exports_train` keeps
the figures.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exports_train import rows
from benchmarks.tool_runs import RUNS
from tests.export.tools.environments import ENVIRONMENTS, made

pytestmark = [pytest.mark.tools, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("tool", RUNS)
def test_it_trains_as_measured_or_as_announced(tool: str, tmp_path: Path) -> None:
    python = sys.executable
    if tool in ENVIRONMENTS:
        try:
            python = str(made(ENVIRONMENTS[tool], tmp_path / "environment"))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{tool} cannot be installed here: {error}")
    wrong = {row.case: row.wrong for row in rows(tool, python, tmp_path / "runs")}
    assert wrong == dict.fromkeys(RUNS[tool].cases)
