import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import whole_commands
from benchmarks.memory_models import MODELS
from benchmarks.whole_commands import (
    AUTOFIT,
    autofit_command,
    by_turns,
    finder_command,
    line,
    seconds_of,
)


def test_commands_run_by_turns_each_in_a_folder_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import os, pathlib, sys; pathlib.Path('mark').touch(exist_ok=False); "
        "open(sys.argv[1], 'a').write(sys.argv[2])"
    )
    commands = {name: [sys.executable, "-c", code, str(log), name] for name in ("a", "b")}
    seconds = by_turns(commands, 2)
    assert log.read_text() == "abab"
    assert [len(each) for each in seconds.values()] == [2, 2]
    assert all(0 < each < 60 for every in seconds.values() for each in every)


def test_a_finder_that_fails_counts_until_then_and_a_search_that_fails_is_told(
    tmp_path: Path,
) -> None:
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    assert seconds_of(fails, tmp_path / "one") > 0
    with pytest.raises(SystemExit, match="exit code 3"):
        seconds_of([*fails, "autofit"], tmp_path / "other")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("name", ["tiny-llama", "cnn"])
def test_a_search_finds_the_model_beside_it(name: str, tmp_path: Path) -> None:
    command = autofit_command(name, 2**29)
    assert command[1:4] == ["-m", "autofit", "search"]
    assert "--fast" in command
    assert command[command.index("--mem") + 1] == "0.5"
    model = tmp_path / "one" / command[command.index("--model") + 1].partition(":")[0]
    seconds_of([sys.executable, "-c", ""], tmp_path / "one")
    assert model.exists()
    if name != "cnn":
        assert json.loads((model / "config.json").read_text()) == dict(MODELS[name].config)
        assert command[command.index("--seq-len") + 1] == str(MODELS[name].sequence_length)
    assert finder_command(name, "accelerate", 7)[-3:] == [name, "accelerate", "7"]


def test_the_medians_and_how_many_times_those_of_a_finder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row: dict[str, Any] = {"workload": "cnn", "budget": "tight"}
    row["seconds"] = {AUTOFIT: [9.0, 12.0, 11.0], "accelerate": [4.0, 6.0, 5.5]}
    assert (
        line(row) == "cnn         tight   autofit search --fast 11.0 s | accelerate 5.5 s (x 2.0)"
    )


def test_every_problem_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        whole_commands, "seconds_of", lambda command, folder: 2.0 if "autofit" in command else 1.0
    )
    out = tmp_path / "figures.json"
    given = [
        "--workload",
        "cnn",
        "--budget",
        "tight",
        "medium",
        "--tool",
        "accelerate",
        "--rounds",
        "1",
    ]
    whole_commands.main([*given, "--out", str(out)])
    written = json.loads(out.read_text())
    assert [(each["workload"], each["budget"]) for each in written["problems"]] == [
        ("cnn", "tight"),
        ("cnn", "medium"),
    ]
    assert written["problems"][0]["seconds"] == {AUTOFIT: [2.0], "accelerate": [1.0]}
    assert written["about"]["threads"]
