"""A search in which the loss was never finite says so, and not that memory lacks."""

import dataclasses

from autofit.core.measurement import Measurement, Outcome
from autofit.core.result import Result
from autofit.report.explain import nothing_fits, nothing_fits_lines
from tests.core.test_record import CONFIG, MISS, RESULT


def searched(*trials: Measurement) -> Result:
    nothing: dict[str, None] = {"full": None, "lora": None, "qlora": None}
    return dataclasses.replace(
        RESULT,
        best=None,
        tiers=nothing,
        trials=trials,
        finalists=(),
        frontier={},
        alternatives=(),
        other_budgets=(),
    )


def diverged(precision: str) -> Measurement:
    config = CONFIG.replace(precision=precision)
    return Measurement(config, Outcome.DIVERGED, reason="the loss is nan")


def test_it_says_in_which_config_and_what_to_look_at() -> None:
    result = searched(diverged("fp16-mixed"), diverged("bf16"))
    text = "\n".join(nothing_fits_lines(result))
    assert text.startswith("Nothing trains: tiny on ")
    assert "The loss was not finite in 2 configs: first in fp16-mixed" in text
    assert "(the loss is nan)" in text
    assert "bf16 and fp16-mixed may overflow; see whether --set precision=fp32 does" in text
    assert "Learning rate" in text
    assert "Data and loss" in text
    assert "more memory" not in text
    assert "budget" not in text


def test_where_fp32_diverges_the_precision_is_not_to_blame() -> None:
    text = "\n".join(nothing_fits_lines(searched(diverged("fp32"))))
    assert "The loss was not finite in 1 config" in text
    assert "fp32 diverges, too" in text


def test_what_fit_raises_says_the_same() -> None:
    error = nothing_fits(searched(diverged("bf16")))
    assert error.exit_code == 3
    assert error.message.startswith("The loss was not finite in 1 config: first in bf16")
    assert "Data and loss" in error.remedy


def test_beside_what_ran_out_of_memory_it_is_told_as_well() -> None:
    lines = nothing_fits_lines(searched(MISS, diverged("bf16")))
    assert lines[0].startswith("Nothing fits: tiny on ")
    assert any(line.startswith("The loss was not finite in 1 config") for line in lines)
    assert any("nearest miss" in line for line in lines)
