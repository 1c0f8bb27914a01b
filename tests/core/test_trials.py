"""Trials as rows, as CSV and as a data frame."""

import csv
import io
import sys

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.trials import rows, to_csv, to_dataframe

TRIALS = (
    Measurement(
        Config(precision="bf16", lora_rank=8),
        Outcome.FITS,
        step_seconds=StepSeconds(1.0, 0.9, 1.1),
        tokens_per_second=100.0,
        peak_bytes=PeakBytes(5, None, None),
    ),
    Measurement(Config(precision="fp32", extra=None), Outcome.OUT_OF_MEMORY, number=1, reason="too much, by\nfar"),
)


def test_every_row_has_every_knob_and_figure() -> None:
    first, second = rows(TRIALS)
    assert list(first) == list(second)
    assert (first["precision"], first["lora_rank"], first["extra"]) == ("bf16", 8, None)
    assert (first["step_seconds"], first["step_seconds_high"], first["allocated_bytes"]) == (1.0, 1.1, 5)
    assert (second["outcome"], second["step_seconds"], second["device_bytes"]) == ("out_of_memory", None, None)


def test_csv_reads_back() -> None:
    first, second = csv.DictReader(io.StringIO(to_csv(TRIALS)))
    assert first["tokens_per_second"] == "100.0"
    assert second["reason"] == "too much, by\nfar"
    assert second["lora_rank"] == ""
    assert to_csv(()) == "number\n"


def test_a_data_frame_holds_the_same() -> None:
    pandas = pytest.importorskip("pandas")
    frame = to_dataframe(TRIALS)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["number"]) == [0, 1]
    assert list(frame.columns) == list(rows(TRIALS)[0])


def test_without_pandas_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas"):
        to_dataframe(TRIALS)
