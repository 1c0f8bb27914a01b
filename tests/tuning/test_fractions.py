"""The least number of blocks that fits is found between all and none, by few predictions."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit import techniques
from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.peak import peak_of
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, hardware_of
from autofit.tuning.fractions import (
    Fractions,
    may_fit_between,
    predict_between,
    values_between,
)
from autofit.tuning.local_search import LocalSearch, Merit, Neighbours
from autofit.tuning.narrowing import Row, Values
from autofit.tuning.target import structure_traits
from tests.tiny import CPU, llama_workload

KNOBS: Values = {
    "activation_checkpointing": ("full", "selective", "none"),
    "lora_rank": (0,),
    "micro_batch_size": (1, 2),
}
OFF = {
    "activation_checkpointing": "none",
    "activation_offload": "none",
    "lora_rank": 0,
    "micro_batch_size": 1,
    "optimizer_offload": "none",
    "parameter_offload": "none",
}


def of(value: str, samples: int = 1) -> Config:
    return Config({**OFF, "activation_checkpointing": value, "micro_batch_size": samples})


def fractions_of(blocks: int, knobs: Values = KNOBS, refuses: str = "") -> Fractions:
    def rule(config: Config) -> str | None:
        return "not there" if refuses and refuses in config.activation_checkpointing else None

    return Fractions(blocks, knobs, Constraints(OFF, {}, {"activation_checkpointing": rule}))


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=80),
    st.floats(0.0, 1.0),
    st.sampled_from(["none", "selective"]),
)
def test_the_least_number_that_fits_is_found_whatever_each_block_takes(
    kept: list[float], share: float, rest: str
) -> None:
    """Each block frees another part: how far bytes fall with the number is no straight line."""
    blocks = len(kept)

    def nbytes(number: int) -> float:
        return 1.0 + sum(kept[number:])

    cap = nbytes(blocks) + share * (nbytes(0) - nbytes(blocks))
    least = next(number for number in range(blocks + 1) if nbytes(number) <= cap)

    def fits(row: Row) -> bool:
        return row.nbytes <= cap

    fractions = fractions_of(blocks)
    fractions.note(Row(of("full"), nbytes(blocks), 2.0))
    fractions.note(Row(of(rest), nbytes(0), 1.0))
    asked = []
    while expected := fractions.expected("full", fits):
        (row,) = expected
        asked.append(row.config.activation_checkpointing)
        assert 1.0 < row.seconds < 2.0
        number = int(asked[-1].removeprefix("full:").removesuffix("+selective"))
        fractions.note(Row(row.config, nbytes(number), row.seconds))

    suffix = "" if rest == "none" else "+selective"
    if 0 < least < blocks:
        assert f"full:{least}{suffix}" in asked
    assert len(set(asked)) == len(asked) < blocks


def test_equal_blocks_take_two_predictions() -> None:
    fractions = fractions_of(80)
    fractions.note(Row(of("full"), 20.0, 2.0))
    fractions.note(Row(of("none"), 100.0, 1.0))
    (row,) = fractions.expected("full", lambda row: row.nbytes <= 60.5)
    assert row == Row(of("full:40"), 60.0, 1.5)
    fractions.note(row)
    (row,) = fractions.expected("full", lambda row: row.nbytes <= 60.5)
    assert row.config == of("full:39")
    fractions.note(row)
    assert fractions.expected("full", lambda row: row.nbytes <= 60.5) == []


def test_as_many_blocks_are_streamed_as_leave_memory_free() -> None:
    """Two blocks are on the device at any time, so that three are the least."""
    knobs: Values = {**KNOBS, "parameter_offload": ("cpu", "none")}
    assert values_between(knobs, 5)["parameter_offload"] == ("cpu:3", "cpu:4")

    fractions = fractions_of(8, knobs)
    plain = of("full")
    fractions.note(Row(plain, 10.0, 1.0))
    fractions.note(Row(plain.replace(parameter_offload="cpu"), 4.0, 3.0))
    for cap, number in ((9.9, 3), (7.0, 4), (5.5, 6)):
        (row,) = fractions.expected("full", lambda row, cap=cap: row.nbytes <= cap)
        assert row.config == plain.replace(parameter_offload=f"cpu:{number}")


def test_there_is_nothing_between_what_fits_or_does_not_or_is_unknown() -> None:
    for full, none, cap in ((2.0, 3.0, 4.0), (2.0, 3.0, 1.0), (math.nan, 3.0, 2.5)):
        fractions = fractions_of(8)
        fractions.note(Row(of("full"), full, 2.0))
        fractions.note(Row(of("none"), none, 1.0))
        assert fractions.expected("full", lambda row, cap=cap: row.nbytes <= cap) == []


def test_a_value_that_is_not_offered_or_refused_is_not_taken_of_some_blocks() -> None:
    def asked(fractions: Fractions) -> list[str]:
        fractions.note(Row(of("full"), 1.0, 2.0))
        for rest in ("none", "selective"):
            fractions.note(Row(of(rest), 3.0, 1.0))
        expected = fractions.expected("full", lambda row: row.nbytes <= 2.0)
        return [row.config.activation_checkpointing for row in expected]

    assert asked(fractions_of(8)) == ["full:4", "full:4+selective"]
    only_none = {**KNOBS, "activation_checkpointing": ("full", "none")}
    assert asked(fractions_of(8, only_none)) == ["full:4"]
    without_full = {**KNOBS, "activation_checkpointing": ("selective", "none")}
    assert asked(fractions_of(8, without_full)) == []
    assert asked(fractions_of(8, refuses="selective")) == ["full:4"]
    assert asked(fractions_of(8, refuses=":")) == []


def test_a_search_takes_as_few_blocks_as_fit_and_goes_on_from_there() -> None:
    """Two samples at a time are faster, and leave room for fewer plain blocks."""
    saved = {"none": 0.0, "selective": 0.5, "full": 1.0}

    def predict(configs: list[Config]) -> tuple[list[float], list[float]]:
        sizes = []
        times = []
        for config in configs:
            value = config.activation_checkpointing
            share = int(value.removeprefix("full:")) / 10 if ":" in value else saved[value]
            samples = int(config.micro_batch_size or 1)
            sizes.append(10.0 + samples * 10 * (1 - share))
            times.append((4 + share) / (1 + 0.1 * (samples == 2)))
        return sizes, times

    def merit(row: Row) -> Merit:
        return (1.0, 1 / row.seconds) if row.nbytes <= 15.5 else (0.0, -row.nbytes)

    knobs = {**KNOBS, "activation_checkpointing": ("full", "none")}
    neighbours = Neighbours(knobs, Constraints(OFF, {}, {}))
    search = LocalSearch(neighbours, predict, merit, fractions=fractions_of(10, knobs))
    search.add([of("full")])
    leader = search.refine("full")
    assert leader is not None
    assert leader.config == of("full:8", samples=2)
    partly = [config for config in search.rows if ":" in config.activation_checkpointing]
    assert len(partly) <= 4


def test_rows_that_tell_of_a_number_are_the_two_beside_it_and_the_best() -> None:
    best = Row(of("full"), 4.0, 10.0)
    faster = Row(of("none"), 9.0, 8.0)
    smaller = Row(of("full", samples=2), 4.0, 12.0)
    slower = Row(of("none", samples=2), 9.0, 11.0)
    unknown = Row(of("selective"), math.nan, math.nan)
    rows = [best, faster, smaller, slower, unknown]
    assert set(may_fit_between(rows, 5.0)) == {best, faster}
    assert may_fit_between(rows, 10.0) == []  # everything fits
    assert may_fit_between(rows, 3.0) == []  # nothing does
    assert may_fit_between([faster, slower], 5.0) == []


def test_values_between_are_all_numbers_of_what_the_space_offers() -> None:
    offered = {"activation_checkpointing": ("full", "none"), "compile": ("none",)}
    assert values_between(offered, 4) == {
        "activation_checkpointing": ("full:1", "full:2", "full:3")
    }
    assert values_between({"activation_checkpointing": ("alternate", "none")}, 4) == {}
    assert values_between(offered, 1) == {}


def test_of_a_real_model_the_number_found_is_the_least_whose_own_trace_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seconds measured here differ between two predictions, and could make more blocks faster.
    figures = importlib.import_module("autofit.estimate.figures")
    monkeypatch.setattr(figures, "rates_for", lambda hardware: UNKNOWN)

    workload = llama_workload(2, 32, num_hidden_layers=6, intermediate_size=128)
    workload = replace(workload, traits=structure_traits(workload, CPU))
    knobs: Values = {
        "activation_checkpointing": ("full", "none"),
        "micro_batch_size": (2,),
    }

    def config(value: str) -> Config:
        given = {"activation_checkpointing": value, "micro_batch_size": 2}
        return techniques.canonicalize(given, workload, CPU)

    def nbytes(value: str) -> float:
        return float(peak_of(trace(workload, config(value), CPU, whole=True), CPU).nbytes)

    sizes = {number: nbytes(f"full:{number}") for number in range(1, 6)}
    ends = [config("none"), config("full")]
    rows = list(map(Row, ends, *predict_all(workload, CPU, ends)))
    cap = (sizes[1] + sizes[2]) / 2
    assert sizes[1] > cap > sizes[2]

    found = predict_between(workload, CPU, knobs, rows, cap, [], processes=1)
    numbers = {row.config.activation_checkpointing: row.nbytes for row in found}
    assert min(numbers) == "full:2"
    for value, predicted in numbers.items():
        assert predicted == pytest.approx(sizes[int(value.removeprefix("full:"))], rel=0.01)


@pytest.mark.parametrize(
    ("knob", "beside"),
    [
        ("parameter_offload", {"lora_rank": 4, "lora_targets": "all-linear"}),
        ("activation_offload", {"activation_checkpointing": "none"}),
        ("optimizer_offload", {"activation_checkpointing": "full"}),
    ],
)
def test_as_few_blocks_as_fit_use_the_host(knob: str, beside: dict[str, object]) -> None:
    pytest.importorskip("torchao")
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1408}
    workload = llama_workload(4, 1024, **sizes, max_position_embeddings=1024)
    cards = hardware_of(card("rtx-4090"))
    workload = replace(workload, traits=structure_traits(workload, cards))
    plain = {"precision": "bf16", "micro_batch_size": 4, "attention": "sdpa", **beside}

    def config(value: str) -> Config:
        return techniques.canonicalize({**plain, knob: value}, workload, cards)

    numbers = [f"cpu:{number}" for number in range(3, 8)]
    sizes_of = dict(
        zip(numbers, predict_all(workload, cards, list(map(config, numbers)))[0], strict=True)
    )
    ends = [config("none"), config("cpu")]
    rows = list(map(Row, ends, *predict_all(workload, cards, ends)))
    assert rows[0].nbytes > sizes_of["cpu:4"] > sizes_of["cpu:5"] > rows[1].nbytes

    knobs: Values = {knob: ("cpu", "none")}
    cap = (sizes_of["cpu:4"] + sizes_of["cpu:5"]) / 2
    rows = [
        Row(row.config, row.nbytes, seconds) for row, seconds in zip(rows, (1.0, 2.0), strict=True)
    ]
    fractions = Fractions(8, knobs, techniques.constraints(workload, cards))
    found = fractions.solve(rows, lambda configs: by_bytes(workload, cards, configs), cap)
    assert [row.config[knob] for row in found] == ["cpu:5"]


def by_bytes(workload: Workload, hardware: Hardware, configs: Sequence[Config]) -> Any:
    """Predicted bytes, and seconds that rise with the number of blocks."""
    nbytes, _ = predict_all(workload, hardware, configs)
    return nbytes, [1.0 + 1.0 / size for size in nbytes]
