"""Result: what is written is read back, and both forms have the keys of the contract."""

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.estimate import Estimate
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.pareto import Alternative, OtherBudget, Point
from autofit.core.plain import to_plain
from autofit.core.result import SCHEMA, TIERS, Result, SavedResult, tier
from autofit.core.strict_yaml import parse

HARDWARE = Hardware(
    device="cuda",
    name="NVIDIA H200",
    memory_bytes=int(139.8 * GIB),
    host_memory_bytes=64 * GIB,
    host_free_bytes=32 * GIB,
    cores=16,
    capability=(9, 0),
)
BEST = Measurement(
    Config(precision="bf16", micro_batch_size=4, lora_rank=8, lora_targets="all-linear"),
    Outcome.FITS,
    number=7,
    step_seconds=StepSeconds(1.5, 1.4, 1.6),
    samples_per_second=2.5,
    tokens_per_second=5120.3,
    peak_bytes=PeakBytes(20 * GIB, 21 * GIB, 22 * GIB),
    verified=True,
)
MISS = Measurement(
    Config(precision="fp32"), Outcome.OUT_OF_MEMORY, number=8, peak_bytes=PeakBytes(30 * GIB)
)


def result(**changes: object) -> Result:
    whole = Result(
        model="llama-3.1-8b",
        workload={"task": "causal-lm", "sequence_length": 2048, "effective_batch_size": 32},
        source={"kind": "preset", "model": "llama-3.1-8b"},
        hardware=HARDWARE,
        budget=Budget(24 * GIB, 32 * GIB),
        versions={"autofit": "0.1.0", "torch": "2.13.0"},
        best=BEST,
        tiers={"full": None, "lora": BEST, "qlora": None},
        trials=(BEST, MISS),
        skipped={"dominated": 2},
        stopped_by="trials",
        space_size=100,
        search_seconds=12.34567,
        files={"result": "x/result.yaml"},
    )
    return dataclasses.replace(whole, **changes)


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "result.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = result()
    loaded = SavedResult.load(saved(tmp_path, whole.to_yaml()))
    assert loaded.model == whole.model
    assert loaded.config == BEST.config
    assert loaded.workload == whole.workload
    assert loaded.source == whole.source
    assert loaded.measured == BEST.to_measured()
    assert loaded.hardware["budget_gib"] == 24.0


def test_the_yaml_has_the_keys_of_the_contract_in_their_order() -> None:
    data = parse(result().to_yaml(), "the test")
    keys = ["autofit", "model", "workload", "hardware", "versions", "config", "measured", "tiers"]
    assert [key for key in data if key in keys] == keys
    assert data["autofit"] == SCHEMA == 1
    assert data["hardware"] == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "memory_gib": 139.8,
        "budget_gib": 24.0,
        "margin": 0.05,
    }
    assert list(data["tiers"]) == list(TIERS[:-1])  # the last where it was asked for
    assert data["tiers"]["full"] is None
    assert data["tiers"]["lora"] == {"config": dict(BEST.config), "measured": BEST.to_measured()}


def test_the_yaml_says_where_speed_was_measured_for_another_card() -> None:
    elsewhere = dataclasses.replace(HARDWARE, name="NVIDIA L4", measured_on="NVIDIA H200")
    data = parse(result(hardware=elsewhere).to_yaml(), "the test")
    assert data["hardware"]["measured_on"] == "NVIDIA H200"


def test_without_a_best_there_is_nothing_to_write() -> None:
    with pytest.raises(InputError, match="without a best config has nothing to write"):
        result(best=None).to_yaml()


def foretold() -> Result:
    found = Estimate(
        BEST.config,
        20 * GIB,
        21 * GIB,
        low=20 * GIB,
        high=22 * GIB,
        breakdown={"parameters": 20 * GIB, "context": GIB},
        step_seconds=1.5,
        samples_per_second=2.5,
        tokens_per_second=5120.3,
        bottleneck="compute",
        utilisation=0.4,
        notes=("a note",),
        budget=Budget(24 * GIB, 32 * GIB),
    )
    return result(best=None, tiers={}, predicted_best=found, predicted_tiers={"lora": found})


def test_a_prediction_is_written_as_one_and_read_back(tmp_path: Path) -> None:
    whole = foretold()
    data = parse(whole.to_yaml(), "the test")
    assert data["measured"] is None
    assert data["predicted"]["device_bytes"] == {"low": 20 * GIB, "high": 22 * GIB}
    assert data["predicted"]["fits"] == "yes"
    assert data["tiers"]["lora"] == {"config": dict(BEST.config), "predicted": data["predicted"]}
    assert data["tiers"]["full"] is None
    loaded = SavedResult.load(saved(tmp_path, whole.to_yaml()))
    assert (loaded.config, dict(loaded.measured)) == (BEST.config, {})
    assert loaded.predicted == data["predicted"]


