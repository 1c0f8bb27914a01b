"""A departure as a sentence and as data."""

from autofit.export.departure import Departure


def test_it_is_one_sentence() -> None:
    assert str(Departure("optimizer_in_backward", True, "it waits")) == "optimizer_in_backward true: it waits."
    assert str(Departure("optimizer", None, "it has its own")) == "optimizer null: it has its own."
    assert Departure("loss", "fused", "x", may_not_fit=True).told == "loss fused: x. It may no longer fit."
    assert Departure("loss", "fused", "x").told == "loss fused: x."


def test_it_is_plain_data() -> None:
    assert Departure("loss", "fused", "x").to_dict() == {
        "knob": "loss",
        "value": "fused",
        "instead": "x",
        "may_not_fit": False,
    }
