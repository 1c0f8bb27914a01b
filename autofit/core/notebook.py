"""Output in notebooks: a cell's output that changes in place, and objects as HTML."""

import contextvars
import functools
import sys
from html import escape
from typing import Any


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Cell:
    """Replaceable output of the running cell, also from other threads."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: tuple[str, str | None] = ("", None)
        self._context = contextvars.copy_context()  # tells ipykernel in any thread the cell

    def show(self, text: str, markup: str | None = None) -> None:
        """Show lines of text, or HTML instead where the front end can."""
        if (text, markup) == self._shown:
            return

        from IPython.display import display  # the kernel of a cell has imported it already

        self._shown = (text, markup)
        data = {"text/plain": text, "text/html": markup or f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._context.copy().run(self._handle.update, data, raw=True)


@functools.singledispatch
def as_html(value: object) -> str | None:
    """The HTML of an object of core in a notebook, registered by `report`; None: plain text."""
    return None
