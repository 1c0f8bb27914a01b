"""gradient_accumulation_steps: derived from the batch sizes, checked when it is written out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.techniques import canonicalize, technique_named
from tests import tiny
from tests.techniques.contract import EFFECTIVE_BATCH, Effect


@given(micro=st.integers(1, 64), steps=st.integers(1, 64), ranks=st.integers(1, 8))
def test_micro_batch_times_steps_times_ranks_is_the_effective_batch(
    micro: int, steps: int, ranks: int
) -> None:
    workload = tiny.mlp_workload(micro * steps * ranks)
    hardware = replace(tiny.CPU, devices=ranks)
    config = canonicalize({"micro_batch_size": micro}, workload, hardware)
    assert config["gradient_accumulation_steps"] == steps
    written_out = {"micro_batch_size": micro, "gradient_accumulation_steps": steps}
    assert canonicalize(written_out, workload, hardware) == config


@given(effective=st.integers(1, 100), micro=st.integers(1, 110))
def test_what_does_not_divide_is_an_error_that_names_what_does(effective: int, micro: int) -> None:
    workload = tiny.mlp_workload(effective)
    if effective % micro == 0:
        canonicalize({"micro_batch_size": micro}, workload, tiny.CPU)
        return
    with pytest.raises(InputError, match=f"micro_batch_size {micro} does not divide") as caught:
        canonicalize({"micro_batch_size": micro}, workload, tiny.CPU)
    named = caught.value.remedy.removeprefix("Choose from: ").rstrip(".").split(", ")
    assert [int(size) for size in named] == [
        size for size in range(1, effective + 1) if effective % size == 0
    ]


def test_alone_it_contradicts_the_whole_batch() -> None:
    with pytest.raises(
        InputError, match="gradient_accumulation_steps 2 x micro_batch_size 8 is not"
    ):
        canonicalize({"gradient_accumulation_steps": 2}, tiny.mlp_workload(8), tiny.CPU)


def test_it_is_never_searched() -> None:
    technique = technique_named("gradient_accumulation_steps")
    assert technique.choices(tiny.CPU) == ()
    assert technique.choices_for(tiny.mlp_workload(8), tiny.CPU) == ()


NUMBERS = (1, 2, 4)
OFF = {}


def beside(value):
    return {"micro_batch_size": EFFECTIVE_BATCH // value}


def shows(effect: Effect) -> None:
    assert len(effect.trace.samples) == effect.value
