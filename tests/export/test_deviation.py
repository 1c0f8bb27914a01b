"""A deviation as a sentence and as data."""

from autofit.export.deviation import Deviation


def test_it_is_one_sentence() -> None:
    assert str(Deviation("optimizer_in_backward", True, "it waits")) == "optimizer_in_backward true: it waits."
    assert str(Deviation("optimizer", None, "it has its own")) == "optimizer null: it has its own."
    assert Deviation("loss", "fused", "x", may_not_fit=True).message == "loss fused: x. It may no longer fit."
    assert Deviation("loss", "fused", "x").message == "loss fused: x."


def test_it_is_plain_data() -> None:
    assert Deviation("loss", "fused", "x").to_dict() == {
        "knob": "loss",
        "value": "fused",
        "instead": "x",
        "may_not_fit": False,
    }
