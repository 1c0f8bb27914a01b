"""A search without the card: what is predicted, which config is chosen, and what is written."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit.core.errors import InputError, NoDeviceError, ProbeError, RefusedError
from autofit.core.events import Event, Note, PhaseProgressed, PhaseStarted, SearchStarted
from autofit.core.options import search_options
from autofit.core.record import Record
from autofit.core.result import Result, SavedResult
from autofit.core.workload import Workload
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import most_common_card
from autofit.hardware.driver import no_gpu_note
from autofit.probe import LocalExecutor
from autofit.report.explain import nothing_fits
from autofit.tuning import pipeline, predicted
from autofit.tuning.context import ranking_for
from autofit.tuning.predicted_space import Answer, Question, SpaceSearch, search_space
from autofit.tuning.space import space_for
from autofit.tuning.target import target_hardware
from benchmarks import predicted_winners
from tests import tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

FEW = {
    "precision": "bf16",
    "micro_batch_size": [1, 2],
    "compile": "none",
    "lora_rank": [0, 8],
}
REST = {
    "activation_checkpointing": "none",
    "optimizer": "adamw",
    "loss": "standard",
    "attention": "sdpa",
    "quantization": "none",
    "activation_offload": "none",
    "parameter_offload": "none",
    "optimizer_offload": "none",
}


def searched(out: Path, **options: Any) -> Result:
    return autofit.search(
        tiny.llama_workload(), out=out, **{"set": FEW | REST, "space": "lora", **options}
    )


@pytest.fixture
def heard() -> list[Event]:
    return []


def test_what_fits_though_rough_figures_say_no_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tier of which nothing may fit, the smallest config is followed all the same."""

    def run(self: LocalExecutor, function: Any, *arguments: Any, **_: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(LocalExecutor, "run", run)
    monkeypatch.setattr(SpaceSearch, "_fits", lambda search, row: False)
    result = searched(tmp_path / "run", gpu_mem=24)
    assert result.predicted_best is not None
    assert result.predicted_best.verdict == "yes"


@pytest.mark.usefixtures("shared_zygote")
def test_the_best_predicted_config_comes_with_the_files_of_a_search(
    tmp_path: Path, heard: list[Event]
) -> None:
    sizes: dict[str, Any] = {"seq_len": 16, "effective_batch": 4, "gpu_mem": 24, "set": FEW | REST}
    result = autofit.search("tiny-llama", out=tmp_path / "run", listener=heard.append, **sizes)
    found = result.predicted_best
    assert result.best is None
    assert found is not None
    assert result.config == found.config
    assert found.verdict == "yes"
    assert found.tokens_per_second
    assert result.stopped_by == "prediction"
    assert {name: bool(each) for name, each in result.predicted_tiers.items()} == {
        "full": True,
        "lora": True,
        "qlora": False,
        "head": False,
    }
    assert found in result.predicted_tiers.values()
    fastest = max(each.samples_per_second or 0 for each in result.predicted_tiers.values() if each)
    assert found.samples_per_second >= fastest * 0.97
    written = {name for name, path in result.files.items() if path and Path(path).exists()}
    assert written == {"result", "exports", "report", "script"}
    loaded = SavedResult.load(tmp_path / "run" / "result.yaml")
    assert (loaded.config, dict(loaded.measured)) == (found.config, {})
    assert loaded.predicted["step_seconds"] == found.step_seconds
    assert Record.load(tmp_path / "run" / "result.json").result.predicted_best == found
    assert "Predicted, not measured" in (tmp_path / "run" / "report.html").read_text()
    compile((tmp_path / "run" / "train.py").read_text(), "train.py", "exec")
    told = [each.text for each in heard if isinstance(each, Note)]
    assert told == [note for note in result.notes if not note.startswith("Too close to call")]
    assert most_common_card(24).title in told[1]
    assert any("--host-mem" in note for note in told)
    assert [each.trials for each in heard if isinstance(each, SearchStarted)] == [0]
    assert any(
        isinstance(each, PhaseStarted) and each.doing.startswith("predicting ") for each in heard
    )


@pytest.mark.usefixtures("shared_zygote")
def test_a_budget_that_nothing_fits_has_no_files_and_says_what_would_fit(tmp_path: Path) -> None:
    result = searched(tmp_path / "run", gpu_mem=0.2)  # less than a context takes
    assert result.config is None
    assert not any(result.files[name] for name in ("result", "script", "exports"))
    told = autofit.explain(result)
    assert told.startswith("Nothing is predicted to fit: tiny on")
    assert "The smallest budget in which anything is expected to fit is 0." in told
    assert "What would help:\n  - --gpu-mem 0." in told
    assert [each.kind for each in result.remedies] == ["memory"]  # the context alone is larger
    assert nothing_fits(result).message == "no config of the space is predicted to fit 0.20 GiB."


@pytest.mark.usefixtures("shared_zygote")
def test_what_takes_longer_than_the_limit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted, "search_space", _sleeps)
    with pytest.raises(ProbeError, match=r"time limit of 0\.1 s was over"):
        searched(tmp_path / "run", gpu_mem=24, time_limit=0.1)
    assert not (tmp_path / "run" / "probes").exists()