def test_a_prediction_in_json() -> None:
    data = json.loads(json.dumps(foretold().to_json()))
    assert data["best"] is None
    assert data["predicted"]["config"] == dict(BEST.config)
    assert data["predicted"]["estimate"]["fits"] == "yes"
    assert data["predicted"]["tiers"]["lora"]["estimate"] == data["predicted"]["estimate"]
    assert data["predicted"]["tiers"]["full"] is None
    assert result().to_json()["predicted"] is None


def test_figures_of_a_prediction_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    text = foretold().to_yaml().replace("step_seconds: 1.5", "step_seconds: soon", 1)
    with pytest.raises(InputError, match=r"predicted\.step_seconds is 'soon'"):
        SavedResult.load(saved(tmp_path, text))


def test_the_json_has_the_keys_of_the_contract() -> None:
    data = json.loads(json.dumps(result(nearest_miss=MISS).to_json()))
    assert list(data) == [
        *(
            "schema",
            "best",
            "predicted",
            "tiers",
            "trials",
            "skipped",
            "stopped_by",
            "nearest_miss",
            "frontier",
        ),
        *(
            "alternatives",
            "other_budgets",
            "on_devices",
            "remedies",
            "space_size",
            "search_seconds",
            "notes",
        ),
        *("versions", "files"),
    ]
    assert data["best"] == {"config": dict(BEST.config), "measured": BEST.to_measured()}
    assert data["skipped"] == {"predicted": 0, "dominated": 2, "refused": 0}
    assert [trial["number"] for trial in data["trials"]] == [7, 8]
    assert data["nearest_miss"]["outcome"] == "out_of_memory"
    assert data["search_seconds"] == 12.346
    assert data["files"] == {
        "result": "x/result.yaml",
        "script": None,
        "exports": None,
        "report": None,
    }


def point(gib: float, rate: float, measured: bool = False) -> Point:
    return Point(Config(lora_rank=8), int(gib * GIB), rate, None, measured)


def test_what_a_budget_would_run() -> None:
    """22.8 of 24 GiB may be used, 95 % of it."""
    points = (point(10, 1.0), point(22.8, 2.0, measured=True), point(30, 3.0))
    whole = result(frontier={"full": (), "lora": points})
    found = {gib: whole.fastest_within(gib * GIB) for gib in (10, 11, 23, 24, 32)}
    assert [each["lora"] and each["lora"].samples_per_second for each in found.values()] == [
        None,
        1.0,
        1.0,
        2.0,
        3.0,
    ]
    assert [each["full"] for each in found.values()] == [None] * 5
    assert list(found[10]) == list(TIERS[:-1])
    asked = result(frontier={"full": (), "head": points})
    assert asked.fastest_within(24 * GIB)["head"] == points[1]


def test_the_json_says_what_other_budgets_would_run() -> None:
    points = (point(10, 1.0), point(20, 2.0, measured=True))
    other = Alternative(
        "precision", Config(precision="fp32"), Outcome.OUT_OF_MEMORY, 30 * GIB, 1.0, None, False
    )
    smaller = OtherBudget("the next smaller card", 16 * GIB, "A card")
    data = json.loads(
        json.dumps(
            result(
                frontier={"lora": points}, alternatives=(other,), other_budgets=(smaller,)
            ).to_json()
        )
    )
    assert data["frontier"] == {"full": [], "lora": to_plain(points), "qlora": []}
    assert [each["measured"] for each in data["frontier"]["lora"]] == [False, True]
    assert data["alternatives"] == [other.to_dict()]
    assert data["other_budgets"] == [
        {
            "why": "the next smaller card",
            "device_bytes": 16 * GIB,
            "card": "A card",
            "runs": {"full": None, "lora": to_plain(points[0]), "qlora": None},
        }
    ]


