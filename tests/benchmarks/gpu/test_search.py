from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.hardware import GIB
from benchmarks.gpu import search
from benchmarks.gpu.bench import Ended
from benchmarks.gpu.search import BEST, STAGE, Search, candidates, regret
from benchmarks.gpu.store import Row
from tests.benchmarks.gpu.rows import bench_in, measurement
from tests.tiny import CPU, llama_workload

TIER = {"config": {"precision": "bf16", "lora_rank": 8}, "measured": {"tokens_per_second": 200.0}}
ANSWER: dict[str, Any] = {
    "best": TIER,
    "tiers": {"full": None, "lora": TIER, "qlora": None},
    "trials": [{"outcome": "fits"}, {"outcome": "out_of_memory"}],
    "stopped_by": "bound",
}


def found(**more: Any) -> dict[str, Any]:
    return {"gib": 24, "resumed": False, "answer": ANSWER, "search_seconds": 200.0, **more}


@pytest.mark.parametrize(
    ("best", "others", "expected"),
    [
        (100.0, {"predicted 1": 125.0, "random 1": 80.0}, 0.2),
        (100.0, {"predicted 1": 90.0}, 0.0),
        (100.0, {}, None),
        (None, {"predicted 1": 90.0}, None),
    ],
)
def test_regret_is_against_the_fastest_of_all(
    tmp_path: Path, best: float | None, others: dict[str, float], expected: float | None
) -> None:
    store = bench_in(tmp_path).store
    store.add(STAGE, "24 GiB", found())
    for key, speed in {**({BEST: best} if best else {}), **others}.items():
        store.add(STAGE, key, {"measurement": measurement(speed)})
    store.add(STAGE, "random 2", {"measurement": measurement(999.0, outcome="out_of_memory")})
    seen = regret(store)
    assert seen == (None if expected is None else pytest.approx(expected))


def test_figures_are_of_the_first_search_alone(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    store.add(STAGE, "24 GiB", found(resumed=True))
    store.add(STAGE, "16 GiB", {"gib": 16, "resumed": False, "failed": "exit code 3: nothing fits"})
    summary = search.summarize(store)
    assert summary.figures == {
        "search seconds": 200.0,
        "probes": 2,
        "out of memory": 1,
        "tokens/s": 200.0,
    }
    assert summary.tables[0].rows[0][:6] == ["24 GiB", "200", "2", "1", "bound", "200"]
    assert summary.notes == [
        "the search within 16 GiB: exit code 3: nothing fits",
        "the search within 24 GiB was resumed: its time is that of its last part.",
    ]
    store.add(STAGE, "24 GiB", {"gib": 24, "resumed": False, "failed": "exit code 4"})
    assert search.summarize(store).figures == {}


def test_an_answer_that_is_none_is_a_failure(tmp_path: Path) -> None:
    assert (
        "exit code 3"
        in search._found(tmp_path, Ended(3, '{"best": null, "error": null}', "nothing fits"))[
            "failed"
        ]
    )
    assert "Traceback" in search._found(tmp_path, Ended(1, "no json", "Traceback: x"))["failed"]


def test_candidates_were_not_measured_and_the_fastest_predicted_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = [Config({"precision": "bf16", "micro_batch_size": size}) for size in range(1, 9)]
    seconds = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    nbytes = [GIB / 2] * 7 + [2.0 * GIB]  # the fastest would not fit
    row = asked_for(monkeypatch, configs, nbytes, seconds, seen=configs[5])
    assert [each["micro_batch_size"] for each in row["predicted"]] == [7, 5]
    assert {each["micro_batch_size"] for each in row["random"]} < {1, 2, 3, 4}
    assert len(row["random"]) == 2
    assert row == asked_for(monkeypatch, configs, nbytes, seconds, seen=configs[5]), (
        "the same when it is asked again"
    )


def test_near_twins_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank, optimizer and 16-bit format change little: what is measured beside the best is of another kind."""
    alike = {"precision": "bf16", "optimizer": "adamw", "lora_rank": 8, "micro_batch_size": 1}
    changes = [{}, {"precision": "bf16-mixed"}, {"optimizer": "adamw-8bit"}, {"lora_rank": 64}]
    twins = [Config({**alike, **change}) for change in changes]
    other = [{"micro_batch_size": 2}, {"lora_rank": 0}, {"precision": "fp32"}]
    others = [Config({**alike, **change}) for change in other]
    configs = [*twins, *others]
    row = asked_for(
        monkeypatch, configs, [GIB / 2] * 7, [1.0, 0.9, 0.8, 0.7, 2.0, 3.0, 4.0], seen=twins[0]
    )
    assert [*row["predicted"], *row["random"]] == [dict(each) for each in others]


def asked_for(
    monkeypatch: pytest.MonkeyPatch,
    configs: list[Config],
    nbytes: list[float],
    seconds: list[float],
    seen: Config,
) -> Row:
    monkeypatch.setattr(search, "legal_configs", lambda *_: configs)
    monkeypatch.setattr(search, "predict_all", lambda *_, **__: (nbytes, seconds))
    what = Search("m", "full", (1,), 16, afterwards=2)
    return candidates(llama_workload(), CPU, what, 1, [dict(seen)], 0.0)
