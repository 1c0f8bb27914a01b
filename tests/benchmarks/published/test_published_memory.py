"""The prediction of published measurements: small models of each publisher's kind, and what the figures come to."""

from typing import Any

import pytest
import torch

from autofit.core.config import Config
from autofit.core.workload import Workload
from autofit.estimate.peak import peak_of
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.training.meta_model import meta_model_from
from benchmarks import published_memory
from benchmarks.published_layers import Shape
from benchmarks.published_memory import (
    Outcome,
    fused_run,
    hardware_of,
    inexpressible,
    signs,
    split_run,
    summary,
)
from benchmarks.published_runs import rows

SMALL = Shape(
    layers=2, hidden=256, heads=4, groups=2, inner=512, vocabulary=1024, positions=512, tied=True
)
ROWS = {row["id"]: row for row in rows("published_memory")}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_memory, "shape_of", lambda model: SMALL)


def traced(name: str, **changes: str) -> tuple[Trace, int]:
    """The trace and the peak of a row at a small size."""
    row = {**ROWS[name], "seq_len": "256", "micro_batch": "2", "grad_accum": "1", **changes}
    made: tuple[Workload, Config] = fused_run(row) if name.startswith("litgpt") else split_run(row)
    hardware = hardware_of(row)
    found = trace(*made, hardware)
    return found, peak_of(found, hardware).nbytes


def trainable(found: Trace) -> int:
    """The number of elements that are trained."""
    return sum(shape.numel() for shape, _, _ in found.shapes)


def test_every_row_is_predicted_or_has_a_reason() -> None:
    assert len(ROWS) == 35
    assert not [name for name, row in ROWS.items() if inexpressible(row)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "gpt-5"}, "architecture"),
        ({"n_gpus": "8"}, "several GPUs"),
        ({"gpu": "TPU"}, "not in the catalogue"),
        ({"quant": "int3"}, "no such quantised layer"),
        ({"optimizer": "LION"}, "LION"),
        ({"mem_kind": "reserved"}, "allocator's history"),
    ],
)
def test_what_cannot_be_expressed_is_told(change: dict[str, str], reason: str) -> None:
    told = inexpressible({**ROWS["litgpt-001"], **change})
    assert told is not None
    assert reason in told


def test_adapters_are_all_that_litgpt_trains_beside_them() -> None:
    with_adapters, _ = traced("litgpt-011")
    # rank 8 on query and value: their inputs come together, their outputs are 4 and 2 heads of 64
    assert trainable(with_adapters) == SMALL.layers * (16 * 256 + 8 * (256 + 128))
    whole, _ = traced("litgpt-hub-040")
    model = meta_model_from(fused_run(ROWS["litgpt-hub-040"])[0].model)
    assert trainable(whole) == sum(parameter.numel() for parameter in model.parameters())


def test_four_bits_keep_less_of_the_weights_and_more_of_the_inputs() -> None:
    plain, _ = traced("litgpt-011")
    double, quantised = traced("litgpt-013"), traced("litgpt-012")

    def parameters(found: Trace) -> int:
        return peak_of(found, hardware_of(ROWS["litgpt-011"])).parts["parameters"]

    assert parameters(double[0]) < parameters(quantised[0]) < parameters(plain)


def test_an_earlier_micro_batch_holds_its_logits_and_the_inputs_of_four_bit_layers() -> None:
    row = {**ROWS["litgpt-hub-014"], "id": "litgpt-once"}
    hardware = hardware_of(row)
    once, _ = fused_run({**row, "seq_len": "256"}), None
    alone = peak_of(trace(*once, hardware), hardware).nbytes
    _, after = traced("litgpt-hub-014", grad_accum="4")
    assert after > alone


def test_torchtunes_flags_need_less_one_after_the_other() -> None:
    plain, compiled, chunked, checkpointed, in_backward = (
        traced(f"torchtune-00{n}")[1] for n in (2, 3, 4, 5, 6)
    )
    assert plain > compiled > chunked > checkpointed > in_backward


def test_a_compiled_run_trains_the_weights_of_a_plain_one() -> None:
    assert trainable(traced("torchtune-003")[0]) == trainable(traced("torchtune-002")[0])


def outcome(name: str, error: float | None, **row: str) -> Outcome:
    return Outcome(
        {**ROWS[name], **row}, 100.0, None if error is None else 100.0 * (1 + error), "why"
    )


def test_summary_counts_errors_and_reasons() -> None:
    figures = summary(
        [outcome("litgpt-001", 0.02), outcome("litgpt-002", -0.2), outcome("litgpt-003", None)]
    )
    assert (figures["rows"], figures["predicted"]) == (3, 2)
    assert figures["median_error"] == pytest.approx(0.11)
    assert figures["worst_error"] == pytest.approx(0.2)
    assert figures["within_10_percent"] == 0.5
    assert figures["inexpressible"] == {"litgpt-003": "why"}


def test_signs_are_of_groups_of_eight_and_more() -> None:
    many = signs([outcome("litgpt-001", 0.01) for _ in range(8)])
    assert many["method lora"] == {
        "rows": 8,
        "too_high": 8,
        "chance": 2 / 2**8,
        "median": pytest.approx(0.01),
    }
    assert signs([outcome("litgpt-001", 0.01) for _ in range(7)]) == {}


def test_table_shows_every_row_in_its_own_unit() -> None:
    shown: list[Any] = published_memory.table(
        [outcome("litgpt-001", 0.5), outcome("torchtune-002", None)]
    ).splitlines()
    assert "+50.00%" in shown[2]
    assert "60.0 GiB | - | why" in shown[3]


def test_paged_state_of_large_tensors_is_not_the_devices() -> None:
    large, little = (torch.nn.Parameter(torch.zeros(count)) for count in (100_000, 99_999))
    optimizer = published_memory.StateOnHost([{"params": [large, little]}])
    optimizer.step()
    assert large not in optimizer.state
    assert {each.dtype for each in optimizer.state[little].values()} == {torch.float32}
