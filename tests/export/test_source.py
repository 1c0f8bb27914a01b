"""A deviation as a sentence, and batch sizes that contradict."""

from autofit.export.source import Deviation, batches_fit
from tests.export.sources import source


def test_it_is_one_sentence() -> None:
    assert (
        str(Deviation("optimizer_in_backward", True, "it waits"))
        == "optimizer_in_backward true: it waits."
    )
    assert str(Deviation("optimizer", None, "it has its own")) == "optimizer null: it has its own."
    assert (
        Deviation("loss", "fused", "x", may_not_fit=True).message
        == "loss fused: x. It may no longer fit."
    )
    assert Deviation("loss", "fused", "x").message == "loss fused: x."


def test_batch_sizes_that_contradict_are_refused() -> None:
    assert batches_fit(source()) is None
    contradiction = source("cuda", "causal-lm", {"effective_batch_size": 16})
    assert "is not the effective batch of 16" in str(batches_fit(contradiction))
