"""A terminal as far as our display uses one: what is on its screen after all that was written to it."""

from __future__ import annotations

import re

from rich.cells import cell_len

_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Screen:
    """Rows of text and a cursor; raises AssertionError for a code that our display has no business with."""

    def __init__(self, columns: int) -> None:
        self.codes: list[str] = []
        self._rows: list[list[str]] = [[]]  # of cells; a wide sign is followed by an empty one
        self._columns = columns
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """What a program has written."""
        place = 0
        while place < len(text):
            code = _CODE.match(text, place)
            if code:
                self._obey(code[1], code[2])
                place = code.end()
            else:
                self._put(text[place])
                place += 1

    @property
    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip()

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self._column = 0
        elif sign == "\n":
            self._row += 1
            self._column = 0  # as the terminal's driver does it
            if self._row == len(self._rows):
                self._rows.append([])
        else:
            assert sign.isprintable(), repr(sign)
            row, wide = self._rows[self._row], cell_len(sign)
            row += [" "] * (self._column + wide - len(row))
            row[self._column : self._column + wide] = [sign, ""][:wide]
            self._column += wide
            assert self._column <= self._columns, f"too wide: {''.join(row)!r}"

    def _obey(self, number: str, letter: str) -> None:
        self.codes.append(number + letter)
        count = int(number or 1) if letter in "AB" else 0
        if letter == "A":
            self._row -= count
            assert self._row >= 0, "above the first row"
        elif letter == "B":
            self._row += count
            assert self._row < len(self._rows), "below the last row"
        elif letter == "K":
            del self._rows[self._row][self._column if number in ("", "0") else 0 :]
        else:
            assert letter == "m" or number == "?25", f"code {number}{letter}"
