"""pipeline_schedule: of stages alone; 1f1b unless told, and the only one that is searched."""

from dataclasses import replace

import pytest

from autofit.core.config import Config
from autofit.techniques import refuse, technique_named
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical
from tests.techniques.test_pipeline_parallel import TRAITS
from tests.tiny import CPU


def test_what_it_is() -> None:
    assert canonical()["pipeline_schedule"] is None
    assert canonical(pipeline_schedule="gpipe")["pipeline_schedule"] is None
    assert canonical(pipeline_parallel=2)["pipeline_schedule"] == "1f1b"
    staged = canonical(pipeline_parallel=2, pipeline_schedule="gpipe")
    assert staged["pipeline_schedule"] == "gpipe"


def test_where_it_is_searched() -> None:
    choices = technique_named("pipeline_schedule").choices
    assert choices(CPU) == (None,)
    assert choices(EIGHT) == ("1f1b",)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "blocks", "reason"),
    [
        (8, 16, 16, None),
        (8, 24, 16, None),
        (8, 20, 16, None),
        (8, 17, 16, "17 micro-batches do not go through 8 stages in 2 rounds"),
        (8, 16, 15, "15 repeated blocks, fewer than 2 for each of 8 stages; use 1f1b"),
    ],
)
def test_chunks_want_rounds_and_blocks(
    stages: int, micro_batches: int, blocks: int, reason: str | None
) -> None:
    traits = replace(TRAITS, blocks=blocks)
    workload = replace(WORKLOAD, effective_batch_size=micro_batches, traits=traits)
    knobs = canonical(pipeline_parallel=stages, pipeline_schedule="interleaved")
    config = Config(knobs).replace(micro_batch_size=1, gradient_accumulation_steps=micro_batches)

    found = refuse(config, workload, EIGHT)
    assert (found is None) if reason is None else (reason in str(found))
