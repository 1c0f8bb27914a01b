"""What rows come to, and which refusals are good ones."""

from typing import Any

import pytest

from benchmarks.zoo.table import Summary, document, errors, is_sentence, problems

GOOD = {"outcome": "works", "message": ""}
REFUSED = {
    "outcome": "refused",
    "message": "lora_rank: the model has no linear layers; use lora_rank 0.",
}
TRACEBACK = {
    "outcome": "fails",
    "message": "Traceback (most recent call last):\n  x\nRuntimeError: no",
}


def row(predicted: int | None = 100, **changes: Any) -> dict[str, Any]:
    figures = {"predicted": predicted, "probed": 100, "prediction": GOOD, "probe": GOOD}
    settings = {name: dict(figures) for name in ("full", "lora", "qlora")}
    levers = dict.fromkeys(("lora", "checkpointing", "nf4"), GOOD)
    whole = {
        "parameters": 9,
        "looked_at": GOOD,
        "search": GOOD,
        "settings": settings,
        "levers": levers,
        "seconds": 1.0,
    }
    return whole | changes


@pytest.mark.parametrize(
    ("message", "good"),
    [
        (REFUSED["message"], True),
        ("the model has no linear layers.", False),  # and what now?
        ("the model has no linear layers; use lora_rank 0", False),
        (f"{'word ' * 200}; use none.", False),
        ("use none.\nTraceback (most recent call last):", False),
    ],
)
def test_a_refusal_is_one_sentence_with_a_remedy(message: str, good: bool) -> None:
    assert is_sentence(message) == good


def test_a_family_works_where_its_levers_work_or_are_refused_well() -> None:
    assert problems(row()) == []
    assert problems(row(levers={"lora": REFUSED, "checkpointing": GOOD, "nf4": REFUSED})) == []
    assert problems(row(levers={"lora": GOOD, "checkpointing": GOOD, "nf4": TRACEBACK})) == [
        "nf4: RuntimeError: no"
    ]
    assert problems(row(looked_at=REFUSED, settings={}))[0].startswith("model: lora_rank")
    # a refusal of the whole is none that works
    assert problems(row(search=REFUSED))[0].startswith("search: ")
    assert problems({"failed": "took more than 240 s"}) == ["row: took more than 240 s"]
    untraced = row()
    untraced["settings"]["full"] |= {"predicted": None, "prediction": REFUSED}
    assert problems(untraced)[0].startswith("estimate: ")


def test_errors_have_a_median_and_a_worst_low() -> None:
    found = Summary.of(errors([row(101), row(100), row(97), row(None)], "full"))
    assert found is not None
    assert (found.rows, found.median, found.most, found.lowest) == pytest.approx(
        (3, 0.01, 0.03, -0.03)
    )
    assert Summary.of([]) is None


def test_the_document_says_what_rows_come_to_and_what_keeps_families_from_working() -> None:
    rows = {
        "transformers/llama/causal-lm": row(101),
        "transformers/vit/image-classification": row(search=TRACEBACK),
    }
    rows["transformers/x/ctc"] = {"left_out": "ImportError: needs timm"}
    text = document(rows, ["torch 2."])
    assert "1 of 2: 50.0% (2 of them searched)" in text
    assert "| 1 | search: RuntimeError: no | vit |" in text
    assert (
        "| llama | causal-lm | 9 | yes | yes | yes | yes | yes | +1.000% | +1.000% | +1.000% | - | 1 |"
        in text
    )
    assert "| vit | image-classification | 9 | yes | **fails** |" in text
    assert "| x | ImportError: needs timm |" in text
