"""Where the memory goes: what is drawn is what was followed, and how far it is from what was measured is told."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from autofit.core.budget import Budget
from autofit.core.hardware import GIB
from autofit.core.record import Record
from autofit.report.html.memory import breakdown, timeline_picture, timeline_words, traced_tiers

Records = Callable[..., Record]


def test_a_bar_for_each_tier_that_was_followed(record: Records) -> None:
    picture = breakdown(record())
    assert picture
    markup = picture.markup()
    assert "all weights: 1.50 GiB" in markup
    assert "LoRA: 1.50 GiB" in markup
    assert "measured 0.90" in markup
    bars = [
        float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)" [^>]*class="band', markup)
    ]
    first = bars[: len(bars) // 2]
    total = sum(first) + 0.8 * len(first)
    assert [round((each + 0.8) / total * 20) for each in first] == [3, 2, 3, 4, 8]


@pytest.mark.parametrize(("budget", "anchor"), [(1000.0, "start"), (2.0, "middle"), (0.5, "end")])
def test_what_was_measured_is_written_inside_the_picture(
    record: Records, budget: float, anchor: str
) -> None:
    picture = breakdown(record(budget=Budget(int(budget * GIB), GIB)), 340)
    assert picture
    (label, *_) = re.findall(r"<text [^>]*>measured", picture.markup())
    assert f'text-anchor="{anchor}"' in label


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        (1.5, "as measured"),
        (1.8, "20 % more than measured"),
        (1.4995, "as measured"),
        (1.2, "20 % less than measured"),
    ],
)
def test_how_far_it_is_from_what_was_measured(
    record: Records, predicted: float, words: str
) -> None:
    whole = record()
    line = dataclasses.replace(whole.timelines["full"], peak_bytes=int(predicted * GIB))
    told = timeline_words(dataclasses.replace(whole, timelines={"full": line}), "full")
    assert words in told
    assert "Shown is the last of 4 micro-batches, and the update." in told


def test_a_timeline_of_another_config_is_not_shown(record: Records) -> None:
    whole = record()
    other = dataclasses.replace(whole, timelines={"lora": whole.timelines["full"]})
    assert traced_tiers(other) == {}
    assert breakdown(other) is None
    assert timeline_picture(other, "lora") is None


def test_a_peak_before_the_step_is_told(record: Records) -> None:
    whole = record()
    line = dataclasses.replace(whole.timelines["full"], peak_phase="build", peak_bytes=2 * GIB)
    told = timeline_words(dataclasses.replace(whole, timelines={"full": line}), "full")
    assert "before the step, while the model is made" in told


def test_a_small_picture_has_fewer_moments(record: Records) -> None:
    whole = record()
    line = whole.timelines["full"]
    moments = tuple((1, 1, 1, place % 7, 0, 0, 1) for place in range(400))
    long = dataclasses.replace(line, moments=moments, at=tuple(place / 400 for place in range(400)))
    long_record = dataclasses.replace(whole, timelines={"full": long})
    small, large = (
        timeline_picture(long_record, "full", 360),
        timeline_picture(long_record, "full", 720),
    )
    assert small and large
    assert small.markup().count("H") < 0.5 * large.markup().count("H")
