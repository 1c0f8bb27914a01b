"""What to type to go on with a found config."""

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.result import Result
from autofit.report.next_steps import commands, written

Results = Callable[..., Result]


def test_what_to_type(result: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs" / "a"
    told = dict(commands(result(), folder))
    assert f"autofit train '{folder}/result.yaml' --data DATA" in told["Train"]
    monkeypatch.chdir(tmp_path)
    told = dict(commands(result(), folder))
    assert told["Train"].startswith("autofit train 'my runs/a/result.yaml' --data DATA")
    assert told["Or without autofit"].startswith("python 'my runs/a/train.py' --data DATA")


def test_what_the_search_was_given_is_named(result: Results, tmp_path: Path) -> None:
    given = {**result().source, "data": "my data.jsonl", "weights": "./llama"}
    told = dict(commands(result(source=given), tmp_path))
    for command in ("Train", "Or without autofit"):
        assert told[command].endswith(" --data 'my data.jsonl' --weights ./llama --output OUT")


def test_a_workload_that_lives_in_a_process_is_trained_there(
    result: Results, tmp_path: Path
) -> None:
    told = dict(commands(result(source={}, files={}), tmp_path))
    assert list(told) == ["Train in Python"]
    assert "autofit.fit(model, loader, config=config" in told["Train in Python"]


def test_a_directory_may_have_any_name(
    result: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "-run",
        "--out",
        'it\'s a "run" --x',
        "a\nb",
        "\x1b[2J\u2028",
        "back\\slash",
        "\u6a21" * 83,
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "result.yaml").write_text("config: {rank: 1}")
        given = {"data": f"{name}/data", "weights": f"{name}/weights"}
        told = dict(commands(result(source=given), folder))

        words = [
            f"{name}/result.yaml",
            "--data",
            f"{name}/data",
            "--weights",
            f"{name}/weights",
            "--output",
            "OUT",
        ]
        words = [f"./{word}" if word.startswith("-") and "/" in word else word for word in words]
        script = told["Train"].removeprefix("autofit train ")
        read = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {script}"], capture_output=True, check=True
        ).stdout
        assert read.decode().split("\0")[:-1] == words
        assert told["Train"].isprintable()

        snippet = ast.walk(ast.parse(dict(commands(result(source={}), folder))["Train in Python"]))
        (opened,) = (
            node
            for node in snippet
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open"
        )
        assert (folder / "result.yaml").samefile(ast.literal_eval(opened.args[0]))


def test_what_was_written_lies_in_one_directory(result: Results, shown: Callable[..., str]) -> None:
    files = {
        "result": "runs/x/result.yaml",
        "script": None,
        "exports": "runs/x/exports",
        "trace": "runs/x/t.json.gz",
    }
    found = written(result(files=files))
    assert found
    lines = [line.rstrip() for line in shown(found).splitlines()]
    assert lines == [
        "Written to runs/x:",
        "  result.yaml  the config, and what was measured",
        "  exports/     the same for other training tools",
        "  t.json.gz    one step of the best config, for ui.perfetto.dev",
    ]
    assert written(result(files={"result": None})) is None
