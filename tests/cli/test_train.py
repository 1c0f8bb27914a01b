"""`autofit train`: what it prints, how an interrupt ends it, and what is wrong with its input."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import RESULT, Run, assert_error

DATA = Path(__file__).parents[2] / "examples" / "data"
TRAIN = ("train", "run/result.yaml", "--data", DATA / "alice.txt")


@pytest.mark.usefixtures("searched")
def test_the_result_of_a_search_is_trained(run: Run) -> None:
    trained = run(*TRAIN, "--from-scratch", "--steps", "40", "--lr", "0.01", "--output", "out")
    assert trained.code == 0
    first, last = map(float, trained.out.strip().removeprefix("40 steps, loss ").split(" -> "))
    assert last < 0.75 * first
    assert "step 40 of 40: loss" in trained.err
    further = (
        "--weights",
        "out/model",
        "--steps",
        "1",
        "--eval-data",
        DATA / "alice.txt",
        "--padding",
        "--quiet",
    )
    evaluated = run(*TRAIN, *further, "--schedule", "cosine", "--warmup-steps", "1")
    assert ", evaluation loss " in evaluated.out
    assert "step 1" not in evaluated.err
    assert float(evaluated.out.split(" -> ")[1].split(",")[0]) < 0.8 * first
    finished = run(*TRAIN, "--from-scratch", "--steps", "40", "--output", "out", "--resume")
    assert (finished.code, finished.out) == (0, trained.out)
    assert "nothing is left to train: the run has done 40 steps." in finished.err


@pytest.mark.usefixtures("searched")
def test_a_step_of_a_training_is_recorded(here: Path, run: Run) -> None:
    recorded = run(
        *TRAIN, "--from-scratch", "--memory-snapshot", "--steps", "3", "--output", "out"
    ).err
    assert "one step was recorded: out/step_trace.json.gz (for ui.perfetto.dev), " in recorded
    assert (here / "out" / "step_trace.json.gz").exists()
    short = run(
        *TRAIN, "--from-scratch", "--memory-snapshot", "--steps", "2", "--output", "short"
    ).err
    assert "no step was recorded: fewer than three were trained." in short


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((), "interrupted; with --output it could be resumed\n"),
        (("--output", "o"), "interrupted; go on with --resume --output o\n"),
        # where --resume would be refused
        (("--output", "none"), "interrupted; nothing was trained yet\n"),
    ],
)
def test_an_interrupted_training_tells_how_to_go_on(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch, output: tuple[str, ...], message: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autofit.api.train.train", interrupted)
    (here / "result.yaml").write_text(RESULT)
    (here / "o").mkdir()
    printed = run("train", "result.yaml", "--data", "mine.py", "--from-scratch", *output)
    assert (printed.code, printed.err) == (130, message)


def test_a_training_that_is_started_again_runs_nothing_that_lies_in_the_current_directory(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def out_of_memory(*_: Any, restart: Callable[[], None], **__: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                os, "execve", lambda _, command, environment: started.append((command, environment))
            )
            restart()
        raise KeyboardInterrupt

    monkeypatch.setattr("autofit.api.train.train", out_of_memory)
    (here / "result.yaml").write_text(RESULT)
    run("train", "result.yaml", "--data", "mine.py", "--from-scratch", "--output", "o")
    [(command, environment)] = started
    assert command[-1] == "--resume"

    for name in ("types", "yaml", "signal", "autofit"):
        (here / f"{name}.py").write_text("open('imported', 'w')\nraise SystemExit(3)\n")
    beginning = command[: command.index("train")]
    done = subprocess.run(
        [*beginning, "--help"],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (here / "imported").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.yaml", "--from-scratch"), ["the file none.yaml is not there"]),
        (("broken.yaml", "--from-scratch"), ["broken.yaml cannot be read as YAML"]),
        (("other.yaml", "--from-scratch"), ["other.yaml is not a result of autofit: it lacks"]),
        (("other.yaml",), ["say what to start from", "--from-scratch"]),
        (("other.yaml", "--from-scratch", "--weights", "llama"), ["say what to start from"]),
        (("other.yaml", "--weights", "none"), ["the directory none is not there"]),
        (("other.yaml", "--from-scratch", "--steps", "x"), ["'--steps'"]),
        (
            ("other.yaml", "--from-scratch", "--learn", "some"),
            ["learn must be one of assistant, all, not 'some'"],
        ),
        (
            ("other.yaml", "--from-scratch", "--memory-snapshot"),
            ["has nowhere to write to", "Give --output DIR"],
        ),
        (
            ("other.yaml", "--from-scratch", "--sample-every", "9"),
            ["have nowhere to be written to", "Give --output DIR"],
        ),
        (
            ("other.yaml", "--from-scratch", "--sample-prompt", "a dog"),
            ["none are to be made", "--sample-every 100"],
        ),
    ],
)
def test_bad_input_to_train(
    here: Path, run: Run, arguments: tuple[str, ...], words: list[str]
) -> None:
    (here / "broken.yaml").write_text("config: [")
    (here / "other.yaml").write_text("some: file")
    assert_error(run("train", *arguments, "--data", DATA / "alice.txt"), *words, as_json=False)
