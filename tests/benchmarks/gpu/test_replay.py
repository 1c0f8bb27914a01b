"""What a replay takes for true."""

from pathlib import Path

import pytest

from autofit.core.config import Config
from autofit.search.predictions import Predictions
from benchmarks.gpu import replay
from benchmarks.gpu.replay import NOISE, SyntheticTruth

NF4 = Config({"precision": "bf16", "lora_rank": 16, "quantization": "nf4", "compile": "none"})
COMPILED = Config({**NF4, "compile": "default"})


@pytest.fixture
def truth() -> SyntheticTruth:
    expected = Predictions.of([NF4, COMPILED], [1e9, 2e9], [10.0, 6.0])
    return SyntheticTruth(expected, {"LoRA on nf4, resident": 0.8})


def test_a_config_takes_what_is_predicted_corrected_by_what_its_kind_took(
    truth: SyntheticTruth,
) -> None:
    # nothing was measured of the second's kind
    for config, seconds in ((NF4, 12.5), (COMPILED, 6.0)):
        row = truth[config]
        assert row.step_seconds == pytest.approx(seconds, rel=4 * NOISE)
        assert len(set(row.medians)) == 3, "probes differ"
        assert row.medians == truth[config].medians, (
            "and are the same when they are asked for again"
        )
    assert list(truth) == [NF4, COMPILED]


def test_compiling_takes_its_time(truth: SyntheticTruth) -> None:
    plain, compiled = truth[NF4].probes[0], truth[COMPILED].probes[0]
    assert (
        compiled["seconds"] - compiled["warmup_seconds"]
        == plain["seconds"] - plain["warmup_seconds"]
    )
    assert compiled["warmup_seconds"] > 30 > plain["warmup_seconds"]


def test_where_no_card_has_shown_anything_it_says_so() -> None:
    assert replay.told([], 3) == "no card has shown anything yet"


def test_the_stored_rows_of_cards_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a replay but its predictions, which take a minute."""
    asked = []

    def predicted(
        _: object, __: object, configs: list[Config], **___: object
    ) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        places = range(len(configs))
        return [1e9 + 1e7 * place for place in places], [1.0 + place / 100 for place in places]

    results = Path(replay.__file__).parents[1] / "results" / "gpu" / "nvidia-h200"
    monkeypatch.setattr(replay, "predict_all", predicted)
    monkeypatch.setattr(
        replay, "CARD", replay.replace(replay.CARD, settings=_narrow(), space="qlora")
    )
    told = replay.told([results], 1)
    assert len(asked) > 10
    assert "NVIDIA H200: llama-3.1-8b within 24 GiB" in told
    assert "mean regret of the answer" in told


def _narrow() -> dict[str, tuple[str, ...]]:
    few = {
        "precision": "bf16",
        "loss": "chunked",
        "attention": "sdpa",
        "kernels": "none",
        "compile": "none",
    }
    return {
        name: (value,)
        for name, value in {**few, "optimizer": "adamw", "activation_checkpointing": "none"}.items()
    }
