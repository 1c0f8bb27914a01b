import json
import time
from pathlib import Path
from typing import Any

import pytest

from autofit.probe import LocalExecutor
from benchmarks.gpu import run
from benchmarks.gpu.bench import Bench, LeftOutError, TimeUp
from benchmarks.gpu.stage import Stage, Summary
from benchmarks.gpu.store import Store
from tests.benchmarks.gpu.rows import bench_in, with_executor


def stage(
    name: str, action: Any = lambda bench: None, *, share: float = 0.5, least: float = 30.0
) -> Stage:
    return Stage(name, share, least, action, lambda store: Summary())


def with_stages(monkeypatch: pytest.MonkeyPatch, *stages: Stage) -> list[str]:
    monkeypatch.setattr(run, "STAGES", {each.name: each for each in stages})
    monkeypatch.setattr(run, "_describe", lambda bench: None)
    return [each.name for each in stages]


@pytest.mark.parametrize(
    ("left", "waiting", "seconds"),
    [
        (540.0, 2, 270.0),  # its share
        (40.0, 2, 30.0),  # what it needs, where that is more
        (29.0, 2, 0.0),  # too little to begin
        (540.0, 1, 540.0),  # nobody else waits
    ],
)
def test_a_stage_gets_its_share_of_the_time_that_is_left(
    left: float, waiting: int, seconds: float
) -> None:
    assert run.seconds_for([stage("a"), stage("b")][:waiting], left) == seconds


def test_one_that_fails_is_told_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bench: Bench) -> None:
        raise ValueError("broken")

    def leave_out(bench: Bench) -> None:
        raise LeftOutError("no package")

    def wait(bench: Bench) -> None:
        bench.store.add("c", "begun", {})
        time.sleep(60)

    bench = bench_in(tmp_path)
    stages = [
        stage("a", fail),
        stage("b", leave_out),
        stage("c", wait, share=0.01),
        stage("d"),
        stage("e"),
    ]
    names = with_stages(monkeypatch, *stages)
    start = time.monotonic()
    assert run._work(bench, names, start + 100.0) == 1
    assert time.monotonic() - start < 20
    rows = {name: bench.store.get("stage", name) for name in names}
    assert [row and row["outcome"] for row in rows.values()] == [
        "failed",
        "left out",
        "time was up",
        "done",
        "done",
    ]
    assert "ValueError: broken" in rows["a"]["reason"]
    assert rows["b"]["reason"] == "no package"
    assert bench.store.get("c", "begun") is not None
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["outcome"] for row in results["stages"]] == [
        row["outcome"] for row in rows.values()
    ]


def test_figures_that_cannot_be_told_are_a_note_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_in(tmp_path)
    broken = Stage("a", 0.5, 1.0, lambda bench: None, lambda store: Summary(store.get("none")["x"]))  # type: ignore[index]
    names = with_stages(monkeypatch, broken)
    assert run._work(bench, names, time.monotonic() + 10.0) == 0
    assert "what is stored cannot be summarized: TypeError" in (tmp_path / "results.md").read_text()


def test_where_no_time_is_left_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_in(tmp_path, smoke=False)
    names = with_stages(monkeypatch, stage("a", lambda bench: pytest.fail("begun")))
    assert run._work(bench, names, time.monotonic() + 10.0) == 0
    assert (bench.store.get("stage", "a") or {})["outcome"] == "no time left"
    done = {"stage": "a", "outcome": "done", "reason": None, "seconds": 9.0}
    bench.store.add("stage", "a", done)
    run._work(bench, names, time.monotonic() + 10.0)
    assert bench.store.get("stage", "a") == done


def test_the_alarm_is_heard_where_exceptions_are_recorded(tmp_path: Path) -> None:
    bench = bench_in(tmp_path)
    with pytest.raises(TimeUp), run._within(bench, 0.2):
        try:
            time.sleep(30)
        except Exception:
            pytest.fail("taken for a failure")


def test_what_is_done_is_left_out_unless_it_is_named_and_failures_are_tried_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    stages = [
        stage(name, lambda bench, name=name: ran.append(name), least=0.0) for name in ("a", "b")
    ]
    with_stages(monkeypatch, *stages)
    bench = bench_in(tmp_path / "gpu-smoke")
    bench.store.add("stage", "a", {"stage": "a", "outcome": "done", "reason": None, "seconds": 1.0})
    for key, row in {"good": {}, "bad": {"failed": "no"}}.items():
        bench.store.add("a", key, row)

    def call(*arguments: str) -> list[str]:
        ran.clear()
        assert run.main(["--smoke", "--out", str(tmp_path), *arguments]) == 0
        return list(Store(bench.store.path).rows("a"))

    assert call() == ["good", "bad"]
    assert ran == ["b"]
    call("--stage", "a")
    assert ran == ["a"]
    assert call("--stage", "a", "--retry") == ["good"]
    assert call("--stage", "a", "--fresh") == []
    assert call("--tell") == []
    assert ran == []


def test_figures_of_another_machine_are_not_mixed_in(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    executor: LocalExecutor,
) -> None:
    with_executor(monkeypatch, executor)
    bench = bench_in(tmp_path / "gpu-smoke")
    before = bench.store.path.read_text()
    assert run.main(["--smoke", "--out", str(tmp_path), "--stage", "levers"]) == 4
    assert "another machine: device a CPU, not" in capsys.readouterr().err
    assert bench.store.path.read_text() == before
