"""The head of an export: what was measured, the loss, and each departure with what follows from it."""

from autofit.export.deviation import Deviation
from autofit.export.heading import heading
from tests.export.found import found


def said(*departures: Deviation, loss: str = "standard", **others: object) -> str:
    given = found("cuda", "causal-lm", others or None, loss=loss)
    return " ".join("\n".join(heading("Tool 1.0", given, departures=departures, run="tool run")).split())


def test_the_work_and_the_loss_are_named() -> None:
    text = said()
    assert "with the keys of Tool 1.0, by autofit 0.1.0." in text
    assert "The work: causal-lm, 8 samples per optimizer step, 2048 tokens per sample." in text
    assert "The loss: the model's own, with the logits of all tokens in memory." in text
    assert "The loss: chunked, which never holds the logits of all tokens." in said(loss="chunked")
    assert text.endswith("tool run")


def test_departures_are_listed_or_said_to_be_none() -> None:
    assert "Every knob of the measured config is told." in said()
    text = said(Deviation("compile", "default", "it does not", may_not_fit=True), Deviation("loss", "fused", "x"))
    assert "- compile default: it does not. It may no longer fit. - loss fused: x." in text


def test_what_was_not_measured_is_not_said_to_be() -> None:
    text = said(measured=None, versions={})
    assert "it was not measured" in text
    assert "Measured with" not in text


def test_lines_stay_comments() -> None:
    lines = heading("Tool 1.0", found(), departures=[Deviation("x", "y", "a\nb " * 60)], run="run")
    assert all("\n" not in line and len(line) <= 104 for line in lines)


def test_how_memory_was_reserved_is_said_of_a_card() -> None:
    assert "Memory: measured under PYTORCH_ALLOC_CONF=expandable_segments:True, to be set in" in said()
    card = {"device": "cuda", "name": "a card", "allocator": "expandable_segments:False"}
    assert "PYTORCH_ALLOC_CONF=expandable_segments:False" in said(hardware=card)
    assert "PYTORCH_ALLOC_CONF" not in " ".join(heading("Tool 1.0", found("cpu"), departures=(), run="run"))
