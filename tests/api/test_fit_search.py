"""fit with a search before it: what is searched, and which results are used again."""

import importlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.api.fit import fit
from autofit.core.errors import NothingFitsError
from autofit.core.events import Event, Note
from autofit.core.files import cache_file
from autofit.core.record import Record
from autofit.core.result import Result
from autofit.tuning import measured as tune
from tests import tiny
from tests.api.fitting import NARROW, StoppedError, batches, fitted, mlp, stop_at


def asked(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> tuple[Any, str]:
    """The formats that are to be kept, and the space, as a search would be given them."""
    given: list[Any] = []

    def run_search(workload: Any, options: Any, listener: Any) -> Any:
        given.append((workload.keeps, options.space))
        raise NothingFitsError("as far as this test goes.")

    monkeypatch.setattr(importlib.import_module("autofit.api.fit"), "run_search", run_search)
    with pytest.raises(NothingFitsError):
        fitted(model, config=None, **options)
    return given[0]


def test_the_default_space_keeps_the_format_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, mlp().bfloat16()) == ((("bfloat16",), ()), "full")
    assert asked(monkeypatch, mlp(), set={"precision": "bf16"}) == (None, "full")
    assert asked(monkeypatch, mlp(), space="lora") == (None, "lora")
    assert asked(monkeypatch, mlp(), set={"lora_rank": 8}) == (((), ("float32",)), "full")


def test_a_search_for_clipped_training_leaves_out_steps_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be refused when training begins: clipping by the global norm needs all gradients at once."""
    asked = []

    def run_search(workload: Any, options: Any, listener: Any) -> Any:
        asked.append(dict(options.set))
        raise NothingFitsError("as far as this test goes.")

    monkeypatch.setattr(importlib.import_module("autofit.api.fit"), "run_search", run_search)
    for given in ({}, {"set": {"precision": "fp32"}}, {"max_grad_norm": None}):
        with pytest.raises(NothingFitsError):
            fit(mlp(), batches(), loss=tiny.classify, lr=1e-2, **{"max_grad_norm": 1.0, **given})
    assert asked == [
        {"optimizer_in_backward": (False,)},
        {"optimizer_in_backward": (False,), "precision": ("fp32",)},
        {},
    ]


def as_written(result: Result) -> Result:
    """The result as its record holds it, whose seconds are rounded."""
    return replace(result, search_seconds=round(result.search_seconds, 3))


@pytest.mark.usefixtures("shared_zygote")
def test_search_then_train_then_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {
        "config": None,
        "mem": 1,
        "trials": 2,
        "epochs": 2,
        "set": NARROW | {"micro_batch_size": [4, 8]},
    }
    model = mlp()
    with pytest.raises(StoppedError):  # after the search, before any checkpoint
        fitted(mlp(), output_dir=tmp_path, callbacks=(stop_at(0),), **how)
    trained = fitted(model, output_dir=tmp_path, search="always", **how)
    assert trained.model is model
    assert isinstance(trained.result, Result)
    assert trained.result.best
    assert trained.result.best.verified
    assert trained.result.run_directory == str(tmp_path / "search")
    assert len(trained.result.trials) == 2  # all of the first search, none measured twice
    assert len(trained.history) == 6
    monkeypatch.setattr(tune, "LocalExecutor", None)  # no search any more
    shutil.rmtree(tmp_path / "checkpoints")
    again = fitted(output_dir=tmp_path, resume=True, **how)
    assert again.result == as_written(trained.result)
    assert [report.loss for report in again.history] == [report.loss for report in trained.history]


@pytest.mark.usefixtures("shared_zygote")
def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # which takes seconds to find out
    monkeypatch.setattr("autofit.tuning.annotations.Annotator.remedies", lambda *_: ())
    how = {"config": None, "mem": 1e-5, "trials": 1, "set": NARROW | {"micro_batch_size": 8}}
    with pytest.raises(
        NothingFitsError, match=r"no config that was tried fits 0\.00 GiB: the nearest needs"
    ) as caught:
        fitted(output_dir=tmp_path, **how)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("shared_zygote")
def test_an_optimizer_of_ones_own_is_probed(tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "config": None,
        "mem": 1,
        "trials": 1,
        "set": {**NARROW, "optimizer_in_backward": False},
        "steps": 2,
    }
    trained = fitted(optimizer=lambda groups: torch.optim.NAdam(groups), output_dir=tmp_path, **how)
    assert trained.result.best.config["optimizer"] is None


@pytest.mark.usefixtures("shared_zygote")
def test_the_same_search_is_not_done_twice_and_a_resumed_run_needs_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events: list[Event] = []
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 1, "set": NARROW, "steps": 2}
    first = fitted(mlp(), **how)
    assert isinstance(first.result, Result)
    monkeypatch.setattr(tune, "LocalExecutor", None)  # no search any more
    again = fitted(mlp(), listener=events.append, output_dir=tmp_path / "out", **how)
    run = tmp_path / "out" / "search"
    assert again.result == replace(
        as_written(first.result), run_directory=str(run), files=again.result.files
    )
    assert autofit.explain(again.result) == autofit.explain(first.result)
    here = {str(path.relative_to(run)) for path in run.rglob("*") if "probes" not in path.parts}
    there = Path(first.result.run_directory)
    assert here == {
        str(path.relative_to(there)) for path in there.rglob("*") if "probes" not in path.parts
    }
    assert (run / "journal.log").read_text() == (there / "journal.log").read_text()
    assert Record.load(run / "result.json").result == again.result
    notes = [event.text for event in events if isinstance(event, Note)]
    (note,) = (note for note in notes if "done before" in note)
    before = r"a search for this model, data and machine was done before \([\d,]+ samples/s measured within 1\.00 GiB\)"
    assert re.match(before, note)
    with pytest.raises(TypeError):  # there is no executor
        fitted(mlp(), search="always", **how)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    resumed = fitted(output_dir=tmp_path / "out", resume=True, **{**how, "steps": 3})
    assert resumed.result == again.result
    assert len(resumed.history) == 3
    shutil.rmtree(run)
    resumed = fitted(output_dir=tmp_path / "out", resume=True, **{**how, "steps": 4})
    assert resumed.result is None
    assert resumed.config == first.config == first.result.config


@pytest.mark.usefixtures("shared_zygote")
def test_what_an_older_autofit_cached_is_searched_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 1, "set": NARROW, "steps": 1}
    fitted(mlp(), **how)
    (cached,) = cache_file("results", "").glob("*.json")
    # named by a digest alone, as by autofit before layout 2
    cached.rename(cached.with_name(f"{'0' * 32}.json"))
    cache_file("", "layout").unlink()
    events: list[Event] = []
    assert isinstance(fitted(mlp(), listener=events.append, **how).result, Result)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert (
        len([note for note in notes if "results of searches cached by an older autofit in" in note])
        == 1
    )


@pytest.mark.usefixtures("shared_zygote")
def test_that_longer_samples_may_come_is_said_by_a_search_and_by_a_cached_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    loader = [torch.ones(4, length, 48) for length in (2, 3, 4)]
    for _ in range(2):
        events: list[Event] = []
        how = {"config": None, "mem": 1, "trials": 1, "set": NARROW, "steps": 1, "peek": 2}
        fitted(mlp(), loader, loss=mean, listener=events.append, **how)
        notes = [event.text for event in events if isinstance(event, Note)]
        assert (
            len(
                [
                    note
                    for note in notes
                    if note.startswith("no more than 2 batches of the loader were read")
                ]
            )
            == 1
        )
    assert any("was done before" in note for note in notes)
