"""`autofit tune`: the difference on stdout, the file beside, errors in a sentence."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autofit.api.tune as api
from autofit.api.in_tool import InTool, ToolPython
from autofit.export.runs import run_of
from tests.api.test_tune import written
from tests.cli.command import Run
from tests.following import unfollowed

Function = Callable[..., Any]


def remembering(function: Function) -> Function:
    """A function that answers the same question once, whichever folder its model is in."""
    answers: dict[str, Any] = {}

    def answer(workload: Any, *given: Any, listener: Any = None, **options: Any) -> Any:
        question = repr((workload.effective_batch_size, given, options))
        if question not in answers:
            answers[question] = function(workload, *given, **options)
        return answers[question]

    return answer


@pytest.fixture(scope="module")
def answering() -> dict[str, Function]:
    """What searches and predicts, and remembers: the tests ask mostly about the same file."""
    return {name: remembering(getattr(api, name)) for name in ("search", "predict")}


@pytest.fixture
def searched_once(answering: dict[str, Function], monkeypatch: pytest.MonkeyPatch) -> None:
    unfollowed(monkeypatch)
    for name, function in answering.items():
        monkeypatch.setattr(api, name, function)


@pytest.mark.usefixtures("here", "searched_once")
def test_the_difference_is_printed_and_the_file_written(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    printed = run("tune", str(path), "--gpu", "rtx-4090", "--quiet")
    assert printed.code == 0
    assert printed.out.startswith("--- axolotl.yaml\n+++ axolotl.tuned.yaml\n")
    tuned = tmp_path / "axolotl.tuned.yaml"
    assert f"Written to {tuned}." in printed.err
    assert "as it was: " in printed.err
    assert tuned.exists()

    again = run("tune", str(tuned), "--gpu", "rtx-4090", "--quiet", "--json")
    assert again.code == 0
    assert again.json["tool"] == "axolotl"
    assert again.json["text"] == tuned.read_text() or again.json["changes"]


@pytest.mark.usefixtures("here", "searched_once")
def test_a_command_comes_back_as_a_command(run: Run, tmp_path: Path) -> None:
    model = written(tmp_path).parent / "model"
    command = ["swift", "sft", "--model", str(model), "--tuner_type", "full", "--max_length", "32"]
    printed = run("tune", "--gpu", "rtx-4090", "--quiet", "--", *command)
    assert printed.code == 0
    words = shlex.split(printed.out.replace("\\\n", " "))
    assert words[: len(command)] == command
    assert "--per_device_train_batch_size" in words
    assert "as it was: " in printed.err

    kept = run("tune", "--in-place", "--", *command)
    assert kept.code == 2
    assert "in no file" in kept.err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("none.yaml",), "none.yaml"),
        (("axolotl.yaml", "--in-place", "--output", "x.yaml"), "--output and --in-place"),
        (("axolotl.yaml", "--gpu", "abacus"), "abacus"),
        (("axolotl.yaml", "--keep", "wings", "--gpu", "rtx-4090"), "wings is no key"),
        (("axolotl.yaml", "--task", "grpo"), "estimate"),
        (("axolotl.yaml", "--gpu", "rtx-4090", "--devices", "0"), "devices must be a whole number"),
    ],
)
def test_wrong_input_ends_in_a_sentence(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    original = written(tmp_path).read_text()
    monkeypatch.chdir(tmp_path)
    printed = run("tune", *arguments, "--quiet")
    assert printed.code == 2
    assert reason in printed.err
    assert (tmp_path / "axolotl.yaml").read_text() == original


@pytest.mark.usefixtures("here")
def test_a_tool_that_is_not_installed_is_said_before_the_search(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path)
    given = ("--device", "cpu", "--mem", "1", "--verify-in-tool")
    few = run("tune", str(path), *given)
    assert few.code == 2
    assert "rows for a tool need 256" in few.err
    other = run("tune", str(path), "--tool-python", "python", *given[:-1])
    assert other.code == 2
    assert "none is asked" in other.err
    assert not (tmp_path / "axolotl.tuned.yaml").exists()


@pytest.mark.usefixtures("here", "searched_once")
@pytest.mark.parametrize("failed", [None, "axolotl did not train."])
def test_what_its_own_tool_took_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: str | None
) -> None:
    took = InTool(
        tool="axolotl",
        peak_bytes=2**30,
        tokens_per_second=1234.0,
        said_bytes=2**29,
        said_tokens_per_second=1200.0,
        failed=failed,
        notes=("axolotl needs 1.00 GiB, 100% more than was said.",),
        log=None,
    )
    tool = ToolPython(run_of("axolotl"), "python")
    monkeypatch.setattr("autofit.api.tune.python_of_tool", lambda *_: tool)
    monkeypatch.setattr("autofit.api.tune.train_in_tool", lambda *_, **__: took)
    path = written(tmp_path)
    printed = run("tune", str(path), "--gpu", "rtx-4090", "--verify-in-tool", "--quiet")
    assert printed.code == (0 if failed is None else 4)
    lines = printed.err.splitlines()
    assert "in axolotl: 1.00 GiB, 1,234 tokens/s; said were 0.50 GiB, 1,200 tokens/s" in lines
    assert took.notes[0] in lines
    assert failed is None or failed in lines
    assert (tmp_path / "axolotl.tuned.yaml").exists()

    plain = run("tune", str(path), "--gpu", "rtx-4090", "--verify-in-tool", "--quiet", "--json")
    assert plain.json["in_tool"] == took.to_dict()
