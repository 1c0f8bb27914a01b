"""The head of the script says what was measured, where and by what."""

from autofit.core.hardware import GIB
from autofit.export.head import head

HARDWARE = {"device": "cuda", "name": "NVIDIA H200", "budget_gib": 24.0}
MEASURED = {
    "tokens_per_second": 5120.3,
    "samples_per_second": 2.5,
    "step_seconds": {"median": 12.8, "low": 12.7, "high": 12.9},
    "peak_gib": {"allocated": 20.1, "reserved": 21.0, "device": 21.6},
    "verified": True,
}
VERSIONS = {"autofit": "0.1.0", "torch": "2.13.0", "optuna": "5.0.0"}


def joined(text: str) -> str:
    return " ".join(text.split())


def test_all_figures_are_named_with_their_units() -> None:
    text = joined(head(HARDWARE, measured=MEASURED, versions=VERSIONS, packages=["torch", "transformers"]))
    assert "Measured on NVIDIA H200, within 24 GiB and verified in longer runs: 5,120 tokens per second" in text
    assert "12.8 s per optimizer step (12.7 to 12.9), peak memory 21.6 GiB" in text
    assert "optuna" not in text
    assert "It needs torch 2.13.0 and transformers (autofit 0.1.0)." in text


def test_an_unmeasured_config_is_not_presented_as_measured() -> None:
    text = joined(head(HARDWARE, measured=None, versions={}, packages=["torch"]))
    assert "it was not measured" in text
    assert "Measured on" not in text


def test_predicted_figures_are_told_as_such() -> None:
    predicted = {
        "tokens_per_second": 2010.4,
        "step_seconds": 32.6,
        "device_bytes": {"low": 10 * GIB, "high": int(11.5 * GIB)},
    }
    text = joined(head(HARDWARE, measured=None, predicted=predicted, versions={}, packages=["torch"]))
    assert "Nothing of it was measured. Predicted on NVIDIA H200, within 24 GiB: 2,010 tokens per second" in text
    assert "32.6 s per optimizer step, peak memory 10 to 11.5 GiB." in text


def test_speed_of_one_card_for_the_memory_of_another_says_both() -> None:
    hardware = {**HARDWARE, "name": "RTX 4090", "measured_on": "NVIDIA H200"}
    text = joined(head(hardware, measured=MEASURED, versions={}, packages=["torch"]))
    assert "Measured on NVIDIA H200, for RTX 4090, within 24 GiB" in text


def test_memory_on_cpu_is_what_tensors_take() -> None:
    measured = {**MEASURED, "tokens_per_second": None, "peak_gib": {"allocated": 1.5, "reserved": None, "device": None}}
    text = joined(head({"device": "cpu", "name": "x"}, measured=measured, versions={}, packages=["torch"]))
    assert "2.5 samples per second" in text
    assert "peak memory 1.5 GiB" in text


def test_what_one_knob_did_is_told_where_it_was_measured() -> None:
    changes = ["attention eager: 0.90 x the speed", "micro_batch_size 8: out of memory"]
    text = head(HARDWARE, measured=MEASURED, versions=VERSIONS, packages=["torch"], changes=changes)
    assert "changed:\n    attention eager: 0.90 x the speed\n    micro_batch_size 8: out of memory\n\n" in text
    assert "changed" not in head(HARDWARE, measured=MEASURED, versions=VERSIONS, packages=["torch"])
