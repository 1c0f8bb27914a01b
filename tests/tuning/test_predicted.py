"""A search without the card: what is predicted, which config is chosen, and what is written."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autofit
from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, NoDeviceError, ProbeError
from autofit.core.estimate import Estimate
from autofit.core.events import Event, Note, PhaseStarted, SearchStarted
from autofit.core.record import Record
from autofit.core.result import Result, SavedResult
from autofit.hardware.catalogue import most_common_card
from autofit.hardware.driver import no_gpu_note
from autofit.report.explain import nothing_fits
from autofit.search import enumeration
from autofit.search.ranking import Figures, Ranking
from autofit.tuning import pipeline, predicted
from autofit.tuning.predicted import Candidates
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
    assert told == list(result.notes)
    assert most_common_card(24).title in told[1]
    assert "--host-mem" in told[-1]
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
    monkeypatch.setattr(predicted, "predict_all", _sleeps)
    with pytest.raises(ProbeError, match="took more than 1 s"):
        searched(tmp_path / "run", gpu_mem=24, time_limit=0.1)
    assert not (tmp_path / "run" / "probes").exists()


def _sleeps(*_: Any, **__: Any) -> None:
    time.sleep(60)


@pytest.mark.usefixtures("shared_zygote")
def test_of_a_space_too_large_to_be_predicted_its_size_and_what_was_drawn_are_told(
    tmp_path: Path, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumeration, "MAX_CONFIGS", 3)
    monkeypatch.setattr(predicted, "_ROUNDS", 1)
    impossible = {**FEW, **REST, "quantization": ["none", "nf4"]}  # nf4 with lora_rank 0 is refused
    result = searched(tmp_path / "run", gpu_mem=24, listener=heard.append, set=impossible)
    started = next(each for each in heard if isinstance(each, SearchStarted))
    assert (started.space_size, started.refused) == (result.space_size, result.skipped["refused"])
    assert result.space_size - result.skipped["refused"] > 3
    assert result.skipped["refused"] > 0
    assert "3 configs of it, drawn at random" in result.notes[-1]


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


def figures(*rows: tuple[str, float, float], compiled: str = "none") -> list[Figures]:
    return [
        Figures(
            Config(precision=name, compile=compiled, lora_rank=8, quantization="none"), rate, size
        )
        for name, rate, size in rows
    ]


def within(
    every: list[Figures], cap: int, *, tolerance: float = 0.0, host_known: bool = False
) -> Candidates:
    ranking = Ranking(tolerance, techniques.fidelity)
    return Candidates(every, cap, ranking, {True: 1.0, False: 1.0}, host_known=host_known)


def estimate(config: Config, high: int) -> Estimate:
    breakdown = {"context": 10}
    budget = Budget(100, 100, margin=0.0)
    return Estimate(config, 50, 50, 40, high, breakdown, samples_per_second=1.0, budget=budget)


def test_the_fastest_that_may_fit_comes_first_and_ties_go_to_what_learns_better() -> None:
    every = figures(
        ("fp32", 9.8, 60), ("bf16", 10.0, 50), ("fp8", 10.1, 70), ("bf16-mixed", 20.0, 91)
    )
    assert within(every, 90, tolerance=0.03).preferred().get("precision") == "fp32"
    assert within(every, 90).preferred().get("precision") == "fp8"
    assert within(every, 91, tolerance=0.03).preferred().get("precision") == "bf16-mixed"
    assert within(every, 40, tolerance=0.03).preferred() is None
    # 50 may come to 40 when looked at closely
    assert within(every, 40).smallest().get("precision") == "bf16"
    assert within(every, 38).smallest() is None


def test_what_needs_a_host_that_nothing_is_known_of_comes_after_what_does_without() -> None:
    slow, fast = figures(("fp32", 5.0, 60), ("bf16", 10.0, 50))
    fast = fast._replace(config=fast.config.replace(parameter_offload="cpu"))
    assert within([slow, fast], 90).preferred() == slow.config
    assert within([slow, fast], 90, host_known=True).preferred() == fast.config
    assert within([slow, fast], 55).preferred() == fast.config


def test_how_far_the_upper_end_lies_above_is_learned_from_what_was_followed() -> None:
    every = figures(("fp32", 10.0, 80), ("bf16", 9.0, 75), ("fp8", 8.0, 60))
    every += figures(("tf32", 7.0, 88), compiled="default")
    candidates = within(every, 90)
    first = candidates.preferred()
    # 104 of tensors where 80 were expected: 1.3 times
    candidates.learn(first, (estimate(first, high=114), None))
    assert candidates.preferred().get("precision") == "fp8"  # 75 would come to 97
    candidates.learn(candidates.preferred(), None)  # which cannot be followed
    assert candidates.preferred().get("precision") == "tf32"  # of compiled ones nothing was learned
