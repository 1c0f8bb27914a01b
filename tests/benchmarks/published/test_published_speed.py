"""The rows of published speeds as runs of autofit, and what is told of them."""

from dataclasses import replace

import pytest

from autofit.core.workload import Workload
from autofit.techniques import canonicalize, refuse
from benchmarks import published_speed
from benchmarks.published_report import (
    Outcome,
    figures,
    groups_table,
    left_out,
    pairs_named,
    rank_correlation,
)
from benchmarks.published_runs import card_of, inexpressible, length_of, measured, rows, run_of

ROWS = {row["id"]: row for row in rows("published_speed")}
RANKS = {row["id"]: row for row in rows("published_multi_gpu")}


def outcome(measured: float, predicted: float, **changes: str) -> Outcome:
    return Outcome({**ROWS["fms-013"], **changes}, 1.0, measured, predicted)


def test_every_judged_row_is_a_run_and_every_other_has_a_reason() -> None:
    judged = [name for name, row in ROWS.items() if row["judged"] == "yes"]
    assert (len(ROWS), len(judged)) == (127, 59)
    assert [name for name, row in ROWS.items() if inexpressible(row) is None] == judged
    assert (len(RANKS), sum(inexpressible(row) is None for row in RANKS.values())) == (142, 125)


@pytest.mark.parametrize("name", ["fms-013", "torchtune-019", "torchao-004", "fms-071"])
def test_a_row_is_a_config_that_is_possible(name: str) -> None:
    workload, config, hardware = run_of(ROWS[name])
    canonical = canonicalize(config, workload, hardware)
    assert refuse(canonical, workload, hardware) is None
    assert canonical["micro_batch_size"] == int(ROWS[name]["micro_batch"])
    assert workload.effective_batch_size == int(ROWS[name]["micro_batch"]) * int(
        ROWS[name]["grad_accum"]
    )


def test_knobs_say_what_a_row_says() -> None:
    _, config, hardware = run_of(ROWS["torchtune-010"])
    assert hardware.name == "NVIDIA A100 80GB"
    assert {
        "quantization": "nf4-dq",
        "compile": "default",
        "loss": "chunked",
    }.items() <= config.items()
    assert config["lora_targets"] == "down_proj+gate_proj+o_proj+q_proj+up_proj+v_proj"
    _, config, _ = run_of(ROWS["fms-128"])
    assert {
        "kernels": "liger",
        "loss": "fused",
        "attention": "flash",
        "precision": "bf16",
    }.items() <= config.items()


def test_rows_of_several_cards_are_of_that_many() -> None:
    _, config, hardware = run_of(RANKS["torchtitan-008"])
    assert (hardware.devices, hardware.nodes) == (8, 1)
    assert {
        "data_parallel": "fsdp",
        "context_parallel": 2,
        "precision": "fp8",
    }.items() <= config.items()
    workload, _, hardware = run_of(RANKS["torchtitan-018"])
    assert (hardware.devices, hardware.nodes, workload.effective_batch_size) == (8, 8, 128)


def test_a_step_took_as_long_as_its_tokens_say() -> None:
    assert measured(ROWS["fms-013"]) == 4.753
    assert measured(ROWS["torchtune-002"]) == pytest.approx(2 * 4096 / 7075)
    assert length_of(ROWS["fms-273"]) > length_of(ROWS["fms-275"])  # padded, and not


def test_figures_tell_how_far_and_which_way_predictions_are_off() -> None:
    told = figures([outcome(1.0, 0.5), outcome(1.0, 1.0), outcome(1.0, 1.1)], 1.35)
    assert told["median_factor"] == pytest.approx(1.1)
    assert told["worst"] == 2.0
    assert told["bias"] > 1.0
    assert told["within_1.35"] == pytest.approx(2 / 3)


def test_the_faster_of_two_is_named_only_where_they_differ() -> None:
    outcomes = [
        outcome(1.0, 1.0),
        outcome(1.1, 0.9),
        outcome(2.0, 1.5),
        outcome(1.0, 9.0, model="another"),
    ]
    assert pairs_named(outcomes) == (2, 2)
    assert pairs_named([outcome(1.0, 2.0), outcome(2.0, 1.0)]) == (1, 0)


def test_ranks_are_compared_not_values() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3], [1, 2, 3]) is None


def test_tables_name_groups_and_reasons() -> None:
    told = groups_table(
        [outcome(1.0, 1.0), outcome(1.0, 2.0, gpu="T4")], 1.35, lambda each: each.row["gpu"]
    )
    assert [line.split(" | ")[0] for line in told.splitlines()[2:]] == [
        "| A100 80GB",
        "| T4",
        "| all",
    ]
    assert "GPTQ kernels: 14" in left_out(list(ROWS.values()), inexpressible)


def test_a_run_prints_what_it_predicts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(row: dict[str, str]) -> tuple[Workload, object, object]:
        workload, config, hardware = run_of(row)
        model = workload.model
        assert hasattr(model, "config")
        config_json = {**model.config, "num_hidden_layers": 1, "vocab_size": 64}
        return replace(workload, model=replace(model, config=config_json)), config, hardware

    monkeypatch.setattr(published_speed, "run_of", small)
    assert published_speed.main(["--only", "torchtune-002"]) == 0
    printed = capsys.readouterr().out
    assert "| torchtune-002 | Llama-3.2-3B | full, 2 x 4096 | 7075 |" in printed
    assert card_of(ROWS["torchtune-002"]) in printed
