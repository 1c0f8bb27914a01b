"""What this machine offers, told without opening the device in this process."""

import json

import pytest
import torch

from autofit import techniques
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB
from autofit.doctor import examine

pytestmark = pytest.mark.usefixtures("shared_zygote")


def test_what_there_is() -> None:
    found = examine("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == {"schema", "hardware", "budget_gib", "versions", "techniques"}
    hardware = found["hardware"]
    assert hardware["device"] == "cpu"
    assert 0.5 < found["budget_gib"] / (hardware["host_free_bytes"] / GIB) < 0.81
    assert found["versions"]["torch"] == torch.__version__


def test_every_technique_and_every_value_is_told_of() -> None:
    rows = {row["name"]: row for row in examine("cpu")["techniques"]}
    assert list(rows) == [technique.name for technique in techniques.all_techniques()]
    precision = rows["precision"]
    assert precision["choices"] == ["fp32", "bf16", "bf16-mixed"]
    assert "by hand" in precision["unavailable"]["fp16-mixed"]
    assert rows["lora_targets"]["choices"]
    assert rows["gradient_accumulation_steps"]["choices"] == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = {row["name"]: row for row in examine("cpu")["techniques"]}
    assert "adamw-8bit" not in rows["optimizer"]["choices"]
    assert "pip install bitsandbytes" in rows["optimizer"]["unavailable"]["adamw-8bit"]
    assert 0 in rows["lora_rank"]["choices"]
    assert "pip install peft" in rows["lora_rank"]["unavailable"]["8"]


def test_no_such_device() -> None:
    with pytest.raises(InputError, match="the device must be cpu or cuda, not 'tpu'"):
        examine("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="no CUDA device"):
        examine("cuda")
