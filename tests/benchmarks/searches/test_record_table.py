import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.probe import LocalExecutor
from autofit.techniques import all_techniques
from benchmarks import rank_tables, record_table
from benchmarks.memory_models import Case
from benchmarks.rank_tables import TABLES
from benchmarks.record_table import Row, Table

SPACE = """description: Two configs.
knobs:
  micro_batch_size: [4, 8]
  activation_checkpointing: [none]
"""


def _measured(seconds: float, peak: int = 100) -> Measurement:
    return Measurement(
        Config({"knob": 1}),
        Outcome.FITS,
        step_seconds=StepSeconds(seconds, seconds, seconds),
        peak_bytes=PeakBytes(peak),
    )


def test_a_row_keeps_every_probe_and_tells_their_median() -> None:
    row = Row(Config({each.name: each.off for each in all_techniques()}))
    for seconds, peak in ((1.0, 100), (3.0, 120), (2.0, 110)):
        row.add(_measured(seconds, peak))
    assert row.step_seconds == 2.0
    assert row.peak_bytes == 120
    kept = json.loads(json.dumps(row.to_dict()))
    assert Row.from_dict(kept) == row
    assert not kept["config"], "what is off is left out, so that knobs may come later"


def test_noise_is_how_far_the_probes_of_one_config_differ() -> None:
    rows = [Row(Config({"knob": number})) for number in range(3)]
    for row, others in zip(rows, ((1.0, 1.0), (1.0, 1.1), (2.0, 3.0)), strict=True):
        for seconds in others:
            row.add(_measured(seconds))
    noise = Table({}, rows).noise()["noise"]
    assert noise == {
        "median": pytest.approx(0.1 / 1.05, abs=1e-4),
        "worst": pytest.approx(1 / 2.5, abs=1e-4),
    }
    # two that tied are told apart the second time
    assert rank_tables.agreement(rows) == pytest.approx(0.866, abs=1e-3)


def test_a_table_is_recorded_goes_on_where_it_was_stopped_and_is_ranked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    executor: LocalExecutor,
) -> None:
    monkeypatch.setattr(
        record_table, "SpaceEstimator", functools.partial(SpaceEstimator, measuring=0.5)
    )
    # three real steps of the usual one take seconds
    small = {"widths": (16, 32), "depth": 1, "image_size": 32}
    monkeypatch.setitem(record_table.MODELS, "cnn", Case("convolutions", small, 16))
    monkeypatch.setattr(record_table, "LocalExecutor", lambda: contextlib.nullcontext(executor))
    space, out = tmp_path / "two.yaml", tmp_path / "table.json"
    space.write_text(SPACE)
    given = ["--model", "cnn", "--space", str(space), "--out", str(out), "--repeats"]
    record_table.main([*given, "1"])
    first = Table.read(out)
    assert [len(row.probes) for row in first.rows] == [1, 1]
    assert all(row.outcome is Outcome.FITS and row.peak_bytes for row in first.rows)
    assert first.about["rates"]["operators"]
    record_table.main([*given, "2"])
    again = Table.read(out)
    assert [len(row.probes) for row in again.rows] == [2, 2]
    assert [row.probes[0] for row in again.rows] == [row.probes[0] for row in first.rows]
    assert "2 fits" in capsys.readouterr().out
    rank_tables.main([str(out)])
    assert "table" in capsys.readouterr().out
    space.write_text(SPACE.replace("[4, 8]", "[2, 8]"))
    with pytest.raises(SystemExit, match="holds another table"):
        record_table.main([*given, "3"])


class Gang:
    """Several devices, whose first calls functions in this process."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, function: Any, *arguments: Any, log: str, timeout: float) -> Any:
        return {"by a rank": function(*arguments)}


def test_a_table_of_several_devices_holds_the_rates_of_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: LocalExecutor
) -> None:
    space, out = tmp_path / "space.yaml", tmp_path / "table.json"
    space.write_text("description: Two.\nknobs:\n  data_parallel: [fsdp, ddp]\n")
    kept: list[Table] = []
    monkeypatch.setattr(record_table, "LocalExecutor", lambda: contextlib.nullcontext(executor))
    monkeypatch.setattr(record_table, "GangExecutor", Gang)
    monkeypatch.setattr(record_table, "place_ranks", lambda *_: "two")
    monkeypatch.setattr(record_table, "_rates", lambda workload, hardware, configs: hardware.world)
    monkeypatch.setattr(
        record_table, "record", lambda table, path, gang, *_, **__: kept.append(table)
    )
    record_table.main(
        ["--model", "cnn", "--devices", "2", "--space", str(space), "--out", str(out)]
    )
    assert (kept[0].hardware.world, kept[0].about["rates"]) == (2, {"by a rank": 2})
    assert {row.config["data_parallel"] for row in kept[0].rows} == {"fsdp", "ddp"}


@pytest.mark.parametrize("path", sorted(TABLES.rglob("*.json")), ids=lambda path: path.stem)
def test_tables_that_were_recorded_can_be_read(path: Path) -> None:
    table, of_several = Table.read(path), path.parent != TABLES
    assert table.hardware.world == 1 + of_several
    assert len({row.config for row in table.rows}) == len(table.rows) > 30
