"""Lists on a terminal."""

from collections.abc import Callable

from autofit.report.hanging import POINT, hanging

Shown = Callable[..., str]


def test_a_long_point_stays_right_of_its_dash(shown: Shown) -> None:
    lines = shown(hanging(["A title:", POINT + "one two three four", POINT + "[five]\x1b[31m"]), 14).splitlines()
    assert [line.rstrip() for line in lines] == ["A title:", "  - one two", "    three four", "  - [five]"]
