"""Files that are tuned, and then trained by their own tools as `--verify-in-tool` does it: each
tool's peak is what was said, and under the budget. What tuning writes is read by the tools' own
parsers.

`pytest -m tools -n 0 tests/export/tools/test_verified_in_tools.py`; some minutes a tool.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import autofit
from benchmarks.tuned_runs import FILES, given_to, rows
from tests.export.tools.environments import ENVIRONMENTS, made
from tests.export.tools.test_own_parsers import PARSERS, parsed

pytestmark = [pytest.mark.tools, pytest.mark.timeout(3600)]


def python_of(tool: str, folder: Path) -> str:
    """An interpreter that has the tool; skips the test where it cannot be installed."""
    if tool not in ENVIRONMENTS:
        return sys.executable
    try:
        return str(made(ENVIRONMENTS[tool], folder))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{tool} cannot be installed here: {error}")


@pytest.mark.parametrize("tool", FILES)
def test_its_peak_is_what_was_said(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of(tool, tmp_path / "environment")
    (tmp_path / "runs").mkdir()
    for name, value in given_to(tool, tmp_path / "runs").items():
        monkeypatch.setenv(name, value)
    first = next(iter(FILES[tool]))
    found = list(rows(tool, python, tmp_path / "runs", first))
    assert [row for row in found if not row.is_right] == []


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "msswift"])
def test_its_own_parser_takes_what_tuning_writes(tool: str, tmp_path: Path) -> None:
    written = []
    for name, keys in FILES[tool].items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False))
        tuned = autofit.tune(path, gpu="rtx-4090", out=tmp_path / name)
        assert tuned.changes
        file = tmp_path / f"{name}.tuned.yaml"
        file.write_text(tuned.text)
        written.append(file)

    assert (PARSERS / f"parse_{tool}.py").exists()
    refused = parsed(Path(python_of(tool, tmp_path / "environment")), tool, written)
    assert refused == {str(file): None for file in written}
