"""A record reads back as it was written, and other files are refused in a sentence."""

import dataclasses
import json
from pathlib import Path

import pytest

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.estimate import Estimate, Timeline
from autofit.core.hardware import GIB, Hardware
from autofit.core.learning import LearningCurve
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.pareto import Alternative, OtherBudget, Point
from autofit.core.record import Predicted, Record
from autofit.core.result import OnDevices, Result

CONFIG = Config(
    precision="bf16", micro_batch_size=2, lora_rank=0, lora_targets=None, optimizer_in_backward=True
)
CARD = Hardware(
    "cuda", "a card", 24 * GIB, 64 * GIB, 60 * GIB, 8, capability=(8, 9), context_bytes=GIB // 2
)
FITS = Measurement(
    CONFIG,
    Outcome.FITS,
    step_seconds=StepSeconds(1.0, 0.9, 1.1),
    samples_per_second=8.0,
    tokens_per_second=512.0,
    peak_bytes=PeakBytes(10 * GIB, 11 * GIB, 12 * GIB),
    warnings=("careful",),
)
MISS = Measurement(
    CONFIG.replace(precision="fp32"),
    Outcome.OUT_OF_MEMORY,
    number=1,
    peak_bytes=PeakBytes(25 * GIB),
)
BEST = dataclasses.replace(FITS, verified=True)
LINE = Timeline(
    CONFIG,
    ((1, 2, 3, 4, 0, 0, 5), (1, 2, 3, 9, 0, 0, 0)),
    (0.0, 1.0),
    (("forward", 0.0), ("backward", 0.5)),
    True,
    15,
    "forward",
)
RESULT = Result(
    model="tiny",
    workload={"task": "causal-lm", "sequence_length": 64, "effective_batch_size": 8},
    source={"kind": "preset", "model": "tiny"},
    hardware=CARD,
    budget=Budget(24 * GIB, 60 * GIB),
    versions={"autofit": "0.1.0"},
    best=BEST,
    tiers={"full": BEST, "lora": None, "qlora": None},
    trials=(FITS, MISS),
    skipped={"predicted": 1, "dominated": 2, "refused": 3},
    stopped_by="bound",
    space_size=8,
    search_seconds=12.5,
    nearest_miss=None,
    finalists=(BEST,),
    run_directory="runs/x",
    files={"result": "runs/x/result.yaml", "script": None, "exports": None, "report": None},
    notes=("a note",),
    bound=0.02,
    frontier={"full": (Point(CONFIG, 12 * GIB, 8.0, 512.0, True),), "lora": (), "qlora": ()},
    alternatives=(
        Alternative("precision", MISS.config, Outcome.OUT_OF_MEMORY, None, None, None, True),
    ),
    other_budgets=(OtherBudget("the next larger card", 48 * GIB, "A6000"),),
    predicted=True,
    learning=(
        LearningCurve(CONFIG).with_run((9.0, 9.0, 1.0), (3.0, 2.0, 1.5)),
        LearningCurve(CONFIG, reason="no"),
    ),
    on_devices=(OnDevices(1, 12 * GIB, None), OnDevices(2, 7 * GIB, 900.0)),
)
RECORD = Record(
    RESULT,
    {"seed": 3, "tolerance": 0.02, "space": None, "set": {"precision": ["bf16"]}},
    (Predicted(9.5 * GIB, 1.1), Predicted()),
    {"full": LINE},
    "2026-01-02T03:04:05+00:00",
)


def saved(record: Record, folder: Path) -> Path:
    path = folder / "result.json"
    path.write_text(record.to_text())
    return path


def test_it_reads_back_as_it_was(tmp_path: Path) -> None:
    assert Record.load(saved(RECORD, tmp_path)) == RECORD
    assert LINE.fullest == 0


def test_without_a_best_and_predictions_too(tmp_path: Path) -> None:
    nothing = dataclasses.replace(
        RESULT, best=None, tiers=dict.fromkeys(RESULT.tiers), nearest_miss=MISS, predicted=False
    )
    record = Record(nothing)
    assert Record.load(saved(record, tmp_path)) == record
    assert record.tolerance == 0.03


def test_what_was_only_predicted_too(tmp_path: Path) -> None:
    found = Estimate(
        CONFIG, 5, 6, 4, 8, {"context": 1}, 0.5, 2.0, notes=("a", "b"), budget=RESULT.budget
    )
    nothing = dataclasses.replace(
        RESULT, best=None, tiers=dict.fromkeys(RESULT.tiers), trials=(), finalists=()
    )
    tiers = {"full": found, "lora": None, "qlora": None}
    record = Record(
        dataclasses.replace(nothing, predicted_best=found, predicted_tiers=tiers),
        timelines={"full": LINE},
    )
    assert Record.load(saved(record, tmp_path)) == record


def test_it_holds_all_that_json_prints(tmp_path: Path) -> None:
    data = json.loads(saved(RECORD, tmp_path).read_text())
    printed = json.loads(json.dumps(RESULT.to_json()))
    for trial in data["trials"]:
        assert trial.pop("predicted").keys() == {"allocated_bytes", "step_seconds"}
    for alternative in data["alternatives"]:
        assert alternative.pop("config") == dict(MISS.config)
    assert {name: data[name] for name in printed} == printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result of autofit"),
        ('{"schema": 1}', "is not a result of autofit"),
        ('{"schema": 2, "finals": {}}', "has schema 2; this autofit reads schema 1"),
        ('{"schema": 1, "finals": {}, "trials": []}', "is damaged: KeyError"),
        ('{"schema": 1, "finals": {}, "trials": [7]}', "is damaged"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        Record.load(path)


def test_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no result\.json in"):
        Record.load(tmp_path / "result.json")
