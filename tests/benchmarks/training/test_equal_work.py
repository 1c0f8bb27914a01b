"""The benchmark of equal work runs on one rank and on two, and says what is wrong."""

import random
from dataclasses import replace

import pytest

from benchmarks import equal_work
from benchmarks.drawn_losses import COUPLING, SPLITTING, Case


def few(seed: int, splitting: int) -> list[Case]:
    draw = random.Random(seed)
    return [kind(draw) for kind in (*SPLITTING[4:8], *COUPLING[:2])]


def test_a_few_losses_on_one_rank_and_on_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(equal_work, "drawn", few)
    assert equal_work.main([]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 losses that split are split, with the right count" in out
    assert "0 of 2 that couple samples are split: none" in out


def test_what_is_split_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that claims to couple samples, and does not."""
    monkeypatch.setattr(
        equal_work, "drawn", lambda *_: [few(0, 0)[0], replace(few(0, 0)[1], splits=False)]
    )
    assert equal_work.main([]) == 1
    assert "1 of 1 that couple samples are split: classes" in capsys.readouterr().out
