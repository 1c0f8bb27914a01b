"""What pictures are drawn with: scales, round ticks, and elements in which no words are markup."""

from xml.etree import ElementTree

import pytest

from autofit.report.html.svg import Picture, Scale, apart, powers, round_numbers, steps


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.17, [0.0, 0.05, 0.1, 0.15]),
        (930.0, 5210.0, [1000.0, 2000.0, 3000.0, 4000.0, 5000.0]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks_are_round_and_within(low: float, high: float, ticks: list[float]) -> None:
    assert round_numbers(low, high) == pytest.approx(ticks)


def test_ticks_of_logarithms() -> None:
    assert powers(0.04, 3.0) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    assert powers(1.0, 100_000.0) == pytest.approx([1, 10, 100, 1000, 10_000, 100_000])


def test_scales() -> None:
    up = Scale(0.0, 10.0, 200.0, 100.0)
    assert [up(0), up(5), up(10)] == [200, 150, 100]
    logarithmic = Scale(1.0, 100.0, 0.0, 100.0, logarithmic=True)
    assert logarithmic(10.0) == pytest.approx(50.0)
    assert Scale(2.0, 2.0, 0.0, 100.0)(2.0) == 50.0
    assert Scale(0.0, 8.3, 0.0, 100.0, marked=(1, 2, 8)).ticks(5) == [1, 2, 8]


def test_words_are_no_markup() -> None:
    picture = Picture(100, 50, 'a <b> & "c"')
    picture.text(1, 2.25, "<script>")
    picture.draw("a", href="#x", tabindex=-1, title=None)
    root = ElementTree.fromstring(picture.markup())
    assert root.get("aria-label") == 'a <b> & "c"'
    assert root[0].text == "<script>"
    assert root[0].attrib == {"x": "1", "y": "2.2", "class": "label"}
    assert root[1].attrib == {"href": "#x", "tabindex": "-1"}
    document = ElementTree.fromstring(picture.document(".paper { fill: white; }"))
    assert document.get("width") == "100"


def test_stairs_and_labels_apart() -> None:
    assert steps([(0, 10), (5.04, 20), (10, 5)]) == "M0,10H5V20H10V5"
    assert apart([10.0, 0.0, 11.0], 5.0) == [0.0, 10.0, 15.0]