def test_the_json_of_a_search_in_which_nothing_fits() -> None:
    data = result(best=None, tiers={}, trials=(), files={}).to_json()
    assert data["best"] is None
    assert data["tiers"] == {"full": None, "lora": None, "qlora": None}
    assert data["nearest_miss"] is None


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({}, "full"),
        ({"lora_rank": 0, "quantization": "none"}, "full"),
        ({"lora_rank": 8}, "lora"),
        ({"lora_rank": 8, "quantization": "none"}, "lora"),
        ({"lora_rank": 8, "quantization": "nf4"}, "qlora"),
    ],
)
def test_tiers(knobs: dict, name: str) -> None:
    assert tier(knobs) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: 1",
            "is not a result of autofit: it lacks autofit, model, workload, config. Give a result.yaml.",
        ),
        ("{autofit: 1, model: m, workload: {}}", "it lacks config"),
        (
            "{autofit: 2, model: m, workload: {}, config: {}}",
            "has schema 2; this autofit reads schema 1",
        ),
        ("{autofit: 1, model: m, workload: [], config: {}}", "workload must be a mapping"),
        (
            "{autofit: 1, model: m, workload: {}, config: {}, hardware: [1]}",
            "hardware must be a mapping",
        ),
        (
            "{autofit: 1, model: m, workload: {}, config: {}, source: text}",
            "source must be a mapping",
        ),
        (
            "{autofit: 1, model: m, workload: {}, config: {}, measured: {tokens_per_second: fast}}",
            "_second is 'fast'",
        ),
        (
            "{autofit: 1, model: m, workload: {}, config: {}, measured: {step_seconds: 3}}",
            r"measured\.step_seconds is 3",
        ),
        ("{autofit: 1, model: m, workload: {}, config: {a: [1]}}", "a must be one plain value"),
        ("- 1", "should hold a mapping"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SavedResult.load(saved(tmp_path, text))


def test_the_parts_that_may_be_missing(tmp_path: Path) -> None:
    loaded = SavedResult.load(
        saved(tmp_path, "{autofit: 1, model: m, workload: {}, config: {precision: bf16}}")
    )
    assert (loaded.source, loaded.hardware, loaded.measured) == ({}, {}, {})
    assert loaded.config == Config(precision="bf16")


def test_what_the_allocator_was_set_to_is_recorded() -> None:
    assert "allocator" not in result().to_yaml()
    fixed = result(hardware=dataclasses.replace(HARDWARE, allocator="expandable_segments:False"))
    assert (
        parse(fixed.to_yaml(), "result.yaml")["hardware"]["allocator"]
        == "expandable_segments:False"
    )


TRIALS = (
    Measurement(
        Config(precision="bf16", lora_rank=8),
        Outcome.FITS,
        step_seconds=StepSeconds(1.0, 0.9, 1.1),
        tokens_per_second=100.0,
        peak_bytes=PeakBytes(5, None, None),
    ),
    Measurement(
        Config(precision="fp32", extra=None),
        Outcome.OUT_OF_MEMORY,
        number=1,
        reason="too much, by\nfar",
    ),
)


def test_trials_as_csv_hold_every_knob_and_figure() -> None:
    first, second = csv.DictReader(io.StringIO(result(trials=TRIALS).trials_csv()))
    assert (first["precision"], first["lora_rank"], first["extra"]) == ("bf16", "8", "")
    assert (first["step_seconds"], first["step_seconds_high"], first["allocated_bytes"]) == (
        "1.0",
        "1.1",
        "5",
    )
    assert first["tokens_per_second"] == "100.0"
    assert (second["outcome"], second["step_seconds"], second["device_bytes"]) == (
        "out_of_memory",
        "",
        "",
    )
    assert (second["reason"], second["lora_rank"]) == ("too much, by\nfar", "")
    assert result(trials=()).trials_csv() == "number\n"


def test_trials_as_a_data_frame_hold_the_same() -> None:
    pandas = pytest.importorskip("pandas")
    frame = result(trials=TRIALS).trials_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["number"]) == [0, 1]
    assert frame["lora_rank"][0] == 8
    assert ",".join(frame.columns) == result(trials=TRIALS).trials_csv().partition("\n")[0]


def test_without_pandas_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas"):
        result().trials_dataframe()


def test_a_result_prints_as_its_answer_in_a_few_lines() -> None:
    text = str(result())
    assert text.splitlines() == [
        "Result: llama-3.1-8b on NVIDIA H200 within 24.00 GiB, 2 trials",
        "  lora: 5,120 tokens/s, 22.00 GiB (measured); "
        "precision=bf16, micro_batch_size=4, lora_rank=8, lora_targets=all-linear",
    ]
    assert repr(result()) == text
    nothing = result(best=None, tiers=dict.fromkeys(TIERS))
    assert str(nothing).splitlines()[1:] == ["  nothing fits"]