def _sleeps(*_: Any, **__: Any) -> None:
    time.sleep(60)


SEVERAL: dict[str, Any] = {
    **FEW,
    **REST,
    "micro_batch_size": [1, 2, 4],
    "activation_checkpointing": ["full", "none"],
    "compile": ["none", "default"],
    "loss": ["chunked", "standard"],
    "optimizer": ["adamw-8bit", "adamw", "adamw-foreach"],
}


@pytest.mark.usefixtures("shared_zygote")
def test_of_a_large_space_what_was_predicted_is_told_and_how_far_it_has_come(
    tmp_path: Path, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted, "_LOOK_SECONDS", 0.05)
    result = searched(tmp_path / "run", gpu_mem=24, listener=heard.append, set=SEVERAL)
    started = next(event for event in heard if isinstance(event, SearchStarted))
    assert (started.space_size, started.refused) == (result.space_size, result.skipped["refused"])
    assert any(
        "no change of one or two knobs is expected to be faster" in note for note in result.notes
    )
    assert any(note.startswith("Too close to call: ") for note in result.notes)

    told = [event for event in heard if isinstance(event, PhaseProgressed)]
    assert all(0 <= event.share < 1 for event in told)
    assert told[-1].seconds_left is not None
    assert told[-1].config and told[-1].tokens_per_second
    assert not list((tmp_path / "run").glob("probes/progress*"))


def gains(workload: Workload, question: Question) -> dict[str, tuple[float, float]]:
    """By tier what one and what two changes of the answer would gain, by the estimator."""
    search = SpaceSearch(workload, question)
    answer = search.answer()
    found = {}
    for name, best in answer.followed.items():
        singles, doubles = predicted_winners.around(search, best[0].config)
        assert len(doubles) > len(singles) > 5
        single, _ = predicted_winners.gain(search, best, singles)
        double, _ = predicted_winners.gain(search, best, doubles)
        found[name] = single, double
    assert len(answer.rows) < len(search.local.rows)
    return found


def question_of(workload: Workload, folder: Path) -> Question:
    options = search_options(gpu="rtx-3060", space="lora", set=SEVERAL, tolerance=0.0)
    hardware, _ = target_hardware(options)
    return Question(
        space_for(options, workload, hardware).knobs,
        hardware,
        budget_for(options, hardware),
        ranking_for(options),
        host_known=True,
        other_caps=(),
        progress=folder / "progress.json",
    )


def in_no_time(workload: Workload, question: Question) -> Answer:
    search = SpaceSearch(workload, question)
    search._end = lambda share, rounds: 0.0  # type: ignore[method-assign]
    return search.answer()


def outdone(workload: Workload, question: Question) -> tuple[bool, bool]:
    """Whether something known is clearly better than the answer, and than the slowest that fits."""
    search = SpaceSearch(workload, question)
    search.answer()
    by_answer = search._is_outdone("lora")
    slowest = min(search.local.tiers["lora"].values(), key=search.merit)
    followed = search.follow(slowest.config)
    assert followed
    search._followed["lora"] = followed
    return by_answer, search._is_outdone("lora")


def test_a_tier_is_looked_at_until_nothing_known_is_clearly_better(
    tmp_path: Path, executor: LocalExecutor
) -> None:
    workload = tiny.llama_workload(8)
    question = question_of(workload, tmp_path)
    found = executor.run(outdone, workload, question, log="outdone.log", timeout=300)
    assert found == (False, True)


