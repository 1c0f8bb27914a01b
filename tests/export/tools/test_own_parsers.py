"""Every tool's own parser, in an environment of its own, takes what is exported for it and refuses what is wrong.

`pytest -m tools -n 0 tests/export/tools`: each environment takes a minute or two to install. That a run trains, or
fits, is what no parser shows.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, source
from tests.export.tools.environments import ENVIRONMENTS, environment_variables, made

PARSERS = Path(__file__).with_name("own_parsers")

pytestmark = [pytest.mark.tools, pytest.mark.timeout(1800)]


@pytest.fixture(params=ENVIRONMENTS)
def tool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A tool's name and the interpreter of its environment."""
    folder = tmp_path / "environment"
    try:
        python = made(ENVIRONMENTS[request.param], folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{request.param} cannot be installed here: {error}")
    yield request.param, python
    shutil.rmtree(folder, ignore_errors=True)


def test_its_own_parser_takes_what_is_exported_and_refuses_what_is_wrong(
    tool: tuple[str, Path], tmp_path: Path
) -> None:
    name, python = tool
    good, bad = [], []
    device = "cuda" if name == "llamafactory" else "cpu"  # it holds bfloat16 on a GPU alone
    for case, knobs in CASES.items():
        for file, text in write(tool_named(name), source(device, **knobs)).files.items():
            if file.endswith("_accelerate.yaml"):
                continue  # test_accelerate.py reads these
            good.append(tmp_path / case / file)
            good[-1].parent.mkdir(parents=True, exist_ok=True)
            good[-1].write_text(text)
    for number, spoil in enumerate(ENVIRONMENTS[name].wrong):
        bad.append(tmp_path / f"wrong{number}" / good[0].name)
        bad[-1].parent.mkdir()
        bad[-1].write_text(spoil(good[0].read_text()))
    refused = parsed(python, name, [*good, *bad])
    assert {path: refused[str(path)] for path in good} == dict.fromkeys(good)
    assert all(refused[str(path)] for path in bad), refused


def parsed(python: Path, name: str, files: list[Path]) -> dict[str, str | None]:
    """What each file was refused for, by its path."""
    command = [python, "-P", PARSERS / "run.py", PARSERS / f"parse_{name}.py", *files]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env=environment_variables(),
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file"')]
    return {line["file"]: line["error"] for line in lines}
