"""A notebook as the place where output is shown: whether this process is one's kernel, a cell's output that changes in
place, and how nouns show themselves there.

IPython is imported where it has been before: a notebook's kernel is made of it.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from html import escape
from typing import Any


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


class Cell:
    """Output of the running cell that can be replaced, also from other threads."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: tuple[str, str | None] = ("", None)
        self._context = contextvars.copy_context()  # from which ipykernel tells, in any thread, which cell this is

    def show(self, text: str, markup: str | None = None) -> None:
        """Show lines of text, or HTML in their place where it can be shown."""
        if (text, markup) == self._shown:
            return
        from IPython.display import display

        self._shown = text, markup
        data = {"text/plain": text, "text/html": markup or f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._context.copy().run(self._handle.update, data, raw=True)


@functools.singledispatch
def as_html(shown: object) -> str | None:
    """How an object of core shows itself in a notebook, which the room `report` says; None: as text."""
    return None
