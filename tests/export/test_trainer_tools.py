"""Keys of tools that are built on Trainer."""

from autofit.export.tool import Request
from autofit.export.trainer_tools import arguments, batches_fit, trainer_case
from tests.export.sources import source


def test_off_is_written_out() -> None:
    assert arguments("compile")(Request(source(), "1.0")).keys == {"torch_compile": False}
    assert arguments("compile")(Request(source(compile="default"), "1.0")).keys["torch_compile"] is True


def test_flash_attn_is_there_if_it_was_when_this_was_measured() -> None:
    assert not trainer_case(source()).flash_attn
    assert trainer_case(source("cuda", "causal-lm", {"versions": {"flash-attn": "2.8"}})).flash_attn


def test_batch_sizes_that_contradict_are_refused() -> None:
    assert batches_fit(source()) is None
    contradiction = source("cuda", "causal-lm", {"effective_batch_size": 16})
    assert "is not the effective batch of 16" in str(batches_fit(contradiction))
