"""The prediction of rows of several cards."""

from dataclasses import replace
from typing import Any

import pytest

from autofit.core.hardware import GIB
from autofit.estimate.peak import peak_of
from autofit.estimate.trace import trace
from autofit.models.huggingface import HuggingFaceModel
from benchmarks import published_ranks, published_runs, published_titan
from benchmarks.published_ranks import memory_table, outcome_of
from benchmarks.published_runs import rows, run_of
from benchmarks.published_speed import work_of
from benchmarks.published_titan import titan_run
from benchmarks.published_trainer import one_root, trainer_run

ROWS = {row["id"]: row for row in rows("published_multi_gpu")}


def test_a_row_is_predicted_as_a_step_of_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_ranks, "_traits", {})
    told = outcome_of(ROWS["llmfoundry-149"])
    assert told.work == 104 * 512 * int(ROWS["llmfoundry-149"]["grad_accum"])
    assert 0.7 < told.ratio < 1.4


def test_tokens_of_a_context_group_are_shared() -> None:
    workload, _, _ = run_of(ROWS["torchtitan-008"])  # FSDP 4, CP 2
    assert work_of(ROWS["torchtitan-008"], workload) == 65536 / 2


def test_memory_is_held_against_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        published_ranks, "memory_of", lambda row: float(row["mem_value"]) * 1.1 * GIB
    )
    told = memory_table([ROWS["fms-012"], ROWS["torchtitan-001"]])
    assert (
        "| fms-012 | Mistral-7B-v0.1 | full, 4 x 4096 | allocated | 37.11 | 33.74 | +10.0% |"
        in told
    )
    assert "pytorch/torchtitan: 1 rows: median error 10.0%, bias +10.0%, 100% within 12 %" in told
    assert "all: 2 rows: median error 10.0%" in told


def short(monkeypatch: pytest.MonkeyPatch, *, layers: int) -> None:
    """The rows' models with so few layers; Trainer's with few words, so that its blocks need most."""
    shape = replace(published_titan.shape_of("Llama-3.1-8B"), layers=layers)
    monkeypatch.setattr(published_titan, "shape_of", lambda model: shape)
    preset = published_runs.preset_model

    def cut(name: str) -> HuggingFaceModel:
        model = preset(name)
        return replace(
            model, config={**model.config, "num_hidden_layers": layers, "vocab_size": 1024}
        )

    monkeypatch.setattr(published_runs, "preset_model", cut)
    configs = published_runs._configs()
    configs["gpt_bigcode-santacoder"]["n_layer"] = layers
    monkeypatch.setattr(published_runs, "_configs", lambda: configs)


def kept_by_a_layer(
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, str],
    run: Any,
    *,
    layers: int,
    width: int = 4096,
) -> float:
    """What a further layer adds at the peak, in hidden states of 16 bits."""
    peaks = []
    for count in (layers, layers + 1):
        short(monkeypatch, layers=count)
        workload, config, hardware = run(row)
        with one_root():
            found = trace(workload, config, hardware)
        peaks.append(
            sum(peak_of(found, hardware).parts[part] for part in ("activations", "temporary"))
        )
    return (peaks[1] - peaks[0]) / (int(row["micro_batch"]) * int(row["seq_len"]) * width * 2)


@pytest.mark.parametrize(("name", "kept"), [("torchtitan-001", 7.75), ("torchtitan-002", 6.75)])
def test_of_torchtitan_a_layer_saves_attention_and_every_second_product(
    monkeypatch: pytest.MonkeyPatch, name: str, kept: float
) -> None:
    """Its input, q, v, gate, down and attention; compiled all but down."""
    assert kept_by_a_layer(monkeypatch, ROWS[name], titan_run, layers=1) == pytest.approx(
        kept, rel=0.01
    )


def test_of_frozen_blocks_inputs_and_their_gradients_stay_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kept_by_a_layer(monkeypatch, ROWS["fms-163"], trainer_run, layers=3) == pytest.approx(
        2, rel=0.01
    )


def test_of_a_model_whose_cache_is_on_keys_values_and_queries_stay_with_its_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = kept_by_a_layer(monkeypatch, ROWS["fms-004"], trainer_run, layers=2, width=2048)
    assert kept == pytest.approx(1 + 1 + 2 * 128 / 2048, rel=0.01)
