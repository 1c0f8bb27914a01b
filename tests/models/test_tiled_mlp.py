"""MLPs in tiles compute what they did, and hold less of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.models import resolve, workload_from_source
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.models.tiled_mlp import TiledMlp
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.tiny import CPU

WIDE = {"hidden_size": 32, "intermediate_size": 512}


def workload_of(count: int | None, tokens: int = 64) -> Workload:
    tiles = None if count is None else TiledMlp(count)
    model = replace(tiny.llama(**WIDE), tiles=tiles)
    made = huggingface_workload(model, sequence_length=tokens, effective_batch_size=4)
    return replace(made, traits=None)


def test_tiles_compute_what_the_whole_does() -> None:
    found = []
    for count in (None, 3):
        made = workload_of(count)
        setup = build(made, {"precision": "fp32"}, CPU)
        losses = [train_step(setup, made.batch(4)).item() for _ in range(3)]
        found.append([*losses, *(p.detach().sum().item() for p in setup.model.parameters())])
        setup.close()
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"activation_checkpointing": "full", "precision": "bf16-mixed"},
        {"lora_rank": 8, "precision": "bf16-mixed", "micro_batch_size": 2},
        {"optimizer_in_backward": True, "precision": "bf16"},
    ],
    ids=str,
)
def test_bytes_are_those_of_real_steps(knobs: dict[str, Any]) -> None:
    made = workload_of(4)
    assert peak(traced(made, **knobs)) == tracked(made, knobs)


def test_tiles_hold_less() -> None:
    whole, halves, eighths = (peak(traced(workload_of(count))) for count in (None, 2, 8))
    assert eighths < halves < 0.8 * whole


def test_tiles_are_divided_weights_too() -> None:
    knobs = {"data_parallel": "fsdp", "precision": "bf16-mixed"}
    several = AMPERE.of_several(2)
    tiled = peak(traced(workload_of(8), several, **knobs))
    assert tiled < peak(traced(workload_of(None), several, **knobs))


def test_the_number_of_tiles_follows_from_the_tokens() -> None:
    assert [TiledMlp().of(tokens) for tokens in (5, 32_768, 62_500)] == [1, 1, 2]
    assert TiledMlp(4).of(5) == 4
    for tiles in (TiledMlp(), TiledMlp(3)):
        assert TiledMlp.of_source(tiles.to_source()) == tiles
    assert TiledMlp.of_source(None) is None
    with pytest.raises(InputError, match="the count of tiles"):
        TiledMlp.of_source({"count": 0})


def test_such_a_workload_is_made_again_from_its_source() -> None:
    source = {"kind": "preset", "model": "llama-3.2-1b", "tiles": {}}
    again = workload_from_source(source, {"task": "causal-lm", "sequence_length": 16})
    assert isinstance(again.model, HuggingFaceModel)
    assert again.model.tiles == TiledMlp()


def test_positions_that_are_turned_go_on() -> None:
    with pytest.raises(InputError, match="at most 131072 tokens"):
        resolve("llama-3.2-1b", sequence_length=200_000)
    made = resolve("llama-3.2-1b", sequence_length=200_000, stretches=True)
    assert made.sequence_length == 200_000
    assert made.source["options"] == {"max_position_embeddings": 200_000}
    assert "options" not in resolve("llama-3.2-1b", sequence_length=64, stretches=True).source
    with pytest.raises(InputError, match="at most 1024 tokens"):
        resolve("gpt2", sequence_length=2048, stretches=True)


def test_a_model_without_such_layers_is_told() -> None:
    with pytest.raises(InputError, match="no MLPs of gate_proj"):
        TiledMlp().apply(torch.nn.Sequential(torch.nn.Linear(2, 2)))
