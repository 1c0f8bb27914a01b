"""A cell shows what changes once and replaces it, and objects of core show themselves as `report` says."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autofit.core.notebook import Cell, as_html, in_notebook


@pytest.mark.parametrize(
    ("shell", "expected"),
    [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)],
)
def test_only_a_kernel_is_a_notebook(
    monkeypatch: pytest.MonkeyPatch, shell: Any, expected: bool
) -> None:
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_a_cell_is_shown_once_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(("replaced", data["text/html"]))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append((data["text/plain"], data["text/html"]))
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    cell = Cell()
    cell.show("1 < 2")
    cell.show("1 < 2")
    cell.show("two", "<b>two</b>")
    assert shown == [("1 < 2", "<pre>1 &lt; 2</pre>"), ("replaced", "<b>two</b>")]


def test_what_nobody_has_said_is_shown_as_text() -> None:
    assert as_html(object()) is None
