"""A search that runs in a notebook: the terminal's lines as HTML, in one output that changes and stays."""

from typing import Any

import pytest
from rich.text import Text

from autofit.core.events import Event
from autofit.report import CellRegion, LiveDisplay


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr("autofit.report.cell.Cell.show", lambda self, text, html: found.append((text, html)))
    return found


def test_lines_are_drawn_as_html_when_they_change(shown: list[Any]) -> None:
    region = CellRegion()
    for line in (Text("a < b", "bold"), Text("a < b", "bold"), Text("c")):
        region.draw([line])
    assert [text for text, _ in shown] == ["a < b\n", "c\n"]
    assert shown[0][1].startswith("<pre")
    assert '<span style="font-weight: bold">a &lt; b</span>' in shown[0][1]


def test_a_search_from_its_events(shown: list[Any], events: list[Event]) -> None:
    with LiveDisplay(CellRegion(), seconds=lambda: 0.0) as live:
        for event in events:
            live(event)
    during, after = shown[-2][0], shown[-1][0]
    assert "writing the result" in during
    assert "writing the result" not in after
    assert "tiny-llama on a test's CPU within 2.00 GiB" in after
    assert "6,400 tokens/s (probe 3)" in after
    assert not any("a note about" in text or "\x1b" in text + html for text, html in shown)
