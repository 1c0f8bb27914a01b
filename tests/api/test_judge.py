"""Judge: finalists learn from a file for the same seconds, and change the best config only where that is asked."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autofit.api.judge import Judge, _learn
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.learning import LearningCurve
from autofit.core.options import search_options
from autofit.core.result import Result, SavedResult
from autofit.probe import Executor
from autofit.training import loop
from tests import tiny
from tests.report.conftest import search_result

DATA = Path(__file__).parents[2] / "examples" / "data" / "alice.txt"


class Trainer:
    """An executor whose trainings reach given losses, by precision; a number is a loss, an error is raised."""

    def __init__(self, **losses: float | BaseException) -> None:
        self.losses, self.asked = losses, list[tuple[Config, int]]()

    def run(
        self, function: Any, workload: None, saved: SavedResult, judge: Judge, seed: int, **_: Any
    ) -> Any:
        self.asked.append((saved.config, seed))
        found = self.losses[str(saved.config["precision"]).replace("-", "_")]
        if isinstance(found, BaseException):
            raise found
        return [1.0] * 10, [found + seed / 10] * 10


def judged(trainer: Trainer, **options: Any) -> tuple[Result, Result]:
    """The result of a search before and after."""
    found = search_result()
    assert found.best and found.runner_up
    found = dataclasses.replace(found, finalists=(found.best, found.runner_up))
    return found, Judge(DATA, **options)(found, cast(Executor, trainer), lambda event: None)


def test_each_finalist_is_trained_with_two_seeds_and_the_best_stays() -> None:
    before, after = judged(Trainer(bf16=1.0, bf16_mixed=2.0))
    assert after.best == before.best
    assert {
        curve.config["precision"]: curve.losses
        for curve in after.learning
        if not curve.config["lora_rank"]
    } == {
        "bf16": (1.0, 1.1),
        "bf16-mixed": (2.0, 2.1),
    }
    told = " ".join(after.notes)
    assert told.index("Loss 1.0500 (1.0000 and 1.1000) after up to 10 steps") < told.index(
        "Loss 2.0500"
    )
    assert after.to_json()["learning"][0]["steps"] == [10, 10]
    assert "learning" not in before.to_json()


def test_asked_for_the_least_loss_is_the_best() -> None:
    before, after = judged(Trainer(bf16=1.0, bf16_mixed=2.0), objective="loss-per-second")
    assert (after.best, after.runner_up) == (before.runner_up, before.best)
    assert after.tiers["full"] == before.runner_up


def test_what_cannot_be_trained_is_told_and_never_the_best() -> None:
    trainer = Trainer(bf16=ProbeError("training a finalist took more than 9 s."), bf16_mixed=2.0)
    before, after = judged(trainer, objective="loss-per-second")
    assert after.best == before.best
    assert any(note.endswith("took more than 9 s.") for note in after.notes)
    assert [seed for config, seed in trainer.asked if config["precision"] == "bf16"] == [0]


def test_ctrl_c_ends_the_search_with_what_is_known() -> None:
    _, after = judged(Trainer(bf16=KeyboardInterrupt(), bf16_mixed=2.0))
    assert after.stopped_by == "interrupt"
    assert LearningCurve(after.learning[-1].config) in after.learning


def test_a_finalist_learns_from_the_file_until_its_seconds_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by 10 ms whenever the loop looks: a busy machine would take too few steps."""
    clock = itertools.count(step=0.01)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    described = {**tiny.LLAMA, "vocab_size": 256, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    work = {"task": "causal-lm", "sequence_length": 32, "effective_batch_size": 8}
    source, config = (
        {"kind": "directory", "path": str(tmp_path)},
        Config({"precision": "bf16-mixed"}),
    )
    saved = SavedResult("model", work, source, {"device": "cpu"}, config, {})
    seconds, losses = _learn(None, saved, Judge(DATA, seconds=0.1, lr=1e-2), 0)
    assert len(seconds) == len(losses) > 2
    assert sum(seconds[1:]) >= 0.1 > sum(seconds[1:-1])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "none.txt"}, "the data file none.txt is not there."),
        ({"data": DATA, "weights": "none"}, "the directory none is not there."),
        ({"data": DATA, "seconds": 0}, "must be more than 0"),
        ({"data": DATA, "objective": "loss"}, "unknown objective 'loss'"),
    ],
)
def test_what_is_wrong_is_told_before_the_search(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Judge(**options)


def test_it_judges_named_models_on_one_device() -> None:
    named, several = tiny.llama_workload(), search_options(device="cpu", mem=1, devices=2)
    Judge(DATA).check(named, search_options(device="cpu", mem=1))
    with pytest.raises(InputError, match="on one device"):
        Judge(DATA).check(named, several)
    with pytest.raises(InputError, match="only named models"):
        Judge(DATA).check(tiny.mlp_workload(), search_options(device="cpu", mem=1))
