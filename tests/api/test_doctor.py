"""What this machine offers, told without opening the device in this process."""

import importlib.metadata
import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from autofit import techniques
from autofit.api import doctor
from autofit.api.doctor import clear_store, examine
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.probe import LocalExecutor
from autofit.report.listings import doctor_table
from autofit.tuning.measurement_store import Store, Stored, Subject
from tests import warm

pytestmark = pytest.mark.usefixtures("shared_zygote")


def test_what_there_is() -> None:
    found = examine("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {
        "schema",
        "hardware",
        "budget_gib",
        "versions",
        "broken",
        "calibration",
        "store",
        "techniques",
    }
    hardware = found["hardware"]
    assert hardware["device"] == "cpu"
    assert 0.5 < found["budget_gib"] / (hardware["host_free_bytes"] / GIB) < 0.81
    assert found["versions"]["torch"] == importlib.metadata.version("torch")


def test_what_is_stored_is_counted_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = Store()
    nothing = {"path": str(store.path), "measurements": 0, "models": 0}
    assert examine("cpu")["store"] == nothing | {"trouble": None}
    seen = Stored(Measurement(Config(), Outcome.FITS), 1, "here", "one")
    for workload in ("a", "a", "b"):
        store.add(Subject(workload, workload), seen)
    there = {"path": str(store.path), "measurements": 3, "models": 2}
    assert examine("cpu")["store"] == there | {"trouble": None}
    assert clear_store() == {"schema": 1, "cleared": there}
    assert clear_store() == {"schema": 1, "cleared": nothing}

    store.path.write_bytes(b"not a database" * 100)
    found = examine("cpu")["store"]
    assert found["measurements"] is None
    assert "is damaged" in found["trouble"]
    assert store.path.read_bytes() == b"not a database" * 100
    assert clear_store()["cleared"]["measurements"] is None
    assert not list(store.path.parent.iterdir())
    assert examine("cpu")["store"] == nothing | {"trouble": None}


def values_of(found: dict[str, Any], name: str) -> dict[Any, dict[str, Any]]:
    (row,) = (row for row in found["techniques"] if row["name"] == name)
    return {each["value"]: each for each in row["values"]}


def test_every_technique_and_every_value_is_told_of() -> None:
    found = examine("cpu")
    assert [row["name"] for row in found["techniques"]] == [
        each.name for each in techniques.all_techniques()
    ]
    for technique in techniques.all_techniques():
        values = values_of(found, technique.name)
        assert set(technique.values) <= set(values) or technique.off is None
        for each in values.values():
            assert each["available"] == (each["reason"] is None)
            assert each["version"] or not each["available"]


def test_how_values_stand_on_a_cpu() -> None:
    found = examine("cpu")
    precision = values_of(found, "precision")
    assert precision["bf16"] == {
        "value": "bf16",
        "package": "torch",
        "version": importlib.metadata.version("torch"),
        "searched": True,
        "available": True,
        "reason": None,
    }
    assert precision["fp16-mixed"]["available"] and not precision["fp16-mixed"]["searched"]
    assert precision["fp8"]["package"] == "torchao"
    assert precision["fp8"]["reason"] == "fp8 products need GPU matrix units; use bf16 on a CPU."
    assert values_of(found, "quantization")["nf4"]["available"]  # beside a rank, which it needs
    assert values_of(found, "lora_targets")["all-linear"]["available"]
    assert values_of(found, "gradient_accumulation_steps") == {}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.setup.requirements.installed", lambda name: False)
    found = examine("cpu")
    assert "pip install bitsandbytes" in values_of(found, "optimizer")["adamw-8bit"]["reason"]
    assert values_of(found, "lora_rank")[0]["available"]
    assert "pip install peft" in values_of(found, "lora_rank")[8]["reason"]


def test_a_broken_library_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examine("cpu")["broken"] == {}

    fails = tmp_path / "fails.py"
    fails.write_text("raise RuntimeError('operator nms does not exist')")
    ends = tmp_path / "ends.py"
    ends.write_text("import os; os._exit(7)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor, "_MODULES", {"bitsandbytes": "fails", "peft": "ends"})
    # which imports from where this process does now
    with warm.zygotes(), LocalExecutor() as executor:
        monkeypatch.setattr(doctor, "LocalExecutor", lambda: nullcontext(executor))
        found = examine("cpu")

    error = "RuntimeError: operator nms does not exist"
    assert found["broken"] == {
        "bitsandbytes": error,
        "peft": "importing peft ended its process: exit code 7.",
    }
    reason = values_of(found, "optimizer")["adamw-8bit"]["reason"]
    assert reason == f"bitsandbytes cannot be imported: {error}."
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(doctor_table(found))
    assert f"broken: bitsandbytes  {error}" in console.export_text()


def test_no_such_device() -> None:
    with pytest.raises(InputError, match="the device must be cpu or cuda, not 'tpu'"):
        examine("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="no CUDA device"):
        examine("cuda")
