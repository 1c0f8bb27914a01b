"""Measurement: it comes back from the journal as it was, and its figures are short enough to read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds

positive = st.floats(0.001, 1e6)
sizes = st.integers(0, 2**45)
measurements = st.builds(
    Measurement,
    config=st.dictionaries(
        st.text("abc", min_size=1), st.none() | st.booleans() | st.integers() | st.text()
    ).map(Config),
    outcome=st.sampled_from(Outcome),
    number=st.integers(0, 1000),
    step_seconds=st.none() | st.builds(StepSeconds, positive, positive, positive),
    samples_per_second=st.none() | positive,
    tokens_per_second=st.none() | positive,
    peak_bytes=st.none()
    | st.builds(PeakBytes, sizes, st.none() | sizes, st.none() | sizes, st.none() | sizes),
    loss=st.none() | positive,
    reason=st.none() | st.text(),
    seconds=positive,
    steps=st.integers(0, 100),
    composed=st.booleans(),
    verified=st.booleans(),
    warnings=st.lists(st.text(), max_size=2).map(tuple),
)


@given(measurements)
def test_a_journey_through_json_changes_nothing(measurement: Measurement) -> None:
    assert Measurement.from_trial(json.loads(json.dumps(measurement.to_trial()))) == measurement


def test_a_journal_from_before_compiling_was_timed_still_opens() -> None:
    trial = Measurement(Config(), Outcome.FITS, compile_seconds=3.0).to_trial()
    assert trial.pop("compile_seconds") == 3.0
    assert Measurement.from_trial(trial).compile_seconds == 0.0


def test_a_trial_has_the_keys_of_the_contract() -> None:
    trial = Measurement(
        Config(precision="bf16"),
        Outcome.FITS,
        number=3,
        step_seconds=StepSeconds(1.0, 0.9, 1.1),
        peak_bytes=PeakBytes(allocated=5),
    ).to_trial()
    keys = {
        "number",
        "config",
        "outcome",
        "tokens_per_second",
        "samples_per_second",
        "step_seconds",
        "peak_bytes",
    }
    assert keys | {"reason", "seconds"} <= set(trial)
    assert trial["config"] == {"precision": "bf16"}
    assert type(trial["config"]) is dict
    assert trial["outcome"] == "fits"
    assert trial["step_seconds"] == {"median": 1.0, "low": 0.9, "high": 1.1}
    assert trial["peak_bytes"] == {
        "allocated": 5,
        "reserved": None,
        "device": None,
        "resident": None,
    }


def test_the_words_of_the_outcomes() -> None:
    assert {outcome.value for outcome in Outcome} == {
        *(
            "fits",
            "out_of_memory",
            "host_out_of_memory",
            "refused",
            "diverged",
            "timed_out",
            "failed",
        )
    }


def test_the_figures_of_a_result() -> None:
    measurement = Measurement(
        Config(),
        Outcome.FITS,
        step_seconds=StepSeconds(12.3456789, 12.0, 12.999999),
        samples_per_second=0.00123456,
        tokens_per_second=5120.349,
        peak_bytes=PeakBytes(allocated=20 * GIB + 1, reserved=21 * GIB, device=int(21.6 * GIB)),
        verified=True,
    )
    assert measurement.to_measured() == {
        "tokens_per_second": 5120.3,
        "samples_per_second": 0.0012346,
        "step_seconds": {"median": 12.346, "low": 12.0, "high": 13.0},
        "peak_gib": {"allocated": 20.0, "reserved": 21.0, "device": 21.6},
        "verified": True,
    }


@pytest.mark.parametrize("outcome", Outcome)
def test_only_fits_fits_and_nothing_timed_is_no_throughput(outcome: Outcome) -> None:
    measurement = Measurement(Config(), outcome)
    assert measurement.fits == (outcome is Outcome.FITS)
    assert measurement.throughput == 0.0
    assert measurement.to_measured()["step_seconds"] is None
    assert measurement.to_measured()["peak_gib"] is None


@pytest.mark.parametrize(
    ("peak", "held"),
    [
        (PeakBytes(3), 3),
        (PeakBytes(3, 4), 4),
        (PeakBytes(3, 4, 5), 5),
        (PeakBytes(3, resident=9), 3),
    ],
)
def test_what_is_held_against_the_budget(peak: PeakBytes, held: int) -> None:
    assert peak.held_bytes == held


def test_the_larger_of_two_peaks_is_so_figure_by_figure() -> None:
    assert PeakBytes(5, 9, 12, 7).larger(PeakBytes(6, 8, 13, 7)) == PeakBytes(6, 9, 13, 7)
    assert PeakBytes(5, None, None, 7).larger(PeakBytes(4)) == PeakBytes(5)