def ends(workload: Workload, question: Question) -> tuple[list[float], list[bool]]:
    """When no more configs are looked at, and whether there is no time to follow any: before one
    was followed, once that took ten seconds, and once it took more than are left."""
    search = SpaceSearch(workload, question)
    begin = time.monotonic()
    seconds = []
    late = []
    for search._following in (0.0, 10.0, 200.0):
        seconds.append(search._end(0.5, 2.0) - begin)
        late.append(search._is_late())

    return seconds, late


def test_when_the_time_is_over_the_best_so_far_are_the_answer(
    tmp_path: Path, executor: LocalExecutor
) -> None:
    workload = tiny.llama_workload(8)
    question = question_of(workload, tmp_path)
    answer: Answer = executor.run(in_no_time, workload, question, log="short.log", timeout=300)
    assert answer.cut_short
    assert answer.followed.keys() == {"full", "lora"}
    assert len(answer.rows) < 60


def test_all_time_is_for_looking_but_what_following_takes(
    tmp_path: Path, executor: LocalExecutor
) -> None:
    workload = tiny.llama_workload(8)
    question = question_of(workload, tmp_path)
    question = dataclasses.replace(question, until=time.monotonic() + 100)
    (first, later, _), late = executor.run(ends, workload, question, log="ends.log", timeout=300)
    assert 0 < first < later < 80
    assert late == [False, False, True]


def test_no_time_for_one_prediction_is_an_error(tmp_path: Path, executor: LocalExecutor) -> None:
    workload = tiny.llama_workload(8, 24)  # whose predictions no other test keeps
    question = dataclasses.replace(question_of(workload, tmp_path), until=0.0)
    with pytest.raises(ProbeError, match="no config could be predicted in the time"):
        executor.run(search_space, workload, question, log="none.log", timeout=300)


def test_a_space_that_is_impossible_for_the_model_says_why(
    tmp_path: Path, executor: LocalExecutor
) -> None:
    workload = tiny.llama_workload(8, hidden_size=1024)  # two heads of 512
    question = question_of(workload, tmp_path)
    question = dataclasses.replace(question, knobs=question.knobs | {"attention": ("flash",)})
    with pytest.raises(RefusedError, match="flash-attn's kernel does not support this model"):
        executor.run(search_space, workload, question, log="why.log", timeout=300)


def test_no_change_of_one_or_two_knobs_of_an_answer_is_better(
    tmp_path: Path, executor: LocalExecutor
) -> None:
    workload = tiny.llama_workload(8)
    question = question_of(workload, tmp_path)
    found = executor.run(gains, workload, question, log="gains.log", timeout=300)
    assert found.keys() == {"full", "lora"}
    assert max(gain for both in found.values() for gain in both) <= 0.005


def test_a_card_that_cannot_be_searched_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not supported: autofit runs on cards that take CUDA"):
        searched(tmp_path / "run", gpu="mi300x")


@pytest.mark.usefixtures("shared_zygote")
def test_what_was_measured_before_is_not_gone_on_with_by_predictions(tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text("")
    with pytest.raises(NoDeviceError):
        searched(tmp_path, gpu_mem=24, resume=True)


@pytest.mark.usefixtures("shared_zygote")
def test_nobody_trains_on_a_prediction_by_surprise(tmp_path: Path) -> None:
    loader = [torch.ones(4, 2)]
    with pytest.raises(ProbeError, match="no CUDA device"):
        autofit.fit(
            torch.nn.Linear(2, 1),
            loader,
            loss=lambda model, batch: model(batch).sum(),
            lr=0.1,
            gpu_mem=24,
        )


@pytest.mark.usefixtures("shared_zygote")
def test_a_driver_without_a_card_is_found_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(pipeline, "why_no_gpu", lambda: None)
    monkeypatch.setattr(pipeline, "predict_search", lambda *_, reason: reasons.append(reason))
    searched(tmp_path / "run", gpu="h100")
    (reason,) = reasons
    note = "There is no CUDA device here, so nothing can be measured: the best config is predicted."
    assert no_gpu_note(reason) == note
