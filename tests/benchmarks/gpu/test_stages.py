"""What memory, speed, loop and levers make of stored rows."""

from pathlib import Path

import pytest

from benchmarks.gpu import levers, loop, memory, ranks, speed
from benchmarks.gpu.cases import SMOKE
from benchmarks.gpu.measured import STAGE as MEASURED
from tests.benchmarks.gpu.rows import MIB, bench_in, case, measurement


def test_memory_tells_errors_by_group_and_reasons(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    rows = [
        case(110),
        case(device=120, lever="compile"),
        case(outcome="out_of_memory", lever="liger"),
    ]
    rows += [{**case(), "left_out": "no package."}]
    del rows[-1]["measurement"]
    for key, row in enumerate(rows):
        store.add(MEASURED, str(key), row)
    summary = memory.summarize(store)
    assert summary.figures["configs"] == 2
    assert summary.figures["allocated worst"] == pytest.approx(0.1)
    assert (summary.figures["interval hit"], summary.figures["above the interval"]) == (0.5, 1)
    assert summary.figures["ran out of memory"] == 1
    assert [row[0] for row in summary.tables[0].rows] == ["all", "lora", "8B", "plain", "compile"]
    assert list(summary.notes) == [
        "8B lora, liger: out_of_memory: the reason",
        "8B lora, plain: no package.",
    ]
    assert memory.summarize(bench_in(tmp_path / "empty").store).tables == []


def test_speed_tells_ranks_and_the_best_utilisation(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    for key, (step, tokens) in enumerate(((1.0, 1000.0), (2.0, 250.0), (3.0, 200.0))):
        store.add(MEASURED, str(key), case(step=step, speed=tokens))
    store.add(speed.STAGE, speed.CANDIDATES, {"configs": []})
    store.add(speed.STAGE, "a", {"config": {"precision": "bf16"}, **case(step=4.0, speed=200.0)})
    store.add(speed.STAGE, "b", {"config": {"precision": "bf16"}, **case(step=4.5, speed=200.0)})
    summary = speed.summarize(store)
    assert summary.figures["rank correlation"] == pytest.approx(1.0)
    assert summary.figures["utilisation"] == pytest.approx(0.45)
    assert [row[2] for row in summary.tables[1].rows] == ["45.0%", "40.0%"]


def test_loop_tells_how_far_off_each_way_is(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    store.add(loop.STAGE, loop.PROBE, {"measurement": measurement(100.0)})
    store.add(loop.STAGE, loop.TRAIN_PY, {"tokens_per_second": 103.0, "peak_bytes": 101 * MIB})
    store.add(loop.STAGE, loop.FIT, {"failed": "no memory"})
    summary = loop.summarize(store)
    assert summary.figures["train.py off by"] == pytest.approx(0.03)
    assert summary.figures["train.py peak of the probe's"] == pytest.approx(1.01)
    assert "fit off by" not in summary.figures
    assert summary.notes == ["fit: no memory"]


def test_levers_are_told_against_the_plain_config(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    cases = {each.lever: each for each in SMOKE.one_at_a_time()}
    store.add(MEASURED, cases["plain"].key, case(step=10.0))
    lever = case(80, step=12.0, speed=80.0, lever="checkpointing full")
    lever["measurement"]["peak_bytes"]["allocated"] = 70 * MIB
    store.add(MEASURED, cases["checkpointing full"].key, lever)
    plain, full = levers.rows_of(store)
    assert (plain["saved_bytes"], plain["slower"]) == (0, 0.0)
    assert (full["saved_bytes"], full["predicted_saved_bytes"]) == (30 * MIB, 20 * MIB)
    assert (full["slower"], full["predicted_slower"]) == (pytest.approx(0.25), pytest.approx(0.2))
    assert full["device_saved_bytes"] is None
    assert full["knobs"]["activation_checkpointing"] == "full"
    assert levers.summarize(store).figures == {"levers": 2}


def test_ranks_tell_how_far_the_stand_in_is_off(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    row = {"allocated": 100 * MIB, "reserved": 110 * MIB, "step_seconds": 0.5, "loss": 4.0}
    store.add(ranks.STAGE, "fsdp: one of 2", row)
    store.add(ranks.STAGE, "fsdp: one of 8", row | {"allocated": 40 * MIB, "reserved": None})
    store.add(ranks.STAGE, "fsdp: two", row | {"allocated": 80 * MIB})
    store.add(ranks.STAGE, "ddp: two", {"failed": "no memory"})
    summary = ranks.summarize(store)
    assert summary.figures == {"stand-in off by at most": pytest.approx(0.25)}
    assert [line[1:4] for line in summary.tables[0].rows] == [
        ["one of 2", "0.098", "0.107"],
        ["one of 8", "0.039", None],
        ["two", "0.078", "0.107"],
    ]
    assert summary.notes == ["ddp: two: no memory"]
